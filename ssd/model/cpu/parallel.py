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

Its argument ``call`` is the address of the call's record: how often a thread has asked for tasks, the number of all
tasks, how many a thread gets at a time, the number of threads that have ended normally, and the kernel's own arguments.
"""

_WORTH_THREADS: Final = 1 << 19
"""The number of multiply-adds from which `run_parallel` uses other threads, because starting them takes 2 to 5 µs."""
_BYTE: Final[Callable[[Any], c_char]] = c_char.from_buffer
# The first number of a call's record has a cache line of its own, because all threads write it. Else a thread that
# reads an argument would often wait for the line to come from another core.
_LINE_BYTES: Final = 64
_NUM_ENDED_AT: Final = _LINE_BYTES + 16
_HEADER: Final = _LINE_BYTES // 8 + 3  # the size of a call's record before the kernel's arguments, in numbers
# A thread takes as many successive tasks at a time as make this number of multiply-adds: taking costs about as much as
# a thousand of them, and neighbouring tasks often write to the same cache lines.
_WORK_TOGETHER: Final = 1 << 20
_LEAST_TURNS: Final = 8  # how often each thread can take tasks at least, so that all threads end at about the same time


def run_parallel(
    kernel: Kernel, numbers: tuple[int, ...], tasks: int, work: int, *, factors: tuple[float, ...] = ()
) -> None:
    """Compute ``tasks`` independent tasks by a kernel, on as many threads as torch uses if that is faster.

    Args:
        kernel: Called once on each thread; threads take the next tasks whenever they have finished some.
        numbers: The kernel's arguments, which it reads by `numbers_of`.
        tasks: The number of tasks.
        work: The number of multiply-adds of all tasks; if it is small, the calling thread computes all tasks.
        factors: The kernel's floating-point arguments, which it reads by `factors_of`.

    Raises:
        RuntimeError: The kernel raised an exception on a thread; OpenMP's threads only print it.
    """
    call = bytearray(8 * (_HEADER + len(numbers) + len(factors)))
    num_threads = torch.get_num_threads()
    together = max(1, min(_WORK_TOGETHER * tasks // max(1, work), tasks // (_LEAST_TURNS * num_threads)))
    values = tasks, together, 0, *numbers, *factors
    pack_into(f"{len(values) - len(factors)}q{len(factors)}d", call, _LINE_BYTES, *values)
    address = addressof(_BYTE(call))
    if work < _WORTH_THREADS or tasks == 1 or num_threads == 1 or not (start := _start()):
        kernel(address)
    else:  # always all threads, because OpenMP ends those that a smaller team leaves out
        start(_code_of(kernel), address, num_threads, 0)
        if unpack_from("q", call, _NUM_ENDED_AT)[0] != num_threads:
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
def next_task(call: int, task: int) -> int:
    """Return the index of the task to compute after ``task``, which is -1 at first; -1 if all tasks have been taken."""
    header, task = int64_array(call + _LINE_BYTES, 2), task + 1
    if task % header[1] == 0:
        task = _count_up(call) * header[1]
    if task < header[0]:
        return task
    _count_up(call + _NUM_ENDED_AT)
    return -1


@inlined
def numbers_of(call: int, count: int) -> Any:
    """Return the ``count`` integer arguments of a kernel as an array; ``call`` is the argument of `Kernel`."""
    return int64_array(call + 8 * _HEADER, count)


@inlined
def factors_of(call: int, num_numbers: int, count: int) -> Any:
    """Return the ``count`` floating-point arguments of a kernel, which follow its ``num_numbers`` integer arguments."""
    return float64_array(call + 8 * (_HEADER + num_numbers), count)
