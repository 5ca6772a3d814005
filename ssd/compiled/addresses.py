"""Compiled functions that read memory by its address: one call serves segments of any number, size and token width.

Nothing here is checked, but in the build that ``machine_code`` describes. Addresses come from arrays that a
``Snapshot`` or a drafter keeps alive.

Records are memory that Python and kernels share, by names: a class says the fields, both sides read and write
``record.field``.

A kernel gets one address and finds everything from there. What lies at it is said once, by a subclass of ``Record``
whose annotations name a numpy type; its layout is that of a C struct. In Python a record is a view by ``ctypes``,
whose fields are read in a fiftieth of the time of numpy's; in kernels it is numba's record, a load at a fixed offset.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Generic, TypeVar, cast, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, from_dtype, njit, types
from numba.extending import intrinsic

from ssd.compiled.machine_code import CHECKED, keep_machine_code, name_memory, named_memory

TokenIds = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Float64s = npt.NDArray[np.float64]
_F = TypeVar("_F", bound=Callable[..., Any])


_BYTE: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer


def address(array: npt.NDArray[Any]) -> int:
    """Where the data of ``array`` begin, for kernels: all that they find there is the array's."""
    name_memory(array)
    try:
        return ctypes.addressof(_BYTE(array))  # in a fifth of the time, of records in a thirtieth
    except (TypeError, ValueError):  # read-only, not contiguous, or empty
        return int(array.__array_interface__["data"][0])


def _compiled(function: _F, **options: Any) -> _F:
    dispatcher = njit(nogil=True, boundscheck=CHECKED or None, **options)(function)
    keep_machine_code(dispatcher)
    _take_no_literals(dispatcher)
    return cast(_F, dispatcher)


def _take_no_literals(dispatcher: Any) -> None:
    """Have calls with constants share the code of all others: numba would compile it again for each constant."""
    find = dispatcher.get_call_template

    def find_any(args: Any, kws: Any) -> Any:
        return find(tuple(map(types.unliteral, args)), {name: types.unliteral(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = find_any


def kernel(function: _F) -> _F:
    """Compile ``function`` on its first call, keep the machine code on disk, release the GIL inside."""
    return _compiled(function)


def inlined(function: _F) -> _F:
    """As ``kernel``, for small functions that only other kernels call; LLVM inlines them."""
    return _compiled(function, forceinline=True)


def pointer_to(element: Any) -> Any:
    """For kernels: a function from an address to the pointer, to ``element`` of numba's types, that it is."""

    @intrinsic
    def pointer(_typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(types.CPointer(element)))

        return types.CPointer(element)(types.int64), generate

    return pointer


def _load(bits: int, result: Any) -> Any:
    @intrinsic
    def load(_typing: Any, address: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            value = builder.load(pointer)
            value.align = 1
            return builder.zext(value, ir.IntType(64)) if bits < 64 else value

        return result(types.int64), generate

    return load


_load_int64 = _load(64, types.int64)
_load_uint64 = _load(64, types.uint64)
_load_uint32 = _load(32, types.int64)


if CHECKED:

    @kernel
    def require(address: int, num_bytes: int) -> None:
        """Raise IndexError unless ``num_bytes`` from ``address`` on lie in one piece of memory that Python named."""
        if num_bytes == 0:
            return
        table = named_memory()
        low, high = 0, _load_int64(table)
        while low < high:  # how many begin at the address or before it
            middle = (low + high) >> 1
            if _load_int64(table + 8 + 16 * middle) <= address:
                low = middle + 1
            else:
                high = middle
        if low == 0 or num_bytes < 0 or address + num_bytes > _load_int64(table + 16 * low):
            raise IndexError("an address that kernels were given lies in no memory that is held for them")

else:

    @inlined
    def require(address: int, num_bytes: int) -> None:
        """Nothing: only a checked build looks."""


@inlined
def load_uint64(address: int) -> int:
    """Eight bytes at any address, little-endian."""
    require(address, 8)
    return _load_uint64(address)  # type: ignore[no-any-return]


@inlined
def load_uint32(address: int) -> int:
    """Four bytes at any address, little-endian, as a number >= 0."""
    require(address, 4)
    return _load_uint32(address)  # type: ignore[no-any-return]


@intrinsic
def prefetch(_typing: Any, _address: Any) -> Any:
    """Have the memory at an address brought near; any address will do."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        )
        read, nearest, data = (ir.Constant(flag, value) for value in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], byte), read, nearest, data])
        return context.get_dummy_value()

    return types.none(types.int64), generate


@intrinsic
def choose(_typing: Any, _condition: Any, _one: Any, _other: Any) -> Any:
    """One int64 where a condition holds, else another, without a branch: for conditions that nobody can guess."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        chosen = builder.select(*args)
        chosen.set_metadata("unpredictable", builder.module.add_metadata([]))
        return chosen

    return types.int64(types.boolean, types.int64, types.int64), generate


@intrinsic
def leading_zeros(_typing: Any, value: Any) -> Any:
    """Zero bits above the highest one of a uint64; 64 for zero."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


def array_of(element: Any, itemsize: int) -> Callable[[int, int], Any]:
    """For kernels: a function from an address and a length to the array there, of one of numba's types."""
    pointer = pointer_to(element)

    @njit(forceinline=True)
    def at(address: int, length: int) -> Any:
        require(address, itemsize * length)
        return carray(pointer(address), (length,))

    return at  # type: ignore[no-any-return]


uint8_array: Callable[[int, int], npt.NDArray[np.uint8]] = array_of(types.uint8, 1)
uint16_array: Callable[[int, int], npt.NDArray[np.uint16]] = array_of(types.uint16, 2)
int32_array: Callable[[int, int], TokenIds] = array_of(types.int32, 4)
uint64_array: Callable[[int, int], UInt64s] = array_of(types.uint64, 8)
int64_array: Callable[[int, int], Int64s] = array_of(types.int64, 8)
float32_array: Callable[[int, int], npt.NDArray[np.float32]] = array_of(types.float32, 4)
float64_array: Callable[[int, int], Float64s] = array_of(types.float64, 8)


Int64 = Annotated[int, np.int64]
Uint64 = Annotated[int, np.uint64]
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


def offset_of(record: type[Record], field: str) -> int:
    """Bytes from the begin of a record to one of its fields."""
    fields: Any = dtype_of(record).fields
    return int(fields[field][1])


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
