"""Bytes made smaller without loss by what the standard library has, and told apart from bytes that are torn."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

RAW, ZLIB, HUFFMAN = range(3)
"""How a stream is written: as it is, as zlib does, or by the frequencies of its bytes alone, which suits noise."""

_HEAD = struct.Struct("<BII")
"""How, bytes before, bytes after."""

_SAMPLED = 1 << 17
_NEAR = 1.04
"""Ways as near as this for the first bytes are tried on all."""

MOST_BYTES = 64 << 20
"""Of a stream before it was made smaller."""


class PartError(ValueError):
    """A part that is torn, or of another set, or that names what must not be written."""


def packed(data: bytes) -> bytes:
    """``data`` with a head, by the way that is the shortest, or would be for its first bytes. O(n)."""
    sizes = {way: len(_written(data[:_SAMPLED], way)) for way in (HUFFMAN, ZLIB)}
    least = min(sizes.values())
    ways = [way for way, size in sizes.items() if size <= _NEAR * least]
    best, way = min(((_written(data, way), way) for way in ways), key=lambda each: len(each[0]))
    if len(best) >= len(data):
        best, way = data, RAW
    return _HEAD.pack(way, len(data), len(best)) + best


def _written(data: bytes, way: int) -> bytes:
    engine = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY if way == HUFFMAN else 0)
    return engine.compress(data) + engine.flush()


def join(streams: Sequence[bytes]) -> bytes:
    """Each packed, one behind the other."""
    return b"".join(map(packed, streams))


def split(data: bytes, number: int) -> list[bytes]:
    """What `join` joined. Raises PartError where it is not ``number`` whole streams."""
    found, at = [], 0
    for _ in range(number):
        if len(data) < at + _HEAD.size:
            raise PartError("a stream is torn")
        way, size, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if size > MOST_BYTES or length > size or at + length > len(data):
            raise PartError("a stream is torn")
        found.append(_unpacked(way, data[at : at + length], size))
        at += length
    if at != len(data):
        raise PartError("there is more than the streams that should be")
    return found


def _unpacked(way: int, data: bytes, size: int) -> bytes:
    if way == RAW:
        made = data
    elif way in (ZLIB, HUFFMAN):
        try:
            made = zlib.decompressobj(-15).decompress(data, size + 1)
        except zlib.error as error:
            raise PartError(f"a stream is torn: {error}") from error
    else:
        raise PartError(f"a stream is written in a way that is not known: {way}")
    if len(made) != size:
        raise PartError("a stream is not as long as it says")
    return made
