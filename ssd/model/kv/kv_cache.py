"""The KV cache: one slot of fixed size per running sequence, each with its own length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ssd.model.kv.tree import TreeShape

KEY_ALIGNMENT: Final = 16
"""The number of SIMD lanes of CPU kernels. Positions per slot and the value size are padded to multiples of it."""


class SlotKVCache:
    """The KV cache: keys and values of every layer at (slot, position), and optionally hidden states for a draft head.

    Each layer has two tensors ``[num_slots, num_kv_heads, max_length, head_dim]``. They are allocated when the layer
    first writes, because the numbers of heads and the head sizes are known only then for all architectures.

    A query at position p sees only keys at positions <= p. So data at or beyond a slot's length is never read before it
    is overwritten: **rollback lowers the length**, and padding may be written beyond it.
    """

    def __init__(self, num_slots: int, max_length: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        # The number of valid positions of each slot.
        self.lengths: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.reach: dict[int, int | None] = {}  # each layer's window or chunk in its last pass
        self.device = device
        self.kernel: AttentionKernel | None = None  # overrides the rows' attention kernel
        self.features: torch.Tensor | None = None  # see `allocate_features`
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def allocate_features(self, num_layers: int, size: int, dtype: torch.dtype) -> None:
        """Allocate memory for a draft head's input, [num_slots, num_layers, max_length, size], before any pass."""
        shape = self.num_slots, num_layers, self.max_length, size
        self.features = torch.zeros(shape, dtype=dtype, device=self.device)

    def store(
        self, layer: int, rows: SlotRows, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of new tokens to a layer's KV cache, and return the whole cache of the layer.

        The new keys and values are [B, num_kv_heads, T, head_dim], and are written to the positions ``rows.places`` of
        the slots ``rows.slots``. The returned keys and values are [num_slots, num_kv_heads, max_length, head_dim].
        """
        if layer not in self._layers:
            layout = LAYOUTS.get(self.device.type, _torch_layout)
            self._layers[layer] = layout(keys, values, self.num_slots, self.max_length)
        stored_keys, stored_values = self._layers[layer]
        write = WRITERS.get(self.device.type)
        if write is None or keys.stride(3) != 1 or values.stride(3) != 1:
            rows.put(keys, stored_keys)
            rows.put(values, stored_values)
        else:
            write(keys, values, stored_keys, stored_values, rows.slots, rows.places)
        return stored_keys, stored_values

    def layer_cache(self, layer: int) -> Pair | None:
        """Return a layer's keys and values in all slots; None before the layer has been run for the first time."""
        return self._layers.get(layer) if layer in self.reach else None

    def move(self, moves: torch.Tensor) -> None:
        """Copy single positions within KV cache slots, in every layer; all positions are read before any is written.

        ``moves`` is int64[3, n] on the device: the slot, source and target position of each copy. Copies to the same
        slot and target must have the same source.
        """
        at, source, target = moves
        for stored in self.tensors():
            stored[at, :, target] = stored[at, :, source]

    def copy(self, source: int, slot: int, start: int, end: int) -> None:
        """Copy the positions ``start`` to ``end`` of the slot ``source`` to another slot; lengths stay unchanged."""
        for stored in self.tensors():
            stored[slot, :, start:end] = stored[source, :, start:end]

    @property
    def bytes_per_token(self) -> int:
        """The number of bytes that a token occupies in a slot, over all layers that have been allocated so far."""
        return sum(
            t.shape[1] * (t.stride(2) if t.stride(3) == 1 else t.shape[3]) * t.element_size() for t in self.tensors()
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        for pair in self._layers.values():
            yield from pair
        if self.features is not None:
            yield self.features


Pair = tuple[torch.Tensor, torch.Tensor]


# The function that writes new keys and values, for each type of device; other devices use torch. `SlotRunner` adds that
# of `ssd.model.triton` for GPUs.
WRITERS: Final[dict[str, Callable[..., None]]] = {}


# Zeros, not empty: a masked key has weight 0, but 0 * NaN of uninitialised memory is NaN.
def _torch_layout(keys: torch.Tensor, values: torch.Tensor, num_slots: int, length: int) -> Pair:
    stored = [each.new_zeros(num_slots, each.shape[1], length, each.shape[3]) for each in (keys, values)]
    return stored[0], stored[1]


def _cpu_layout(keys: torch.Tensor, values: torch.Tensor, num_slots: int, length: int) -> Pair:
    """Allocate a layer's KV cache for `cpu_attention`: keys contiguous along positions, padded values, all zeros."""
    room, size = -(-length // KEY_ALIGNMENT) * KEY_ALIGNMENT, values.shape[3]
    if room % 1024 == 0:  # lines at power-of-two strides map to few sets of a processor's cache
        room += KEY_ALIGNMENT
    stored = keys.new_zeros(num_slots, keys.shape[1], keys.shape[3], room)[..., :length].transpose(2, 3)
    padded = -(-size // KEY_ALIGNMENT) * KEY_ALIGNMENT
    return stored, values.new_zeros(num_slots, values.shape[1], length, padded)[..., :size]


# The function that allocates a layer's KV cache, for each type of device; `_torch_layout` for other devices.
LAYOUTS: Final[dict[str, Callable[[torch.Tensor, torch.Tensor, int, int], Pair]]] = {"cpu": _cpu_layout}


class AttentionRules(NamedTuple):
    """The attention parameters of a layer: score scale, sliding window, chunk size, soft cap and attention sinks.

    A parameter is None if the layer does not use it; ``sinks`` is [num_heads].
    """

    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: torch.Tensor | None


AttentionKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "SlotRows", AttentionRules], torch.Tensor]
"""A function that computes attention over a layer's KV cache in place, without copies of the cache and without a mask.

The arguments are the queries of new tokens, [B, num_heads, T, head_dim]; the layer's keys and values as returned by
`SlotKVCache.store`, which include those of the new tokens; the sequences of the forward pass; and the layer's attention
parameters. The result is [B, T, num_heads, value_dim], contiguous.
"""


@dataclass(slots=True, eq=False)
class SlotRows:
    """The sequences of one forward pass: their KV cache slots, and the positions of their new tokens."""

    kv_cache: SlotKVCache
    slots: torch.Tensor  # int64[B]
    positions: torch.Tensor  # the position of each new token in its text, int64[B, T]
    # The position in the slot at which each new token is written, int64[B, T]: consecutive numbers. The same tensor as
    # ``positions`` unless rows are trees.
    places: torch.Tensor
    # The number of keys before the new tokens, int64[B, 1]: a row's first place, except for padding rows.
    starts: torch.Tensor
    num_keys: int  # at least the number of keys that the furthest query sees
    first_slot: int | None  # None unless the slots are consecutive
    # For trees bool[B, T, T]: whether a new token sees another, which is itself or an ancestor.
    tree_mask: torch.Tensor | None
    kernel: AttentionKernel | None = None  # None: torch's attention
    only_place: tuple[int, slice] | None = None  # the slot and the places of a single row
    is_full: bool = False  # whether every query sees all of the ``num_keys`` keys
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
        """Return the `SlotRows` of a forward pass that appends ``num_tokens`` tokens to each slot.

        The tokens of a slot are a chain or, if ``trees`` is given, a draft tree.
        """
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
            None if trees is None else torch.from_numpy(trees.tree_mask).to(device),
            only_place=(slots[0], slice(first, first + num_tokens)) if len(slots) == 1 else None,
            is_full=num_tokens == 1 and first == last,
        )

    def last(self, count: int) -> SlotRows:
        """Return the last ``count`` tokens of chains as rows, for a pass that has stored the tokens before already."""
        assert self.tree_mask is None
        places = self.places[:, -count:]
        starts, first_slot = places[:, :1], self.first_slot
        return SlotRows(self.kv_cache, self.slots, places, places, starts, self.num_keys, first_slot, None, self.kernel)

    def put(self, new: torch.Tensor, stored: torch.Tensor) -> None:
        """Write keys, values or features of the new tokens, [B, heads, T, dim], to ``stored``, a KV cache tensor."""
        if self.only_place is not None:  # a copy instead of a scatter
            slot, place = self.only_place
            stored[slot, :, place] = new[0]
        else:
            stored[self.slots[:, None], :, self.places] = new.transpose(1, 2)

    def seen_of(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the first ``num_keys`` positions of the rows' slots in a KV cache tensor, [B, heads, num_keys, dim].

        The result is a view if the slots are consecutive, and a copy otherwise.
        """
        if self.first_slot is not None:
            return stored[self.first_slot : self.first_slot + len(self.slots), :, : self.num_keys]
        return stored[:, :, : self.num_keys].index_select(0, self.slots)

    def mask(self, window: int | None, chunk: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the additive attention mask, 0 or -inf, [B, 1, groups * T, num_keys]; None if all keys are visible.

        A query at position p sees keys at positions j <= p: with a sliding ``window`` only those with j > p - window,
        and with chunked attention only those in p's own ``chunk``. A node of a draft tree sees the text before the tree
        and the path from the root to itself; window and chunk apply to positions in the text. ``groups`` query heads
        share each key head. The mask is built once per forward pass for each kind of layer.
        """
        if self.is_full and all(reach is None or self.num_keys <= reach for reach in (window, chunk)):
            return None
        key = (window, chunk, groups, dtype)
        if key not in self._masks:
            query = self.positions[:, :, None]
            keys = torch.arange(self.num_keys, device=query.device)
            if self.tree_mask is None:
                visible = keys <= query
            else:
                width = self.places.shape[1]
                new = self.starts + torch.arange(width, device=query.device)
                visible = (keys < self.starts)[:, None].repeat(1, width, 1)
                visible.scatter_(2, new[:, None].expand(-1, width, -1), self.tree_mask)
                keys = keys.repeat(len(self.slots), 1).scatter_(1, new, self.positions)[:, None]
            if window is not None:
                visible &= keys > query - window
            if chunk is not None:
                visible &= keys >= query - query % chunk
            mask = torch.zeros(visible.shape, dtype=dtype, device=query.device)
            mask.masked_fill_(~visible, float("-inf"))
            self._masks[key] = mask[:, None].repeat(1, 1, groups, 1)
        return self._masks[key]
