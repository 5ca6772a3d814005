"""Tensors that stay where they are: what a pass of fixed shape reads, and what it leaves behind.

A CUDA graph repeats the very kernels it recorded on the very addresses it recorded. So the inputs of every pass are put
into the same memory, and passes are padded to few shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ssd.drafting.token_recycling import TOP_K
from ssd.jit.addresses import kernel
from ssd.model.kv.kv_cache import AttentionKernel, SlotKVCache, SlotRows
from ssd.model.kv.tree import TreeShape
from ssd.model.sampling.sampler import Noise, Sampler, packed_top

Ints = npt.NDArray[np.int64]

_GRIDS = 5
"""Numbers of each position: token, position, place, and what it is sampled with: key, temperature."""

_AHEAD = np.arange(1 << 12)[None]
"""How far behind its row's start each token of a chain stands."""


@kernel
def _fill(
    ints: Ints, rows: int, width: int, slots: Ints, starts: Ints, tokens: Ints, depths: Ints, scratch: int
) -> None:
    """Write tokens, positions and places of ``rows`` x ``width``, and at the end slots and starts, into zeros.

    ``slots``, ``starts`` : int64[B]. ``tokens`` : int64[B, T]. ``depths`` : int64[B or 1, T], how far behind its row's
    start each token stands.
    """
    num_rows, num_tokens = tokens.shape
    count, last = rows * width, len(ints) - 2 * rows
    for row in range(rows):
        is_real = row < num_rows
        start, slot = (starts[row], slots[row]) if is_real else (0, slots[0])
        ints[last + row], ints[last + rows + row] = slot, start
        for t in range(width):
            at = row * width + t
            ints[count + at] = start + t
            ints[2 * count + at] = start + t if is_real else scratch + t
            if is_real and t < num_tokens:
                ints[at] = tokens[row, t]
                ints[count + at] = start + depths[row if len(depths) > 1 else 0, t]


class StepShape(NamedTuple):
    """A pass of ``rows`` rows of ``width`` positions each, trees or chains, over the first ``num_keys`` keys."""

    rows: int
    width: int
    num_keys: int
    is_tree: bool

    @property
    def num_positions(self) -> int:
        """Positions of all rows."""
        return self.rows * self.width


class StepInputs(NamedTuple):
    """What a pass of one shape reads: tokens, int64[B, T], and their rows; and what each position is sampled with, as
    `Sampler` has it: int64[B * T] and float32[B * T].
    """

    tokens: torch.Tensor
    rows: SlotRows
    keys: torch.Tensor
    temperatures: torch.Tensor


class StepBuffers:
    """Inputs and outputs of all shapes in one memory: only one pass is under way at a time.

    Outputs last until the next pass.
    """

    def __init__(
        self,
        max_rows: int,
        max_positions: int,
        max_width: int,
        device: torch.device,
        sampler: Sampler | None = None,
        *,
        keeps_top: bool = False,
    ) -> None:
        """``max_positions`` : rows times width of the largest pass. sampler : chooses the tokens of a pass.

        keeps_top : whether a pass finds the most probable tokens of every position too.
        """
        self._sampler = sampler
        self._ints = torch.zeros(_GRIDS * max_positions + 2 * max_rows, dtype=torch.int64, device=device)
        self._sees = torch.zeros(max_positions * max_width, dtype=torch.bool, device=device)
        self._chosen = torch.zeros(max_positions, dtype=torch.int64, device=device)
        self._top = torch.zeros(max_positions, 2, TOP_K, dtype=torch.int32, device=device) if keeps_top else None
        self._logits: torch.Tensor | None = None
        self._max_positions = max_positions
        self._views: dict[tuple[int, int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        """Of outputs, made once: they cost more than a draft."""

    def inputs(self, shape: StepShape, kv_cache: SlotKVCache, kernel: AttentionKernel | None) -> StepInputs:
        """Views of what `fill` fills."""
        n, b = shape.num_positions, shape.rows
        sizes = [n] * _GRIDS + [b, b]
        tokens, positions, places, keys, temperatures, slots, starts = torch.split(self._ints[: sum(sizes)], sizes)
        grid = (b, shape.width)
        sees = self._sees[: n * shape.width].view(*grid, shape.width) if shape.is_tree else None
        rows = SlotRows(
            kv_cache, slots, positions.view(grid), places.view(grid), starts.view(b, 1), shape.num_keys, None, sees,
            kernel,
        )  # fmt: skip
        return StepInputs(tokens.view(grid), rows, keys, temperatures.view(torch.float32)[:n])

    def fill(
        self,
        shape: StepShape,
        slots: Ints,
        starts: Ints,
        tokens: Ints,
        trees: TreeShape | None,
        scratch: int,
        noise: Noise | None = None,
    ) -> None:
        """Put a pass of at most ``shape`` into place, with one copy to the device, two where rows are trees.

        starts : int64[B], the slots' lengths. tokens : int64[B, T]. Rows that are too many stand at the beginning of
        the text of the first row's slot, and write from ``scratch`` on, where no slot has text: they change nothing.
        Positions too many go on as chains behind their row's own, where nothing is valid yet. noise : only with a
        sampler; without any the most probable tokens are chosen.
        """
        num_rows, width = tokens.shape
        assert num_rows <= shape.rows and width <= shape.width and (trees is not None) == shape.is_tree
        assert noise is None or self._sampler is not None
        size = _GRIDS * shape.num_positions + 2 * shape.rows
        # Pinned: to copy other memory a driver may wait for the pass before. torch keeps it until it was read.
        sent = torch.zeros(size, dtype=torch.int64, pin_memory=self._ints.is_cuda)
        ints = sent.numpy()
        places = _AHEAD[:, :width] if trees is None else trees.depths
        _fill(ints, shape.rows, shape.width, slots, starts, tokens, places, scratch)
        if noise is not None:
            # One buffer takes all: temperatures lie side by side in the first half of theirs.
            first, n = 3 * shape.num_positions, shape.num_positions
            ints[first : first + n].reshape(shape[:2])[:num_rows, :width] = noise.keys.view(np.int64)
            bits = ints[first + n : first + 2 * n].view(np.float32)[:n].reshape(shape[:2])
            bits[:num_rows, :width] = noise.temperatures
        if trees is not None:
            grid = shape.rows, shape.width, shape.width
            sees = torch.empty(grid, dtype=torch.bool, pin_memory=self._ints.is_cuda)
            sees[:] = torch.eye(shape.width, dtype=torch.bool)
            sees[:num_rows, :width, :width] = torch.from_numpy(trees.sees)
            self._sees[: sees.numel()].copy_(sees.view(-1), non_blocking=True)
        self._ints[:size].copy_(sent, non_blocking=True)

    def feed_chosen(self, num_rows: int) -> None:
        """Have the pass in place, of one position a row, read the tokens that the last one chose."""
        self._ints[:num_rows].copy_(self._chosen[:num_rows])

    def store(self, logits: torch.Tensor, inputs: StepInputs) -> None:
        """Keep the logits of a pass, [rows, width, V], and the token of each position that they and its noise give.

        Without a sampler it is the most probable one.
        """
        flat = logits.flatten(0, 1)
        if self._logits is None:  # the first pass tells what a model gives; it runs before anything is recorded
            self._logits = torch.empty(self._max_positions, flat.shape[-1], dtype=flat.dtype, device=flat.device)
        kept = self._logits[: len(flat)]
        kept.copy_(flat)
        chosen = flat.argmax(-1) if self._sampler is None else self._sampler(kept, inputs.keys, inputs.temperatures)
        self._chosen[: len(flat)].copy_(chosen)
        if self._top is not None:
            self._top[: len(flat)].copy_(packed_top(kept))

    def outputs(
        self, shape: StepShape, num_rows: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Logits, tokens and `packed_top` of the first rows and positions of the last pass: views."""
        assert self._logits is not None
        place = shape.rows, shape.width, num_rows, width
        found = self._views.get(place)
        if found is None:
            n, grid, part = shape.num_positions, (shape.rows, shape.width), (slice(num_rows), slice(width))
            top = None if self._top is None else self._top[:n].view(*grid, 2, TOP_K)[part]
            found = self._logits[:n].view(*grid, -1)[part], self._chosen[:n].view(grid)[part], top
            self._views[place] = found
        return found


def powers_of_two(first: int, last: int) -> list[int]:
    """``first``, twice that, ... up to ``last``, which is always the last of them."""
    sizes = [last]
    size = first
    while size < last:
        sizes.append(size)
        size *= 2
    return sorted(sizes)
