"""The bytes of a file where a lookup can read them, whatever becomes of the file.

Within a budget they are copied into memory of the process's own: nobody else can change that. Beyond it the file is
mapped, and shared with every process that maps it. Then others can change what is read, and cut the file short, which
ends a process that reads on by SIGBUS. So a map is guarded: pages that are gone become zeros (``bus_guard``), a page of
zeros lies before and behind, and ``has_changed`` tells its owner to give it up. Readers bound what they take from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Final

PAGE: Final = mmap.PAGESIZE
_HUGE_BYTES: Final = 1 << 21

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_MAP_FIXED: Final = 0x10  # of Linux, on every processor


class CopyBudget:
    """How much memory private copies may still take. Safe from any thread."""

    def __init__(self, num_bytes: int) -> None:
        self._free = num_bytes
        self._given_back: deque[int] = deque()  # not counted in yet
        self._lock = threading.Lock()

    def take(self, num_bytes: int, *, leaving: int = 0) -> bool:
        """Take ``num_bytes`` if ``leaving`` bytes are left then; whether it was done."""
        with self._lock:
            while self._given_back:
                self._free += self._given_back.popleft()
            if self._free - num_bytes < leaving:
                return False
            self._free -= num_bytes
            return True

    def give_back(self, num_bytes: int) -> None:
        """They are no longer used. Takes no lock: the garbage collector may call it in the middle of ``take``."""
        self._given_back.append(num_bytes)


class GuardedMap:
    """Which file is mapped where. ``has_changed`` : whether it was written to or cut since, or could not be read."""

    def __init__(self, path: Path, status: os.stat_result, slot: int) -> None:
        self.path = path
        self._status = status
        self._slot = slot
        self._is_given_up = False

    def has_changed(self) -> bool:
        """By the file's size and times, and by what reading it met; once True, always. O(1).

        A file with another inode is not ours: no.
        """
        if not self._is_given_up:
            from ssd.retrieval.bus_guard import num_lost_pages

            self._is_given_up = num_lost_pages(self._slot) > 0 or self._is_written_to()
        return self._is_given_up

    def _is_written_to(self) -> bool:
        try:
            now = self.path.stat()
        except OSError:
            return False  # its name is gone, its bytes are not
        return os.path.samestat(now, self._status) and (now.st_size, now.st_mtime_ns) != (
            self._status.st_size,
            self._status.st_mtime_ns,
        )


def read_bytes(
    descriptor: int, path: Path, budget: CopyBudget | None, *, leaving: int = 0
) -> tuple[memoryview, GuardedMap | None]:
    """All bytes of an open file, read-only and aligned to pages, and what watches over them, None over a copy.

    Copied if ``budget`` has room, ``leaving`` so much of it; else mapped. They stay as long as a view of them does. The
    copy of a file that is cut meanwhile ends in zeros. O(n) for a copy. Raises OSError.
    """
    status = os.fstat(descriptor)
    if budget is not None and budget.take(status.st_size, leaving=leaving):
        try:
            return _copy(descriptor, status.st_size, budget), None
        except BaseException:
            budget.give_back(status.st_size)
            raise
    return _guarded_map(descriptor, path, status)


def _anonymous(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _copy(descriptor: int, num_bytes: int, budget: CopyBudget) -> memoryview:
    memory = _anonymous(num_bytes)
    if num_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    view, offset = memoryview(memory), 0
    while offset < num_bytes and (num_read := os.preadv(descriptor, [view[offset : offset + (1 << 26)]], offset)) > 0:
        offset += num_read
    # Last, so that the caller's own handling of an error above is the only one.
    weakref.finalize(memory, budget.give_back, num_bytes).atexit = False
    return view.toreadonly()


def _guarded_map(descriptor: int, path: Path, status: os.stat_result) -> tuple[memoryview, GuardedMap]:
    from ssd.retrieval import bus_guard  # here: it takes a compiler, and most processes map nothing

    num_pages = -(-status.st_size // PAGE)
    memory = _anonymous((num_pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + PAGE
    slot = bus_guard.watch(start, num_pages * PAGE)
    weakref.finalize(memory, bus_guard.forget, slot).atexit = False
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(start, num_pages * PAGE, mmap.PROT_READ, flags, descriptor, 0) != start:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    if hasattr(mmap, "MADV_POPULATE_READ"):  # Linux 5.14: page tables are filled now, not by the first lookups
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_POPULATE_READ)
    return memoryview(memory)[PAGE : PAGE + status.st_size].toreadonly(), GuardedMap(path, status, slot)
