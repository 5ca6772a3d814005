"""A build of the kernels that finds wrong addresses: set SSD_CHECK_ADDRESSES=1 before the process starts.

In that build every view made from an address, and every load from one, must lie inside one piece of memory that Python
named and still holds, and indices of arrays must lie within them; else the kernel raises IndexError. It takes several
times as long, and its machine code is kept beside that of the plain build. Memory is named where its address is
taken: ``addresses.address``, and ``name_memory`` for an array that a kernel takes the address of. Of a view, all that
its owner has counts.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import Counter, deque
from itertools import chain
from threading import RLock
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

CHECKED: Final = os.environ.get("SSD_CHECK_ADDRESSES", "") not in ("", "0")

_SYMBOL: Final = "ssd_named_memory"

_lock = RLock()  # what ends while another is named is forgotten by the same thread
_owners: set[int] = set()  # ids of the arrays that own what was named
_num_owners: Counter[tuple[int, int]] = Counter()  # of each piece of memory, by its begin and end: a file may have some
_tables: deque[npt.NDArray[np.int64]] = deque(maxlen=64)  # the last ones: a kernel may still read one that was replaced
_newest = ctypes.c_int64()  # where the table in use lies: its length, then begin and end of each piece
binding.add_symbol(_SYMBOL, ctypes.addressof(_newest))


def name_memory(array: npt.NDArray[Any]) -> None:
    """Let kernels of a checked build read and write what ``array`` lies in, until that is freed. O(pieces named)."""
    if not CHECKED:
        return
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    whole = owner if owner.base is None else np.frombuffer(owner.base, np.uint8)
    begin = int(whole.__array_interface__["data"][0])
    piece = begin, begin + whole.nbytes
    if id(owner) in _owners or whole.nbytes == 0:
        return
    with _lock:
        _owners.add(id(owner))
        _num_owners[piece] += 1
        _publish()
    weakref.finalize(owner, _forget, id(owner), piece).atexit = False


def _forget(owner: int, piece: tuple[int, int]) -> None:
    with _lock:
        _owners.discard(owner)
        _num_owners[piece] -= 1
        if not _num_owners[piece]:
            del _num_owners[piece]
        _publish()


def _publish() -> None:
    pieces = sorted(_num_owners)
    table = np.array([len(pieces), *chain.from_iterable(pieces)], np.int64)
    _tables.append(table)
    _newest.value = int(table.__array_interface__["data"][0])


_publish()


@intrinsic
def named_memory(_typing: Any) -> Any:
    """For kernels: where the table of what was named lies."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        word = ir.IntType(64)
        newest = builder.module.globals.get(_SYMBOL) or ir.GlobalVariable(builder.module, word, _SYMBOL)
        return builder.load(newest)

    return types.int64(), generate
