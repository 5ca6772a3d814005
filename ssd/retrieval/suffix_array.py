"""Sorting the positions of a segment by the text before them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pydivsufsort

from ssd.errors import CacheError
from ssd.retrieval.segment import FENCE_STEP, GUARD_BYTES, SEPARATOR, Segment, Tokens, own_tokens, pack, width_for

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


Bytes = npt.NDArray[np.uint8]

_TABLE_SLACK = 1 << 20  # a rank table this much longer than the text is still cheaper than sorting the text's ids
_MAX_SORTED_BYTES = (1 << 31) - 1
MAX_SEGMENT_TOKENS = _MAX_SORTED_BYTES // 4
"""Most that one segment may hold, whatever its ids: they are sorted as up to four bytes each."""
_BLOCK = 1 << 18  # entries handled between two moments when another thread may have the interpreter


def _find_sorter() -> Callable[[int, int, int], int]:
    """``divsufsort`` of the library that pydivsufsort brings: (text, suffix array, n) -> 0 when it went well."""
    for path in Path(pydivsufsort.__file__).parent.glob("libdivsufsort.so*"):
        function = ctypes.CDLL(str(path)).divsufsort
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
        function.restype = ctypes.c_int32
        return function
    raise ImportError("pydivsufsort is installed without its libdivsufsort.so: install it from its wheel")


_divsufsort = _find_sorter()


def dense_ranks(tokens: Tokens) -> npt.NDArray[np.unsignedinteger]:
    """Replace every value by its rank among the distinct values, in the narrowest type that holds them.

    ``tokens`` : int32[n], n >= 1, values >= -1. Returns uint8, uint16 or uint32 [n]; the order of values is kept.
    O(n + largest value), or O(n log n) when the largest value is far beyond n.
    """
    largest = int(tokens.max())
    if largest < 4 * len(tokens) + _TABLE_SLACK:
        present = np.zeros(largest + 2, np.bool_)
        for start in range(0, len(tokens), _BLOCK):
            present[tokens[start : start + _BLOCK] + 1] = True
        table = np.cumsum(present, dtype=np.int32) - 1
        dtype = _narrowest(int(table[-1]) + 1)
        ranks, narrow = np.empty(len(tokens), dtype), table.astype(dtype)
        for start in range(0, len(tokens), _BLOCK):
            ranks[start : start + _BLOCK] = narrow[tokens[start : start + _BLOCK] + 1]
        return ranks
    distinct = np.unique(tokens)
    ranks = np.empty(len(tokens), _narrowest(len(distinct)))
    for start in range(0, len(tokens), _BLOCK):
        ranks[start : start + _BLOCK] = np.searchsorted(distinct, tokens[start : start + _BLOCK])
    return ranks


def _narrowest(num_distinct: int) -> type[np.unsignedinteger]:
    if num_distinct <= 1 << 8:
        return np.uint8
    return np.uint16 if num_distinct <= 1 << 16 else np.uint32


def build_order(tokens: Tokens) -> Tokens:
    """The positions 1..n ordered by the text before them, read backwards: the suffix array of the reversed text.

    ``tokens`` : int32[n], 0 <= n, values >= -1. Returns int32[n]. ``SEPARATOR`` is an ordinary symbol, the smallest; a
    text that ends precedes those it is the beginning of. Raises CacheError when the text is too long for the library.

    libdivsufsort (Y. Mori), the copy that pydivsufsort brings, called directly: O(n log n), about 0.12 s for 10**6
    tokens of 32k distinct ids. It sorts bytes, so work and memory follow the bytes that the distinct ids need: with
    up to 65,536 of them the peak is 12 bytes a token beside the input and the input's copy as ranks. The sort runs
    without the GIL, on one thread, and what follows it lets other threads in every few hundred microseconds.
    """
    n = len(tokens)
    if n == 0:
        return np.empty(0, np.int32)
    ranks = dense_ranks(tokens)
    width = _sorted_width(ranks)
    if width * n > _MAX_SORTED_BYTES:
        raise CacheError(
            f"{n} tokens are too many for one segment: use segments of at most {_MAX_SORTED_BYTES // width}"
        )
    text = _reversed_bytes(ranks, width)
    del ranks
    order = own_tokens(width * n)
    with one_openmp_thread():
        if _divsufsort(text.ctypes.data, order.ctypes.data, len(text)) != 0:
            raise MemoryError(f"no memory to sort {n} tokens")
    del text
    _keep_whole_tokens(order, width, n)
    if width == 1:
        return order
    kept = own_tokens(n)  # the rest goes back to the system
    kept[:] = order[:n]
    return kept


def _sorted_width(ranks: npt.NDArray[np.unsignedinteger]) -> int:
    """Bytes that a rank needs in the sort."""
    return 3 if ranks.itemsize == 4 and int(ranks.max()) < 1 << 24 else ranks.itemsize


def _reversed_bytes(ranks: npt.NDArray[np.unsignedinteger], width: int) -> Bytes:
    """The ranks from the last to the first, each from its highest byte of ``width`` to its lowest."""
    n = len(ranks)
    text = np.empty(width * n, np.uint8)
    rows = text.reshape(n, width)
    for start in range(0, n, _BLOCK):
        block = ranks[start : start + _BLOCK]
        columns = block.astype(f"<u{block.itemsize}", copy=False).view(np.uint8).reshape(len(block), -1)
        rows[n - start - len(block) : n - start] = columns[::-1, width - 1 :: -1] if width > 1 else columns[::-1, :1]
    return text


def _keep_whole_tokens(order: Tokens, width: int, n: int) -> None:
    """Turn byte offsets into the reversed text into positions of the text, in place, at the front of ``order``.

    Offsets inside a token are dropped: they were sorted only because the library knows no wider symbols.
    """
    kept = 0
    for start in range(0, len(order), _BLOCK):
        block = order[start : start + _BLOCK]
        whole = block if width == 1 else block[block % width == 0] // width
        order[kept : kept + len(whole)] = n - whole
        kept += len(whole)
    assert kept == n


def build_fence(text: Bytes, order: Tokens, width: int) -> npt.NDArray[np.uint64]:
    """uint64[ceil(n / FENCE_STEP)] of a packed text and its order, see ``Segment``. O(n / FENCE_STEP)."""
    ends = GUARD_BYTES + width * order[::FENCE_STEP].astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(text, 8)
    return np.ascontiguousarray(windows[ends - 8]).view("<u8")[:, 0]


def build_segment(tokens: Tokens, *, start: int | None, segment_id: str, order: Tokens | None = None) -> Segment:
    """Sort ``tokens``, int32[n] of whole sequences, into a segment in memory, its arrays read-only.

    ``order`` : as ``build_order`` gives it, where somebody has sorted them already.
    """
    assert len(tokens) > 0 and tokens[-1] == SEPARATOR
    width = width_for(int(tokens.max()))
    order = build_order(tokens) if order is None else order
    text = pack(tokens, width)
    fence = build_fence(text, order, width)
    for array in (text, order, fence):
        array.flags.writeable = False
    return Segment(text, order, fence, width, start, segment_id)
