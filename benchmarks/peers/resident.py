"""Resident memory of this process, as far as it is in use."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path


def resident_bytes() -> int:
    """Resident set size after freed memory went back to the kernel.

    The trim is in the peer's favour: what it used while inserting and freed since is not held against it.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries give pages back themselves
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
