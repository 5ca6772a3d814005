"""Float32 weights that were made of small integers, as those integers again, wherever that gives back every bit.

A checkpoint that was quantised in blocks and unpacked holds, in every block, ``scale * q`` or ``scale * q + least``.
Neither scale nor integers are in it, but the largest value is the scale times the largest integer, and that is one of
few: each is tried, and what does not give the very bits back is kept as it is.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Kinds = npt.NDArray[np.uint8]
Levels = npt.NDArray[np.int8]

BLOCK: Final = 16

NONE, SCALED, AFFINE = range(3)
"""Of a block: kept as it is; ``scale * q``; ``step * q + least``."""
SAME: Final = 3
"""The block before has the same kind and constants."""

_SCALES: Final = (127, 16, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17)
_STEPS: Final = tuple(range(15, 0, -1))
_NEGATIVE_ZERO: Final = np.uint32(1 << 31)
_LEAST_SHARE: Final = 0.25
"""Of the blocks of a chunk that must lie on grids; with fewer, planes are as good."""


def to_grids(values: Floats) -> tuple[Kinds, Floats, Levels, Floats] | None:
    """Kind of each block of 16 values, constants of those that say them, levels, and the values of all other blocks.

    What is left behind the last whole block is with the other values. None where few blocks lie on grids. Blocks are
    tried in pairs first, which share their constants. O(n) times the number of integers tried.
    """
    whole = values[: len(values) // (2 * BLOCK) * 2 * BLOCK]
    if not len(whole):
        return None
    kinds = np.zeros(len(whole) // BLOCK, np.uint8)
    constants = np.zeros((len(kinds), 2), np.float32)
    levels = np.zeros((len(kinds), BLOCK), np.int8)
    for size, kind, integers in (
        (2 * BLOCK, SCALED, _SCALES[:2]),
        (2 * BLOCK, AFFINE, _STEPS),
        (BLOCK, SCALED, _SCALES),
    ):
        per = size // BLOCK
        for most in integers:
            left = np.flatnonzero((kinds.reshape(-1, per) == NONE).all(1))
            if not len(left):
                break
            found, numbers, on_grid = _tried(whole.reshape(-1, size)[left], kind, most)
            hit = left[on_grid]
            kinds.reshape(-1, per)[hit] = kind
            constants.reshape(-1, per, 2)[hit] = found[on_grid, None]
            levels.reshape(-1, per, BLOCK)[hit] = numbers[on_grid].reshape(-1, per, BLOCK)
        if size == 2 * BLOCK and kind == SCALED and len(kinds) > 64 and not _is_promising(whole):
            return None
    is_on = kinds != NONE
    if is_on.mean() < _LEAST_SHARE:
        return None
    rest = np.concatenate([whole.reshape(-1, BLOCK)[~is_on].reshape(-1), values[len(whole) :]])
    is_same = np.zeros(len(kinds), np.bool_)
    is_same[1::2] = is_on[1::2] & (kinds[1::2] == kinds[::2])
    is_same[1::2] &= (constants[1::2].view(np.uint32) == constants[::2].view(np.uint32)).all(1)
    said = np.where(is_same, SAME, kinds).astype(np.uint8)
    return said, _constants_said(said, constants), levels[is_on].reshape(-1), rest


def from_grids(kinds: Kinds, constants: Floats, levels: Levels, rest: Floats) -> Floats:
    """The values again. Raises ValueError where the parts do not fit together. O(n)."""
    if len(kinds) and (kinds.max() > SAME or kinds[0] == SAME):
        raise ValueError("a kind that is not known")
    starts = np.flatnonzero(kinds != SAME)
    source = starts[np.cumsum(kinds != SAME) - 1] if len(kinds) else starts
    full = kinds[source]
    needed = np.array([0, 1, 2, 0])[kinds]
    is_on = full != NONE
    num_rest = int((~is_on).sum()) * BLOCK
    if needed.sum() != len(constants) or is_on.sum() * BLOCK != len(levels) or num_rest > len(rest):
        raise ValueError("lengths do not fit")
    first = (np.cumsum(needed) - needed)[source]
    values = np.empty((len(kinds), BLOCK), np.float32)
    values[~is_on] = rest[:num_rest].reshape(-1, BLOCK)
    q = np.zeros((len(kinds), BLOCK), np.float64)
    q[is_on] = levels.reshape(-1, BLOCK)
    for kind in (SCALED, AFFINE):
        of_kind = full == kind
        scale = constants[first[of_kind]]
        least = constants[first[of_kind] + 1] if kind == AFFINE else None
        values[of_kind] = _values(scale, least, q[of_kind])
    return np.concatenate([values.reshape(-1), rest[num_rest:]])


def _values(scale: Floats, least: Floats | None, q: npt.NDArray[np.float64]) -> Floats:
    """Rounded once: products of a float32 and an integer are exact in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        exact = scale.astype(np.float64)[:, None] * q
        if least is not None:
            exact += least.astype(np.float64)[:, None]
        made: Floats = exact.astype(np.float32)
    return made


def _tried(blocks: Floats, kind: int, most: int) -> tuple[Floats, Levels, npt.NDArray[np.bool_]]:
    """Constants [n, 2] and levels of blocks whose greatest integer is ``most``, and of which that is true."""
    with np.errstate(all="ignore"):
        if kind == AFFINE:
            least = blocks.min(1)
            scale = ((blocks.max(1) - least).astype(np.float64) / most).astype(np.float32)
        else:
            least = np.zeros(len(blocks), np.float32)
            scale = (np.abs(blocks).max(1).astype(np.float64) / most).astype(np.float32)
            # Where zeros are -0.0, the scale was negative.
            scale = np.where((blocks.view(np.uint32) == _NEGATIVE_ZERO).any(1), -scale, scale)
        divisor = np.where(scale == 0, 1, scale).astype(np.float64)[:, None]
        q = np.rint((blocks.astype(np.float64) - least[:, None]) / divisor)
        q = np.clip(np.nan_to_num(q), -127, 127) + 0.0  # and no -0.0
        made = _values(scale, least if kind == AFFINE else None, q)
        is_on = (made.view(np.uint32) == blocks.view(np.uint32)).all(1)
    return np.stack([scale, least], axis=1), q.astype(np.int8), is_on


def _is_promising(values: Floats) -> bool:
    """Whether a few blocks hold the same value more than once: what was never quantised seldom does."""
    some: Any = values.reshape(-1, 2 * BLOCK)[:: max(1, len(values) // (2 * BLOCK * 64))]
    return float(np.mean([len(np.unique(block)) for block in some])) < 0.95 * 2 * BLOCK


def _constants_said(kinds: Kinds, constants: Floats) -> Floats:
    """One of each scaled block, two of each affine one, in their order."""
    is_said = np.stack([(kinds == SCALED) | (kinds == AFFINE), kinds == AFFINE], axis=1)
    said: Floats = constants[is_said]
    return said
