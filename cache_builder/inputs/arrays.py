"""Token ids in a ``.npy`` file: one row of integers, in which -1 ends every sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from cache_builder.inputs.record import LONGEST_RECORD, InputError, Record
from ssd.errors import first_line

END: Final = -1

_PIECE = 1 << 18


def array_header(shown: str, file: IO[bytes]) -> tuple[int, np.dtype[Any]]:
    """How many numbers the file holds, and their type; raises InputError."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except OSError:
        raise
    except Exception as error:  # it is read as Python's own text
        raise InputError(f"{shown}: no .npy file ({first_line(error)[:200]}). Write it with numpy.save") from None
    if len(shape) != 1 or dtype.kind not in "iu" or dtype.itemsize > 8:
        raise InputError(f"{shown}: an array int32[n] was expected, -1 after every sequence, got {dtype}{list(shape)}")
    return shape[0], dtype


def array_sequences(shown: str, file: IO[bytes], start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """The sequences that begin within numbers ``start`` .. ``stop``; raises InputError, and what reading raises."""
    size, dtype = array_header(shown, file)
    stop = size if stop is None else min(stop, size)
    at = max(0, start - 1)
    if at:
        file.seek(at * dtype.itemsize, 1)
    is_within = start > 0  # a sequence that began before is another part's
    begun: list[npt.NDArray[Any]] = []
    begun_at = at
    num_begun = 0
    while at < size and not (begun_at >= stop and not is_within and not begun):
        wanted = min(_PIECE, size - at)
        data = file.read(wanted * dtype.itemsize)
        if len(data) < wanted * dtype.itemsize:
            raise InputError(f"{shown}: it ends within its {size} numbers. Copy it again")
        numbers = np.frombuffer(data, dtype)
        done = 0
        for end in np.flatnonzero(numbers == END).tolist():
            if not is_within and begun_at < stop:
                yield _record(
                    shown, begun_at, np.concatenate([*begun, numbers[done:end]]) if begun else numbers[done:end]
                )
            begun, num_begun, is_within, done = [], 0, False, end + 1
            begun_at = at + done
            if begun_at >= stop:
                return
        if not is_within:
            begun.append(numbers[done:])
            num_begun += len(numbers) - done
            if num_begun > LONGEST_RECORD:
                raise InputError(f"{shown}: {LONGEST_RECORD} numbers without a -1, which ends a sequence")
        at += wanted
    if num_begun and begun_at < stop:
        yield _record(shown, begun_at, np.concatenate(begun))


def _record(shown: str, at: int, numbers: npt.NDArray[Any]) -> Record:
    return Record(f"{shown}: number {at}", "", is_json=True, line={"token_ids": numbers})
