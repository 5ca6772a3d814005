"""Chunks of files, smaller: numbers of several bytes by planes, weights that were quantised once by their grids.

The high bytes of weights are nearly all alike, the low ones are noise: apart, the first shrink to a third (as DFloat11
says of bfloat16, Zhang et al. 2025, section 2). Weights that come from integers and a scale for each block are these
again, where multiplying gives back every bit (`grids.py`).
"""

from __future__ import annotations

import numpy as np

from benchmarks.offline.grids import from_grids, to_grids
from benchmarks.offline.streams import PartError, join, split

BYTES, PLANES_2, PLANES_4, GRIDS = "bytes", "planes-2", "planes-4", "grids"
_WIDTHS = {PLANES_2: 2, PLANES_4: 4}
_NUM_GRID_STREAMS = 11


def encode(data: bytes, width: int) -> tuple[str, bytes]:
    """How ``data`` was written, whose numbers have ``width`` bytes, and what was. O(n)."""
    if width == 4 and len(data) % 4 == 0 and (grids := to_grids(np.frombuffer(data, "<f4"))) is not None:
        return GRIDS, join(_grid_streams(grids))
    for way, of_way in _WIDTHS.items():
        if width == of_way and len(data) % width == 0:
            return way, join(_planes(data, width))
    return BYTES, join([data])


def decode(way: str, data: bytes, size: int) -> bytes:
    """The ``size`` bytes that `encode` was given. Raises PartError where it is torn or in a way that is not known."""
    if way == BYTES:
        (made,) = split(data, 1)
    elif way in _WIDTHS:
        made = _from_planes(split(data, _WIDTHS[way]))
    elif way == GRIDS:
        made = _from_grid_streams(split(data, _NUM_GRID_STREAMS))
    else:
        raise PartError(f"a chunk is written in a way that is not known: {way[:20]!r}")
    if len(made) != size:
        raise PartError(f"a chunk has {len(made)} bytes, not {size}")
    return made


def _planes(data: bytes, width: int) -> list[bytes]:
    numbers = np.frombuffer(data, np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(numbers[:, plane]).tobytes() for plane in range(width)]


def _from_planes(planes: list[bytes]) -> bytes:
    if len({len(plane) for plane in planes}) != 1:
        raise PartError("the planes of a chunk are not of one length")
    return np.stack([np.frombuffer(plane, np.uint8) for plane in planes], axis=1).tobytes()


def _grid_streams(grids: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> list[bytes]:
    kinds, constants, levels, rest = grids
    return [
        kinds.tobytes(),
        *_planes(constants.tobytes(), 4),
        levels.tobytes(),
        np.uint32(len(rest)).tobytes(),
        *_planes(rest.tobytes(), 4),
    ]


def _from_grid_streams(streams: list[bytes]) -> bytes:
    kinds, levels = np.frombuffer(streams[0], np.uint8), np.frombuffer(streams[5], np.int8)
    constants = np.frombuffer(_from_planes(streams[1:5]), "<f4")
    rest = np.frombuffer(_from_planes(streams[7:11]), "<f4")
    try:
        return from_grids(kinds, constants, levels, rest).tobytes()
    except (ValueError, IndexError) as error:
        raise PartError(f"a chunk's grids are torn: {error}") from error
