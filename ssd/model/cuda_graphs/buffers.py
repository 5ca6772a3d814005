"""Tensors at fixed addresses: the inputs and outputs of passes with fixed shapes.

A CUDA graph replays the captured kernels on the captured addresses. So the inputs of every pass are copied to the same
memory, and passes are padded to a few shapes.
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
"""The number of integers per position: token, position, place in the cache, sampling key and temperature."""

_AHEAD = np.arange(1 << 12)[None]
"""The offset of each token of a chain from the start of its row."""


@kernel
def _fill(
    ints: Ints, rows: int, width: int, slots: Ints, starts: Ints, tokens: Ints, depths: Ints, scratch: int
) -> None:
    """Write tokens, positions and places of ``rows`` x ``width``, then slots and starts, into zeros.

    Args:
        ints: The buffer, int64.
        rows: The number of rows of the shape.
        width: The width of the shape.
        slots: int64[B].
        starts: int64[B], the slots' lengths.
        tokens: int64[B, T].
        depths: int64[B or 1, T], the offset of each token from the start of its row.
        scratch: The first position of a slot that never holds text.
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
    """The shape of a pass: ``rows`` rows of ``width`` positions, trees or chains, over the first ``num_keys`` keys."""

    rows: int
    width: int
    num_keys: int
    is_tree: bool

    @property
    def num_positions(self) -> int:
        """The number of positions of all rows."""
        return self.rows * self.width


class PassInputs(NamedTuple):
    """The inputs of a pass of one shape.

    Attributes:
        tokens: int64[B, T].
        rows: The rows of the pass in the KV cache.
        keys: The sampling key of each position, int64[B * T].
        temperatures: The temperature of each position, float32[B * T].
    """

    tokens: torch.Tensor
    rows: SlotRows
    keys: torch.Tensor
    temperatures: torch.Tensor


class PassBuffers:
    """The inputs and outputs of all shapes in shared memory, because only one pass runs at a time.

    The outputs are valid until the next pass.
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
        """Allocate the buffers.

        Args:
            max_rows: The maximum number of rows.
            max_positions: The maximum of rows times width.
            max_width: The maximum width.
            device: The device.
            sampler: The sampling kernel. None: a pass chooses the most probable tokens.
            keeps_top: Whether a pass also finds the most probable tokens of every position.
        """
        self._sampler = sampler
        self._ints = torch.zeros(_GRIDS * max_positions + 2 * max_rows, dtype=torch.int64, device=device)
        self._sees = torch.zeros(max_positions * max_width, dtype=torch.bool, device=device)
        self._sampled = torch.zeros(max_positions, dtype=torch.int64, device=device)
        self._top = torch.zeros(max_positions, 2, TOP_K, dtype=torch.int32, device=device) if keeps_top else None
        self._logits: torch.Tensor | None = None
        self._max_positions = max_positions
        self._views: dict[tuple[int, int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        """Views of the outputs by shape, created once, because creating them takes longer than a draft."""

    def inputs(self, shape: PassShape, kv_cache: SlotKVCache, kernel: AttentionKernel | None) -> PassInputs:
        """Return views of the inputs that `fill` writes."""
        n, b = shape.num_positions, shape.rows
        sizes = [n] * _GRIDS + [b, b]
        tokens, positions, places, keys, temperatures, slots, starts = torch.split(self._ints[: sum(sizes)], sizes)
        grid = (b, shape.width)
        sees = self._sees[: n * shape.width].view(*grid, shape.width) if shape.is_tree else None
        rows = SlotRows(
            kv_cache, slots, positions.view(grid), places.view(grid), starts.view(b, 1), shape.num_keys, None, sees,
            kernel,
        )  # fmt: skip
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
        """Copy the inputs of a pass to the device, in one copy for chains and two copies for trees.

        Padding rows are at the beginning of the first row's slot and write from ``scratch`` on, where no slot has
        text, so they change nothing. Padding positions continue their row as a chain, beyond its valid positions.

        Args:
            shape: A shape at least as large as the pass.
            slots: int64[B].
            starts: int64[B], the slots' lengths.
            tokens: int64[B, T].
            trees: The draft trees, if the shape has trees.
            scratch: The first position of a slot that never holds text.
            noise: The noise to sample with; requires a sampler. None: the most probable tokens are chosen.
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
            sees = torch.empty(grid, dtype=torch.bool, pin_memory=self._ints.is_cuda)
            sees[:] = torch.eye(shape.width, dtype=torch.bool)
            sees[:num_rows, :width, :width] = torch.from_numpy(trees.sees)
            self._sees[: sees.numel()].copy_(sees.view(-1), non_blocking=True)
        self._ints[:size].copy_(sent, non_blocking=True)

    def feed_sampled(self, num_rows: int) -> None:
        """Copy the tokens that the last pass sampled to the inputs of the next pass, which has one position per row."""
        self._ints[:num_rows].copy_(self._sampled[:num_rows])

    def store(self, logits: torch.Tensor, inputs: PassInputs) -> None:
        """Store the logits of a pass, [rows, width, V], and the token sampled at each position.

        Without a sampler the most probable token is stored.
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
        """Return logits, tokens and `packed_top` of the first rows and positions of the last pass, as views."""
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
    """Return ``first`` and its doublings below ``last``, then ``last``."""
    sizes = [last]
    size = first
    while size < last:
        sizes.append(size)
        size *= 2
    return sorted(sizes)
