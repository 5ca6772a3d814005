"""Run numba kernels on the OpenMP threads on which torch computes its matrix products.

A thread of OpenMP that has finished its part of a product waits in a loop for the next one, on its own core. Threads of
another pool would compete with it for this core, and waking one takes longer than most kernels of a decoding step.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, addressof, c_char, c_uint, c_void_p
from functools import cache
from struct import pack_into, unpack_from
from typing import Any, Final

import torch
from llvmlite import ir
from numba import types
from numba.experimental.function_type import _get_wrapper_address
from numba.extending import intrinsic

from ssd.jit.addresses import float64_array, inlined, int64_array

Kernel = Callable[[int], None]
"""A compiled function that processes tasks of a `run_parallel` call until `next_task` returns -1.

Its argument ``call`` is the address of the call's record: the number of started tasks, the number of all tasks, the
number of threads that have ended normally, and the kernel's own arguments.
"""

_WORTH_THREADS: Final = 1 << 19
"""The number of multiply-adds from which `run_parallel` uses other threads, because starting them takes 2 to 5 µs."""
_BYTE: Final[Callable[[Any], c_char]] = c_char.from_buffer
_HEADER: Final = 3  # the three numbers at the beginning of a call's record, see `Kernel`


def run_parallel(
    kernel: Kernel, numbers: tuple[int, ...], tasks: int, work: int, *, factors: tuple[float, ...] = ()
) -> None:
    """Compute ``tasks`` independent tasks by a kernel, on as many threads as torch uses if that is faster.

    Args:
        kernel: Called once on each thread; threads take the next task whenever they have finished one.
        numbers: The kernel's arguments, which it reads by `numbers_of`.
        tasks: The number of tasks.
        work: The number of multiply-adds of all tasks; if it is small, the calling thread computes all tasks.
        factors: The kernel's floating-point arguments, which it reads by `factors_of`.

    Raises:
        RuntimeError: The kernel raised an exception on a thread; OpenMP's threads only print it.
    """
    call = bytearray(8 * (_HEADER + len(numbers) + len(factors)))
    pack_into(f"{_HEADER + len(numbers)}q{len(factors)}d", call, 0, 0, tasks, 0, *numbers, *factors)
    address = addressof(_BYTE(call))
    if work < _WORTH_THREADS or tasks == 1 or (num_threads := torch.get_num_threads()) == 1 or not (start := _start()):
        kernel(address)
    else:  # always all threads, because OpenMP ends those that a smaller team leaves out
        start(_code_of(kernel), address, num_threads, 0)
        if unpack_from("q", call, 16)[0] != num_threads:
            raise RuntimeError(f"{kernel.__name__} failed on a thread: the error was printed to stderr")


@cache
def _start() -> Any:
    """Return torch's OpenMP function that runs a C function on several threads; None if it is missing."""
    try:
        start = CDLL(torch._C.__file__).GOMP_parallel  # also finds symbols of the libraries that it needs
    except (OSError, AttributeError):
        return None
    start.argtypes, start.restype = [c_void_p, c_void_p, c_uint, c_uint], None
    return start


@cache
def _code_of(kernel: Any) -> int:
    signature = types.none(types.int64)
    kernel.compile(signature.args)
    return int(_get_wrapper_address(kernel, signature))


@intrinsic
def _count_up(_typing: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), generate


@inlined
def next_task(call: int) -> int:
    """Return the index of the next task of a `run_parallel` call, or -1 if all tasks have been started."""
    task = _count_up(call)
    if task < int64_array(call, _HEADER)[1]:
        return task  # type: ignore[no-any-return]
    _count_up(call + 16)
    return -1


@inlined
def numbers_of(call: int, count: int) -> Any:
    """Return the ``count`` integer arguments of a kernel as an array; ``call`` is the argument of `Kernel`."""
    return int64_array(call + 8 * _HEADER, count)


@inlined
def factors_of(call: int, num_numbers: int, count: int) -> Any:
    """Return the ``count`` floating-point arguments of a kernel, which follow its ``num_numbers`` integer arguments."""
    return float64_array(call + 8 * (_HEADER + num_numbers), count)
