"""Compile functions that read memory by its address, and define the records that they share with Python.

A kernel gets the address of one record and finds all other data from there, so one call can serve segments of any
number, size and token width. The memory layout of a record is that of a C struct; it is defined by a subclass of
``Record``, whose annotations name numpy types. Python and kernels both read and write ``record.field``. In Python a
record is a ``ctypes`` view, whose fields are fifty times as fast to read as numpy's. In kernels it is numba's record;
reading a field is one load at a fixed offset.

Addresses are checked only in the checked build, see `code_cache`. They come from arrays that a ``Snapshot`` or a
drafter keeps alive.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Generic, TypeVar, cast, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, from_dtype, njit, types
from numba.extending import intrinsic

from ssd.jit.code_cache import CHECKED, cache_machine_code, register_memory, registered_memory

TokenIds = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Float64s = npt.NDArray[np.float64]
_F = TypeVar("_F", bound=Callable[..., Any])


_BYTE: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer


def address(data: npt.NDArray[Any] | array.array[Any]) -> int:
    """Return the memory address of an array's data, through which a kernel may access only the memory of this array."""
    register_memory(data)
    try:
        return ctypes.addressof(_BYTE(data))  # five times as fast as the line below, thirty times for records
    except (TypeError, ValueError):  # the array is read-only, not contiguous, or empty
        return int(np.asarray(data).__array_interface__["data"][0])


def _compiled(function: _F, **options: Any) -> _F:
    dispatcher = njit(nogil=True, boundscheck=CHECKED or None, **options)(function)
    cache_machine_code(dispatcher)
    _share_code_of_constants(dispatcher)
    return cast(_F, dispatcher)


def _share_code_of_constants(dispatcher: Any) -> None:
    """Make numba compile a kernel only once, even if kernels call it with different constants."""
    find = dispatcher.get_call_template

    def find_any(args: Any, kws: Any) -> Any:
        return find(tuple(map(types.unliteral, args)), {name: types.unliteral(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = find_any


def kernel(function: _F) -> _F:
    """Decorate a function so that numba compiles it at its first call and stores the machine code.

    The compiled function runs without the GIL.
    """
    return _compiled(function)


def inlined(function: _F) -> _F:
    """Compile a small function with numba and inline it into the kernels that call it. Only kernels should call it."""
    return _compiled(function, forceinline=True)


def pointer_to(element: Any) -> Any:
    """Return a function, callable in numba code, that casts an address to a pointer to the numba type ``element``."""

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
    def check_memory(address: int, num_bytes: int) -> None:
        """Raise IndexError unless the ``num_bytes`` bytes at ``address`` lie in one registered block of memory."""
        if num_bytes == 0:
            return
        table = registered_memory()
        low, high = 0, _load_int64(table)
        while low < high:  # binary search for the number of blocks that start at the address or before it
            middle = (low + high) >> 1
            if _load_int64(table + 8 + 16 * middle) <= address:
                low = middle + 1
            else:
                high = middle
        if low == 0 or num_bytes < 0 or address + num_bytes > _load_int64(table + 16 * low):
            raise IndexError("a kernel accessed memory that is not registered, or no longer registered")

else:

    @inlined
    def check_memory(address: int, num_bytes: int) -> None:
        """Raise IndexError unless ``num_bytes`` from ``address`` on lie in one registered block of memory."""


@inlined
def load_uint64(address: int) -> int:
    """Load eight bytes at any memory address, little-endian."""
    check_memory(address, 8)
    return _load_uint64(address)  # type: ignore[no-any-return]


@inlined
def load_uint32(address: int) -> int:
    """Load four bytes at any memory address as an unsigned number, little-endian."""
    check_memory(address, 4)
    return _load_uint32(address)  # type: ignore[no-any-return]


def prefetch_line(builder: Any, place: Any) -> None:
    """Generate code that prefetches the CPU cache line at a memory address; the address need not be valid."""
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = builder.module.declare_intrinsic(
        "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    )
    read, nearest, data = (ir.Constant(flag, value) for value in (0, 3, 1))
    builder.call(function, [builder.inttoptr(place, byte), read, nearest, data])


@intrinsic
def prefetch(_typing: Any, _address: Any) -> Any:
    """Prefetch the CPU cache line at a memory address; the address need not be valid."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        prefetch_line(builder, args[0])
        return context.get_dummy_value()

    return types.none(types.int64), generate


@intrinsic
def select_int64(_typing: Any, _condition: Any, _one: Any, _other: Any) -> Any:
    """Return one of two int64 values without a branch instruction, for conditions that the processor cannot predict."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        chosen = builder.select(*args)
        chosen.set_metadata("unpredictable", builder.module.add_metadata([]))
        return chosen

    return types.int64(types.boolean, types.int64, types.int64), generate


@intrinsic
def leading_zeros(_typing: Any, value: Any) -> Any:
    """Return the number of zero bits above the highest set bit of a uint64; 64 for zero."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


def array_of(element: Any, itemsize: int) -> Callable[[int, int], Any]:
    """Return a function, callable in numba code, that makes an array from a memory address and a length.

    ``element`` is the numba type of the elements, and ``itemsize`` their size in bytes.
    """
    pointer = pointer_to(element)

    @njit(forceinline=True)
    def at(address: int, length: int) -> Any:
        check_memory(address, itemsize * length)
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
"""The type of a record field that holds the memory address of an array or record.

The array or record must be kept alive while kernels use the address.
"""


class Record:
    """The base class of records: structs in memory that Python and numba kernels both read and write.

    A field is ``name: Int64`` or another of the scalar types in this module; a nested record, ``name: Other``; or an
    array, ``name: Annotated[Int64s, np.int64, shape]``, also of records: ``name: Annotated[Sequence[Other], Other,
    shape]``.
    """


R = TypeVar("R", bound=Record)


_layouts: dict[type[Record], np.dtype[Any]] = {}


def dtype_of(record: type[Record]) -> np.dtype[Any]:
    """Return the memory layout of a record class as a numpy dtype, aligned as in C."""
    if record not in _layouts:
        fields = []
        for name, hint in get_type_hints(record, include_extras=True).items():
            _, element, *shape = get_args(hint) or (None, hint)
            fields.append((name, dtype_of(element) if issubclass(element, Record) else element, *shape))
        _layouts[record] = np.dtype(fields, align=True)
    return _layouts[record]


def offset_of(record: type[Record], field: str) -> int:
    """Return the offset in bytes of a record's field."""
    fields: Any = dtype_of(record).fields
    return int(fields[field][1])


class Records(Generic[R]):
    """An array of ``count`` records, initially zero, that owns their memory; ``records[i]`` is a view of one record."""

    def __init__(self, record: type[R], count: int = 1) -> None:
        layout = dtype_of(record)
        memory = np.zeros(count * layout.itemsize, np.uint8)
        register_memory(memory)
        self.array: npt.NDArray[Any] = memory.view(layout)
        """The records as a numpy array: ``records.array["field"]`` contains this field of all records."""
        # Not from ``self.array``: numpy would describe every field first, which takes longer than everything else here.
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
    """Return a function, callable in numba code, that makes a view of the record at a memory address."""
    views = views_of(record)

    @njit(forceinline=True)
    def at(address: int) -> Any:
        return views(address, 1)[0]

    return at  # type: ignore[no-any-return]


def views_of(record: type[R]) -> Callable[[int, int], Sequence[R]]:
    """Return a function, callable in numba code, that makes an array of records from a memory address and a length."""
    layout = dtype_of(record)
    return array_of(from_dtype(layout), layout.itemsize)
