"""A read of a mapped file that is not there any more gives zeros, and does not end the process.

Reading behind the end of a file that was cut while mapped, or what its disk cannot give, is SIGBUS. The handler here
puts a page of zeros in the place of the page that is gone, if it belongs to a map that is watched, and the read is done
again. It is machine code, takes no lock and allocates nothing, so it may interrupt anything. SIGBUS elsewhere goes to
whoever handled it before.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import threading
from typing import Any, Final

import numpy as np
from numba import cfunc, types

from ssd.compiled.addresses import address, int64_array
from ssd.errors import StoreUnavailable

MOST_MAPS: Final = 4096
"""Watched at a time; segments are few and large."""

_START, _STOP, _LOST = 0, 1, 2
_PAGE: Final = mmap.PAGESIZE
_ADDRESS_OFFSET: Final = 16  # of si_addr in siginfo_t, Linux with 64 bits
_PROT: Final = mmap.PROT_READ
_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
_SIGBUS: Final = int(signal.SIGBUS)
_SA_SIGINFO, _SA_ONSTACK = 4, 0x08000000

_maps = np.zeros((MOST_MAPS, 3), np.int64)
"""Of each map: its first address, the one behind its last, how many pages were lost. All zero: free."""
_lock = threading.Lock()


class _Action(ctypes.Structure):
    """``struct sigaction`` as glibc and musl have it on 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint8 * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_previous, _default = _Action(), _Action()
_handed_over = np.zeros(1, np.int64)
_compiled: list[Any] = []  # the handler, once there is one

_MAPS_AT: Final = address(_maps)
_PREVIOUS_AT: Final = ctypes.addressof(_previous)
_DEFAULT_AT: Final = ctypes.addressof(_default)
_HANDED_OVER_AT: Final = address(_handed_over)

_mmap = types.ExternalFunction(
    "mmap", types.int64(types.int64, types.int64, types.int32, types.int32, types.int32, types.int64)
)
_sigaction = types.ExternalFunction("sigaction", types.int32(types.int32, types.int64, types.int64))


def _on_bus_error(number: int, information: int, _context: int) -> None:
    where = int64_array(information + _ADDRESS_OFFSET, 1)[0]
    maps = int64_array(_MAPS_AT, 3 * MOST_MAPS)
    for i in range(MOST_MAPS):
        if maps[3 * i + _START] <= where < maps[3 * i + _STOP]:
            page = where & ~(_PAGE - 1)
            maps[3 * i + _LOST] += 1
            if _mmap(page, _PAGE, np.int32(_PROT), np.int32(_FLAGS), np.int32(-1), 0) == page:
                return
    # Not ours: it happens again, and whoever was there before handles it, once, for that one may put this back.
    handed_over = int64_array(_HANDED_OVER_AT, 1)
    _sigaction(np.int32(number), _PREVIOUS_AT if handed_over[0] == 0 else _DEFAULT_AT, 0)
    handed_over[0] += 1


def _install() -> None:
    """See to it that the handler is there: others may have put theirs since. Raises StoreUnavailable."""
    if not _compiled:
        _compiled.append(cfunc(types.void(types.int32, types.int64, types.int64))(_on_bus_error))
    libc, present = ctypes.CDLL(None), _Action()
    action = _Action(handler=_compiled[0].address, flags=_SA_SIGINFO | _SA_ONSTACK)
    if libc.sigaction(_SIGBUS, None, ctypes.byref(present)) == 0:
        if present.handler == action.handler:
            return
        ctypes.pointer(_previous)[0] = present
        _handed_over[0] = 0
        if libc.sigaction(_SIGBUS, ctypes.byref(action), None) == 0:
            return
    raise StoreUnavailable("this system lets no process handle SIGBUS: give --cache-memory-bytes more room")


def watch(start: int, num_bytes: int) -> int:
    """Guard ``num_bytes`` at address ``start``, a multiple of the page. A number for ``forget``.

    Raises StoreUnavailable when too many are watched.
    """
    with _lock:
        _install()
        free = np.flatnonzero(_maps[:, _STOP] == 0)
        if len(free) == 0:
            raise StoreUnavailable(
                f"more than {MOST_MAPS} segments are mapped: give --cache-memory-bytes more room, or build larger ones"
            )
        slot = int(free[0])
        _maps[slot] = start, start + num_bytes, 0
        return slot


def num_lost_pages(slot: int) -> int:
    """How many pages of a map could not be read and are zeros now."""
    return int(_maps[slot, _LOST])


def forget(slot: int) -> None:
    """The map is gone. Takes no lock: it may be called by the garbage collector, in the middle of ``watch``."""
    _maps[slot] = 0
