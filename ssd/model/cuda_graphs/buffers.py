"""Preallocated tensors for the inputs and outputs of fixed-shape forward passes.

A CUDA graph replays the captured kernels on the captured addresses. So the inputs of every pass are copied to the same
memory, and passes are padded to one of a few shapes.
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

_GRIDS = 5  # integers per position: token, position in the text, position in the slot, noise key and temperature

_AHEAD = np.arange(1 << 12)[None]  # the offset of each token of a draft chain from the start of its row


@kernel
def _fill(
    ints: Ints, rows: int, width: int, slots: Ints, starts: Ints, tokens: Ints, depths: Ints, scratch: int
) -> None:
    """Write the inputs of a forward pass, padded to ``rows`` sequences of ``width`` tokens, into a zeroed int64 buffer.

    The buffer ``ints`` begins with the tokens, their positions in the text and their positions in the slot, ``rows *
    width`` numbers each. It ends with each row's slot and the slot's length. ``depths``, int64[B or 1, T], are the
    distances of tokens from the start of their row. Padding rows are written from position ``scratch`` of a slot on,
    the first position that never holds text.
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


class PassShape(NamedTuple):
    """The padded sizes for which a forward pass is captured: sequences, tokens per sequence, and KV cache positions.

    The new tokens of a sequence, a draft chain or draft tree, attend to the first ``num_keys`` positions of its slot.
    """

    rows: int
    width: int
    num_keys: int
    is_tree: bool

    @property
    def num_positions(self) -> int:
        return self.rows * self.width


class PassInputs(NamedTuple):
    """The inputs of a captured forward pass of one shape, as views of the buffers that all shapes share."""

    tokens: torch.Tensor  # int64[B, T]
    rows: SlotRows
    keys: torch.Tensor  # the noise key of each position, int64[B * T]
    temperatures: torch.Tensor  # float32[B * T]


class PassBuffers:
    """The input and output tensors that all captured forward passes share, because only one pass runs at a time.

    The outputs are valid until the next pass. ``max_positions`` is the maximum product of sequences and tokens per
    sequence. Without a ``sampler``, the most probable token is stored at each position. With ``keeps_top``, passes also
    store the ids and logits of the most probable tokens at each position.
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
        self._sampler = sampler
        self._ints = torch.zeros(_GRIDS * max_positions + 2 * max_rows, dtype=torch.int64, device=device)
        self._tree_mask = torch.zeros(max_positions * max_width, dtype=torch.bool, device=device)
        self._sampled = torch.zeros(max_positions, dtype=torch.int64, device=device)
        self._top = torch.zeros(max_positions, 2, TOP_K, dtype=torch.int32, device=device) if keeps_top else None
        self._logits: torch.Tensor | None = None
        self._max_positions = max_positions
        # Views of the outputs by shape; creating them takes longer than a draft.
        self._views: dict[tuple[int, int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}

    def inputs(self, shape: PassShape, kv_cache: SlotKVCache, kernel: AttentionKernel | None) -> PassInputs:
        """Return the parts of the input buffers that a forward pass of this shape reads; `fill` writes them."""
        n, b = shape.num_positions, shape.rows
        sizes = [n] * _GRIDS + [b, b]
        tokens, positions, places, keys, temperatures, slots, starts = torch.split(self._ints[: sum(sizes)], sizes)
        grid = (b, shape.width)
        tree_mask = self._tree_mask[: n * shape.width].view(*grid, shape.width) if shape.is_tree else None
        positions, places, starts = positions.view(grid), places.view(grid), starts.view(b, 1)
        rows = SlotRows(kv_cache, slots, positions, places, starts, shape.num_keys, None, tree_mask, kernel)
        return PassInputs(tokens.view(grid), rows, keys, temperatures.view(torch.float32)[:n])

    def fill(
        self,
        shape: PassShape,
        slots: Ints,
        starts: Ints,
        tokens: Ints,
        trees: TreeShape | None,
        scratch: int,
        noise: Noise | None = None,
    ) -> None:
        """Copy the inputs of a forward pass to the GPU, padded to ``shape``: in one copy, or in two for draft trees.

        Rows of padding use the first row's slot and write to its positions from ``scratch`` on, where no slot holds
        text, so they change nothing. Tokens of padding continue their row as a chain after its valid tokens. ``starts``
        are the lengths of the slots. ``noise`` may be given only if the buffers have a sampler; if it is None, the pass
        selects the most probable tokens. ``shape`` must not be smaller than the pass.
        """
        num_rows, width = tokens.shape
        assert num_rows <= shape.rows and width <= shape.width and (trees is not None) == shape.is_tree
        assert noise is None or self._sampler is not None
        size = _GRIDS * shape.num_positions + 2 * shape.rows
        # The memory is pinned, because a driver may wait for the previous pass before it copies other memory. torch
        # keeps pinned memory until the copy has finished.
        sent = torch.zeros(size, dtype=torch.int64, pin_memory=self._ints.is_cuda)
        ints = sent.numpy()
        places = _AHEAD[:, :width] if trees is None else trees.depths
        _fill(ints, shape.rows, shape.width, slots, starts, tokens, places, scratch)
        if noise is not None:
            # All inputs share one int64 buffer; the float32 temperatures fill the first half of their part.
            first, n = 3 * shape.num_positions, shape.num_positions
            ints[first : first + n].reshape(shape[:2])[:num_rows, :width] = noise.keys.view(np.int64)
            bits = ints[first + n : first + 2 * n].view(np.float32)[:n].reshape(shape[:2])
            bits[:num_rows, :width] = noise.temperatures
        if trees is not None:
            grid = shape.rows, shape.width, shape.width
            tree_mask = torch.empty(grid, dtype=torch.bool, pin_memory=self._ints.is_cuda)
            tree_mask[:] = torch.eye(shape.width, dtype=torch.bool)
            tree_mask[:num_rows, :width, :width] = torch.from_numpy(trees.tree_mask)
            self._tree_mask[: tree_mask.numel()].copy_(tree_mask.view(-1), non_blocking=True)
        self._ints[:size].copy_(sent, non_blocking=True)

    def feed_sampled(self, num_rows: int) -> None:
        """Copy the tokens that the last forward pass sampled, one per sequence, to the inputs of the next pass."""
        self._ints[:num_rows].copy_(self._sampled[:num_rows])

    def store(self, logits: torch.Tensor, inputs: PassInputs) -> None:
        """Store the logits of a forward pass, [rows, width, V], and a token sampled from them at each position.

        Without a sampler, the most probable token is stored instead.
        """
        flat = logits.flatten(0, 1)
        if self._logits is None:  # the first pass, which is not captured, shows the size and dtype of the logits
            self._logits = torch.empty(self._max_positions, flat.shape[-1], dtype=flat.dtype, device=flat.device)
        stored = self._logits[: len(flat)]
        stored.copy_(flat)
        sampled = flat.argmax(-1) if self._sampler is None else self._sampler(stored, inputs.keys, inputs.temperatures)
        self._sampled[: len(flat)].copy_(sampled)
        if self._top is not None:
            self._top[: len(flat)].copy_(packed_top(stored))

    def outputs(
        self, shape: PassShape, num_rows: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the logits, sampled tokens and most probable tokens of the last forward pass, without the padding.

        These are views of the first ``width`` positions of the first ``num_rows`` sequences. The most probable tokens
        have the format of `packed_top`, and are None if the buffers do not keep them.
        """
        assert self._logits is not None
        place = shape.rows, shape.width, num_rows, width
        found = self._views.get(place)
        if found is None:
            n, grid, part = shape.num_positions, (shape.rows, shape.width), (slice(num_rows), slice(width))
            top = None if self._top is None else self._top[:n].view(*grid, 2, TOP_K)[part]
            found = self._logits[:n].view(*grid, -1)[part], self._sampled[:n].view(grid)[part], top
            self._views[place] = found
        return found


def powers_of_two(first: int, last: int) -> list[int]:
    """Return the sizes ``first``, 2 * ``first``, 4 * ``first`` ... that are below ``last``, and ``last`` itself."""
    sizes = [last]
    size = first
    while size < last:
        sizes.append(size)
        size *= 2
    return sorted(sizes)
