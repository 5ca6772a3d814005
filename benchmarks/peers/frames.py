"""Frames on a pipe: a header and arrays of token ids, pickled behind a mark.

Both ends are ours and on one machine; the mark is there because a library that prints to the wrong descriptor, or a
process that dies half way, must be an error and not a wrong figure.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
_MARK: Final = b"PEER"


class FrameError(Exception):
    """The stream is out of step, or ended inside a frame."""


def write_frame(stream: IO[bytes], header: dict[str, Any], arrays: Sequence[TokenIds] = ()) -> None:
    """Write one frame and flush. Raises TypeError for anything but int32 in one dimension."""
    for array in arrays:
        if array.dtype != np.int32 or array.ndim != 1:
            raise TypeError(f"token ids must be int32[n], got {array.dtype}{list(array.shape)}")
    stream.write(_MARK)
    pickle.dump((header, [array.tobytes() for array in arrays]), stream, protocol=5)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], list[TokenIds]] | None:
    """The next frame, or None where the stream ends between two frames; the arrays are contiguous and writable.

    Raises FrameError on anything else than a whole frame.
    """
    mark = stream.read(len(_MARK))
    if not mark:
        return None
    if mark != _MARK:
        raise FrameError(f"not a frame: {mark!r}")
    try:
        header, parts = pickle.load(stream)
        return header, [np.frombuffer(bytearray(part), np.int32) for part in parts]
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise FrameError(f"the stream ended inside a frame, or holds another thing: {error}") from error
