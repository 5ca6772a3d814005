"""The attention cache: one slot per running sequence, each with a length of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ssd.jit.simd import LANES
from ssd.model.kv.tree import TreeShape


class SlotKVCache:
    """Keys and values of every layer, at (slot, position), and features for a draft head where there is one.

    Per layer two tensors ``[num_slots, num_kv_heads, max_length, head_dim]``, allocated when the layer first writes,
    because only then its number of heads and head sizes are known for every architecture.

    ``lengths`` : int64[num_slots], valid positions of each slot. A query at position p sees keys at positions <= p
    only, so what lies at or beyond a slot's length is never read before it is written again: **rollback is lowering
    the length**, and padding may be written past it.
    """

    def __init__(self, num_slots: int, max_length: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.lengths: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.reach: dict[int, int | None] = {}
        """How many positions back each layer attended in its last pass: its window or chunk, None is all."""
        self.device = device
        self.kernel: AttentionKernel | None = None
        """What attends in every pass, whatever its rows bring."""
        self.features: torch.Tensor | None = None
        """Of every position, laid out, moved and copied like keys of one head: [num_slots, 1, max_length, size]."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep_features(self, size: int, dtype: torch.dtype) -> None:
        """Keep ``size`` numbers of each position besides; before anything is written."""
        self.features = torch.zeros(self.num_slots, 1, self.max_length, size, dtype=dtype, device=self.device)

    def store(
        self, layer: int, rows: SlotRows, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, [B, num_kv_heads, T, head_dim], at ``rows.places``.

        Returns all the layer holds, two tensors [num_slots, num_kv_heads, max_length, dim].
        """
        if layer not in self._layers:
            layout = LAYOUTS.get(self.device.type, _plain)
            self._layers[layer] = layout(keys, values, self.num_slots, self.max_length)
        stored_keys, stored_values = self._layers[layer]
        write = _writer(self.device.type)
        if write is None or keys.stride(3) != 1 or values.stride(3) != 1:
            rows.put(keys, stored_keys)
            rows.put(values, stored_values)
        else:
            write(keys, values, stored_keys, stored_values, rows.slots, rows.places)
        return stored_keys, stored_values

    def written(self, layer: int) -> Pair | None:
        """All that a layer holds, as `store` returns it, once it has attended, so that its reach is known."""
        return self._layers.get(layer) if layer in self.reach else None

    def move(self, moves: torch.Tensor) -> None:
        """Copy single positions inside their slots, in every layer.

        moves : int64[3, n] on the device, of each the slot, where it is and where it goes. Pairs (slot, target) that
        are equal must have equal sources. Everything is read before anything is written.
        """
        at, source, target = moves
        for stored in self.tensors():
            stored[at, :, target] = stored[at, :, source]

    def copy(self, source: int, slot: int, start: int, end: int) -> None:
        """Overwrite positions ``start`` to ``end`` of ``slot`` with those of ``source``; lengths stay as they are."""
        for stored in self.tensors():
            stored[slot, :, start:end] = stored[source, :, start:end]

    @property
    def bytes_per_token(self) -> int:
        """Bytes one position of one slot takes over all layers written so far."""
        return sum(
            t.shape[1] * (t.stride(2) if t.stride(3) == 1 else t.shape[3]) * t.element_size() for t in self.tensors()
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is kept, of each position: [num_slots, ..., max_length, ...]."""
        for pair in self._layers.values():
            yield from pair
        if self.features is not None:
            yield self.features


Pair = tuple[torch.Tensor, torch.Tensor]


@cache
def _writer(kind: str) -> Callable[..., None] | None:
    """What stores keys and values with one launch, where triton is installed."""
    if kind != "cuda":
        return None
    try:
        from ssd.model.kv.triton_write import write_by_triton
    except ImportError:  # it comes with CUDA builds of torch
        return None
    return write_by_triton


# Zeros, not empty: a masked key has weight 0, but 0 * NaN of uninitialised memory is NaN.
def _plain(keys: torch.Tensor, values: torch.Tensor, num_slots: int, length: int) -> Pair:
    """Room for a layer's keys and values, like these."""
    stored = [each.new_zeros(num_slots, each.shape[1], length, each.shape[3]) for each in (keys, values)]
    return stored[0], stored[1]


def _in_vectors(keys: torch.Tensor, values: torch.Tensor, num_slots: int, length: int) -> Pair:
    """The numbers of one dimension of keys side by side, and values in whole vectors, see `cpu_attention`."""
    room, size = -(-length // LANES) * LANES, values.shape[3]
    if room % 1024 == 0:  # lines a power of two apart share few places of a processor's cache
        room += LANES
    stored = keys.new_zeros(num_slots, keys.shape[1], keys.shape[3], room)[..., :length].transpose(2, 3)
    return stored, values.new_zeros(num_slots, values.shape[1], length, -(-size // LANES) * LANES)[..., :size]


LAYOUTS: Final[dict[str, Callable[[torch.Tensor, torch.Tensor, int, int], Pair]]] = {"cpu": _in_vectors}
"""How keys and values lie on a type of device; plainly elsewhere."""


class AttentionRules(NamedTuple):
    """What a layer multiplies scores by, and whom a query may see: as in `SlotRows.mask` and `slot_attention`."""

    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: torch.Tensor | None


AttentionKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "SlotRows", AttentionRules], torch.Tensor]
"""Attention over a layer's slots in place, each row over its own keys: no copies, no mask.

From new positions, [B, num_heads, T, head_dim], over what `SlotKVCache.store` returns, theirs included: [B, T,
num_heads, value_dim], contiguous.
"""


@dataclass(slots=True, eq=False)
class SlotRows:
    """The rows of one forward pass.

    ``slots`` : int64[B]. ``positions`` : int64[B, T], where each new token stands in its text. ``places`` :
    int64[B, T], where it is written: one behind the other. The same tensor, unless rows are trees.
    ``starts`` : int64[B, 1], keys before the new ones: a row's first place, but for rows that only pad a pass.
    ``num_keys`` : at least the keys visible to the furthest query. ``first_slot`` : where the slots are neighbours in
    order. ``sees`` : where rows are trees bool[B, T, T], which new tokens are on the path to which, itself included.
    ``kernel`` : what attends; None is torch. ``only_place`` : of a single row its slot and places. ``is_full`` : every
    query sees all of ``num_keys``.
    """

    kv_cache: SlotKVCache
    slots: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor
    num_keys: int
    first_slot: int | None
    sees: torch.Tensor | None
    kernel: AttentionKernel | None = None
    only_place: tuple[int, slice] | None = None
    is_full: bool = False
    _masks: dict[tuple[int | None, int | None, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        kv_cache: SlotKVCache,
        slots: list[int],
        num_tokens: int,
        device: torch.device,
        trees: TreeShape | None = None,
    ) -> SlotRows:
        """Rows that append ``num_tokens`` positions to each of ``slots``, of chains or ``trees``."""
        starts = kv_cache.lengths[slots]
        first, last = int(starts.min()), int(starts.max())
        places = torch.from_numpy(starts[:, None] + np.arange(num_tokens)).to(device)
        positions = places if trees is None else torch.from_numpy(starts[:, None] + trees.depths).to(device)
        return cls(
            kv_cache,
            torch.tensor(slots, device=device),
            positions,
            places,
            places[:, :1],
            last + num_tokens,
            slots[0] if slots == list(range(slots[0], slots[0] + len(slots))) else None,
            None if trees is None else torch.from_numpy(trees.sees).to(device),
            only_place=(slots[0], slice(first, first + num_tokens)) if len(slots) == 1 else None,
            is_full=num_tokens == 1 and first == last,
        )

    def put(self, new: torch.Tensor, stored: torch.Tensor) -> None:
        """Write new positions, [B, heads, T, dim], at their places of ``stored``, [num_slots, heads, length, dim]."""
        if self.only_place is not None:  # a copy instead of a scatter
            slot, place = self.only_place
            stored[slot, :, place] = new[0]
        else:
            stored[self.slots[:, None], :, self.places] = new.transpose(1, 2)

    def seen_of(self, stored: torch.Tensor) -> torch.Tensor:
        """What rows may see of ``stored``, [B, heads, num_keys, dim]: a view where they are neighbours, else a copy."""
        if self.first_slot is not None:
            return stored[self.first_slot : self.first_slot + len(self.slots), :, : self.num_keys]
        return stored[:, :, : self.num_keys].index_select(0, self.slots)

    def mask(self, window: int | None, chunk: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """What each query may see, to be added to the scores: 0 or -inf, [B, 1, groups * T, num_keys]; None: all.

        A query at position p sees keys j with j <= p, with a sliding ``window`` only j > p - window, and with chunked
        attention only keys of p's own ``chunk``. A node of a tree sees the text before the tree and the path to
        itself; the rules go by where keys stand in the text. Built once a pass for each kind of layer, repeated for the
        query heads that share a key head.
        """
        if self.is_full and all(reach is None or self.num_keys <= reach for reach in (window, chunk)):
            return None
        key = (window, chunk, groups, dtype)
        if key not in self._masks:
            query = self.positions[:, :, None]
            keys = torch.arange(self.num_keys, device=query.device)
            if self.sees is None:
                visible = keys <= query
            else:
                width = self.places.shape[1]
                new = self.starts + torch.arange(width, device=query.device)
                visible = (keys < self.starts)[:, None].repeat(1, width, 1)
                visible.scatter_(2, new[:, None].expand(-1, width, -1), self.sees)
                keys = keys.repeat(len(self.slots), 1).scatter_(1, new, self.positions)[:, None]
            if window is not None:
                visible &= keys > query - window
            if chunk is not None:
                visible &= keys >= query - query % chunk
            mask = torch.zeros(visible.shape, dtype=dtype, device=query.device)
            mask.masked_fill_(~visible, float("-inf"))
            self._masks[key] = mask[:, None].repeat(1, 1, groups, 1)
        return self._masks[key]
