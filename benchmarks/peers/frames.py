"""Frames on a pipe: a JSON header and arrays of token ids.

A frame is, little-endian::

    offset  bytes
         0      4   b"PEER"
         4      4   h, length of the header
         8      8   n, number of token ids
        16      h   header, a JSON object; "lengths" says how the ids divide into arrays
      16+h     4n   token ids, int32, the arrays one after another

Both ends are ours and on one machine; the checks are there because a library that prints to the wrong descriptor, or a
process that dies half way, must be an error and not a wrong figure.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
"""int32[n], oldest token first."""

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"PEER"
_MAX_HEADER_BYTES = 1 << 28
_MAX_TOKENS = 1 << 28


class FrameError(Exception):
    """The stream holds something that is not a frame, or ended inside one."""


def write_frame(stream: IO[bytes], header: dict[str, Any], arrays: Sequence[TokenIds] = ()) -> None:
    """Write one frame and flush. ``header`` must not hold "lengths"; anything that is not int32[n] raises TypeError."""
    for array in arrays:
        if array.dtype != np.int32 or array.ndim != 1:
            raise TypeError(f"token ids must be int32[n], got {array.dtype}{list(array.shape)}")
    text = json.dumps({**header, "lengths": [len(array) for array in arrays]}).encode()
    num_tokens = sum(len(array) for array in arrays)
    if len(text) > _MAX_HEADER_BYTES or num_tokens > _MAX_TOKENS:
        raise FrameError(f"a frame of {len(text)} header bytes and {num_tokens} tokens is too large")
    stream.write(_PREFIX.pack(_MAGIC, len(text), num_tokens))
    stream.write(text)
    for array in arrays:
        stream.write(array.astype("<i4", copy=False).tobytes())
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], list[TokenIds]] | None:
    """The next frame, or None where the stream ends between two frames.

    The arrays are contiguous, writable views of one buffer. Raises FrameError on anything else than a whole frame.
    """
    prefix = bytearray(_PREFIX.size)
    got = _fill(stream, prefix)
    if got == 0:
        return None
    magic, num_header_bytes, num_tokens = _PREFIX.unpack(prefix)
    if got < _PREFIX.size or magic != _MAGIC:
        raise FrameError(f"not a frame: {bytes(prefix[:got])!r}")
    if num_header_bytes > _MAX_HEADER_BYTES or num_tokens > _MAX_TOKENS:
        raise FrameError(f"a frame of {num_header_bytes} header bytes and {num_tokens} tokens is too large")
    text, body = bytearray(num_header_bytes), bytearray(4 * num_tokens)
    if _fill(stream, text) < len(text) or _fill(stream, body) < len(body):
        raise FrameError("the stream ended inside a frame")
    try:
        header = json.loads(text)
        lengths = header.pop("lengths")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise FrameError(f"not a header: {bytes(text[:80])!r}") from error
    if not isinstance(lengths, list) or not all(isinstance(length, int) and length >= 0 for length in lengths):
        raise FrameError(f"lengths must be a list of counts, got {lengths!r}")
    if sum(lengths) != num_tokens:
        raise FrameError(f"the header divides {sum(lengths)} tokens, the frame holds {num_tokens}")
    tokens: TokenIds = np.frombuffer(body, "<i4")
    stops = np.cumsum(lengths, dtype=np.int64)
    return header, [tokens[stop - length : stop] for length, stop in zip(lengths, stops, strict=True)]


def _fill(stream: IO[bytes], buffer: bytearray) -> int:
    """Read until ``buffer`` is full or the stream ends; returns the number of bytes read."""
    view, done = memoryview(buffer), 0
    while done < len(view):
        got = stream.read(min(len(view) - done, 1 << 20))  # in pieces, so that a large frame is not held twice
        if not got:
            break
        view[done : done + len(got)] = got
        done += len(got)
    return done
