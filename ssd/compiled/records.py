"""Memory that Python and kernels share, by names: a class says the fields, both sides read and write ``record.field``.

A kernel gets one address and finds everything from there. What lies at it is said once, by a subclass of ``Record``
whose annotations name a numpy type; its layout is that of a C struct. In Python a record is a view by ``ctypes``, whose
fields are read in a fiftieth of the time of numpy's; in kernels it is numba's record, a load at a fixed offset.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Generic, TypeVar, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
from numba import from_dtype, njit

from ssd.compiled.addresses import array_of
from ssd.compiled.registry import name_memory

Int64 = Annotated[int, np.int64]
Uint64 = Annotated[int, np.uint64]
Int32 = Annotated[int, np.int32]
Float64 = Annotated[float, np.float64]
Address = Annotated[int, np.int64]
"""Of an array or a record whose owner outlives every call that is given this one."""


class Record:
    """Base of records. A field is ``name: Int64`` or another of the types above; a record inside the record,
    ``name: Other``; or an array inside it, ``name: Annotated[Int64s, np.int64, shape]``, also one of records,
    ``name: Annotated[Sequence[Other], Other, shape]``.
    """


R = TypeVar("R", bound=Record)


_layouts: dict[type[Record], np.dtype[Any]] = {}


def dtype_of(record: type[Record]) -> np.dtype[Any]:
    """The layout of a record, aligned as C does."""
    if record not in _layouts:
        fields = []
        for name, hint in get_type_hints(record, include_extras=True).items():
            _, element, *shape = get_args(hint) or (None, hint)
            fields.append((name, dtype_of(element) if issubclass(element, Record) else element, *shape))
        _layouts[record] = np.dtype(fields, align=True)
    return _layouts[record]


class Records(Generic[R]):
    """``count`` records in a row, zero at first, and the owner of their memory; ``records[i]`` is a view."""

    def __init__(self, record: type[R], count: int = 1) -> None:
        layout = dtype_of(record)
        memory = np.zeros(count * layout.itemsize, np.uint8)
        name_memory(memory)
        self.array: npt.NDArray[Any] = memory.view(layout)
        """Of all records: ``records.array["field"]`` is an array over them."""
        # Not of ``self.array``, for which numpy would describe every field first: several times all of the rest.
        structs: Any = (_struct_of(layout) * count).from_buffer(memory.data) if count else ()
        self.address = ctypes.addressof(structs) if count else 0
        self._views: list[R] = list(structs)

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, i: int) -> R:
        return self._views[i]

    def __iter__(self) -> Iterator[R]:
        return iter(self._views)


@cache
def _struct_of(layout: np.dtype[Any]) -> Any:
    struct = np.ctypeslib.as_ctypes_type(layout)
    assert ctypes.sizeof(struct) == layout.itemsize
    return struct


def view_of(record: type[R]) -> Callable[[int], R]:
    """For kernels: a function from an address to the record there."""
    views = views_of(record)

    @njit(forceinline=True)
    def at(address: int) -> Any:
        return views(address, 1)[0]

    return at  # type: ignore[no-any-return]


def views_of(record: type[R]) -> Callable[[int, int], Sequence[R]]:
    """For kernels: a function from an address and a number to the array of records there."""
    layout = dtype_of(record)
    return array_of(from_dtype(layout), layout.itemsize)
