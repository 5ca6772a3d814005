"""Keeping the sorter's threads out of the model's way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pydivsufsort

_Setter = Callable[[int], None]
_Getter = Callable[[], int]


def _find_runtimes() -> list[tuple[_Getter, _Setter]]:
    """OpenMP runtimes that libdivsufsort may be bound to: its own copy, or one that torch loaded before."""
    libraries = [ctypes.CDLL(None)]
    libraries += [ctypes.CDLL(str(path)) for path in Path(pydivsufsort.__file__).parent.glob("libdivsufsort.so*")]
    found = [library for library in libraries if hasattr(library, "omp_set_num_threads")]
    return [(library.omp_get_max_threads, library.omp_set_num_threads) for library in found]


_RUNTIMES = _find_runtimes()


@contextmanager
def one_openmp_thread() -> Iterator[None]:
    """Run the body's OpenMP regions on the calling thread alone; other threads keep their setting.

    A second pool of OpenMP threads in the process makes libgomp stop spinning at barriers, because it then counts more
    threads than processors: on two cores that made a forward pass of the bundled model over five positions take 12 ms
    instead of 6, from the first sort on.
    """
    before = [get() for get, _ in _RUNTIMES]
    for _, set_threads in _RUNTIMES:
        set_threads(1)
    try:
        yield
    finally:
        for (_, set_threads), number in zip(_RUNTIMES, before, strict=True):
            set_threads(number)
