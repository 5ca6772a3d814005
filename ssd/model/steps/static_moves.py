"""Moving a tree's accepted path together, in all layers with a single launch."""

from __future__ import annotations

import logging
from bisect import bisect_left

import numpy as np
import torch

from ssd.errors import first_line
from ssd.model.kv.kv_cache import SlotKVCache
from ssd.model.steps.buffers import Ints, powers_of_two
from ssd.model.steps.graphs import Recorder, Step

log = logging.getLogger(__name__)

_MOST_MOVES = 256
_COMMON_MOVES = 16


class StaticMoves:
    """`SlotKVCache.move` for numbers of positions that are rounded up, recorded once each.

    A move that is repeated is another move, so it is recorded, and checked, on positions that hold no text.
    """

    def __init__(self, kv_cache: SlotKVCache, *, scratch: int, record: Recorder) -> None:
        """``scratch`` : the first of at least two positions of every slot that never hold text."""
        self._kv_cache = kv_cache
        self._scratch = scratch
        self._record = record
        self._sizes = powers_of_two(1, _MOST_MOVES)
        self._ints = torch.zeros(3 * _MOST_MOVES, dtype=torch.int64, device=kv_cache.device)
        self._sent: Ints = np.zeros(0, np.int64)
        """What was copied last: a driver that reads a host's memory in place may not have read it yet."""
        self._steps: dict[int, Step] = {}
        self._has_failed = scratch + 2 > kv_cache.max_length

    def run(self, slots: Ints, sources: Ints, targets: Ints) -> bool:
        """Move as `SlotKVCache.move` does; False where that must be called instead. Nothing is done then."""
        if len(slots) > _MOST_MOVES or not self._open(size := self._sizes[bisect_left(self._sizes, len(slots))]):
            return False
        # What is too much stays where it is, where there is no text.
        ints = np.full((3, size), self._scratch, np.int64)
        ints[0] = slots[0]
        ints[:, : len(slots)] = slots, sources, targets
        self._fill(ints)
        self._steps[size]()
        return True

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record the sizes that are used most."""
        for size in self._sizes:
            if size <= _COMMON_MOVES:
                self._open(size)

    def _open(self, size: int) -> bool:
        """Whether moves of ``size`` positions are recorded, which they are if they can be."""
        if self._has_failed or size in self._steps:
            return not self._has_failed

        assert self._kv_cache.bytes_per_token  # layers are there: what comes later would not be moved

        def step() -> None:
            self._kv_cache.move_at(*self._ints[: 3 * size].view(3, size))

        try:
            self._fill(
                np.stack([np.zeros(size, np.int64), np.full(size, self._scratch + 1), np.full(size, self._scratch)])
            )
            step()
            recorded = self._record(step)
            self._kv_cache.spoil(0, self._scratch)
            recorded()
            if not self._kv_cache.is_equal(0, self._scratch, self._scratch + 1):
                raise ValueError("it did not move what it should")
        except Exception as failure:  # whatever it is, moving layer by layer is right
            self._has_failed = True
            self._steps.clear()
            log.warning("accepted paths are moved layer by layer: %s", first_line(failure))
            return False
        self._steps[size] = recorded
        return True

    def _fill(self, ints: Ints) -> None:
        # Pageable memory: the driver copies it aside before the call returns, and the host does not wait for the copy.
        self._ints[: ints.size].copy_(torch.from_numpy(ints.reshape(-1)), non_blocking=True)
        self._sent = ints
