"""Sort the positions of a segment by the text before them, to build its suffix array."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pydivsufsort

from ssd.errors import CacheError
from ssd.retrieval.segment import (
    GUARD_BYTES,
    SEPARATOR,
    SPARSE_INDEX_STEP,
    Segment,
    Tokens,
    allocate_tokens,
    pack,
    width_for,
)

_Setter = Callable[[int], None]
_Getter = Callable[[], int]


def _find_runtimes() -> list[tuple[_Getter, _Setter]]:
    """Find the OpenMP runtimes that libdivsufsort may use: its own copy, or the one that torch has loaded."""
    libraries = [ctypes.CDLL(None)]
    libraries += [ctypes.CDLL(str(path)) for path in Path(pydivsufsort.__file__).parent.glob("libdivsufsort.so*")]
    found = [library for library in libraries if hasattr(library, "omp_set_num_threads")]
    return [(library.omp_get_max_threads, library.omp_set_num_threads) for library in found]


_RUNTIMES = _find_runtimes()


@contextmanager
def one_openmp_thread() -> Iterator[None]:
    """Limit OpenMP to the calling thread within this context manager; OpenMP in other threads is not affected.

    With a second pool of OpenMP threads in the process, libgomp stops spinning at barriers, because it counts more
    threads than processors. On two cores, a forward pass of the bundled model over five positions took 12 ms instead of
    6 ms after the first sort.
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

_TABLE_SLACK = 1 << 20  # with a table this much longer than the text, ranking is still cheaper than sorting
_MAX_SORTED_BYTES = (1 << 31) - 1
MAX_SEGMENT_TOKENS = _MAX_SORTED_BYTES // 4
"""The maximum number of tokens in a segment: the sorting library sorts less than 2 GiB, at up to 4 bytes per token."""
_BLOCK = 1 << 18  # entries between two points at which other threads can get the GIL


def _find_sorter() -> Callable[[int, int, int], int]:
    """Return the C function ``divsufsort`` of pydivsufsort's library: (text, suffix array, n) -> 0 on success."""
    for path in Path(pydivsufsort.__file__).parent.glob("libdivsufsort.so*"):
        function = ctypes.CDLL(str(path)).divsufsort
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
        function.restype = ctypes.c_int32
        return function
    raise ImportError(
        "pydivsufsort is installed without its file libdivsufsort.so: install the wheel of pydivsufsort again"
    )


_divsufsort = _find_sorter()


def dense_ranks(tokens: Tokens) -> npt.NDArray[np.unsignedinteger]:
    """Replace every token id (>= -1) by its rank among the distinct ids, in the narrowest integer type that fits.

    O(n + largest id), or O(n log n) if the largest id far exceeds n.
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


def build_suffix_array(tokens: Tokens) -> Tokens:
    """Return the suffix array of the reversed text: the positions 1..n ordered by the text before them, read backwards.

    ``SEPARATOR`` is an ordinary symbol, the smallest one; a text that ends sorts before its continuations. The sorter
    is libdivsufsort (Y. Mori), the copy in pydivsufsort, called directly: O(n log n), about 0.12 s for 10**6 tokens of
    32k distinct ids. It sorts bytes, so time and memory grow with the bytes per token: one byte for at most 256
    distinct ids, two bytes for at most 65,536, else three or four. With at most 65,536 distinct ids, the peak is 12
    bytes per token, in addition to the input and its copy as ranks. The sort runs without the GIL on one thread, and
    the code after it lets other threads run every few hundred microseconds.

    Raises CacheError if the text is too long for the library, and MemoryError if the memory does not suffice.
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
    order = allocate_tokens(width * n)
    with one_openmp_thread():
        if _divsufsort(text.ctypes.data, order.ctypes.data, len(text)) != 0:
            raise MemoryError(f"there is not enough memory to sort {n} tokens")
    del text
    _drop_partial_tokens(order, width, n)
    if width == 1:
        return order
    result = allocate_tokens(n)  # frees the rest of ``order``
    result[:] = order[:n]
    return result


def _sorted_width(ranks: npt.NDArray[np.unsignedinteger]) -> int:
    return 3 if ranks.itemsize == 4 and int(ranks.max()) < 1 << 24 else ranks.itemsize


def _reversed_bytes(ranks: npt.NDArray[np.unsignedinteger], width: int) -> Bytes:
    """Return the token ranks in reverse order, each as ``width`` bytes from the highest to the lowest."""
    n = len(ranks)
    text = np.empty(width * n, np.uint8)
    rows = text.reshape(n, width)
    for start in range(0, n, _BLOCK):
        block = ranks[start : start + _BLOCK]
        columns = block.astype(f"<u{block.itemsize}", copy=False).view(np.uint8).reshape(len(block), -1)
        rows[n - start - len(block) : n - start] = columns[::-1, width - 1 :: -1] if width > 1 else columns[::-1, :1]
    return text


def _drop_partial_tokens(order: Tokens, width: int, n: int) -> None:
    """Convert ``order``, in place, from the suffix array of the packed bytes to the suffix array of the ``n`` tokens.

    The library has sorted bytes, so ``order`` also contains positions between the bytes of one token. They are dropped.
    The ``n`` token positions are written to the beginning of ``order``.
    """
    count = 0
    for start in range(0, len(order), _BLOCK):
        block = order[start : start + _BLOCK]
        whole = block if width == 1 else block[block % width == 0] // width
        order[count : count + len(whole)] = n - whole
        count += len(whole)
    assert count == n


def build_sparse_index(text: Bytes, order: Tokens, width: int) -> npt.NDArray[np.uint64]:
    """Return a segment's sparse index: the eight bytes of text before every SPARSE_INDEX_STEP-th suffix-array position.

    Searches begin in it, because it is small and contiguous. See ``Segment.sparse_index``.
    """
    ends = GUARD_BYTES + width * order[::SPARSE_INDEX_STEP].astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(text, 8)
    return np.ascontiguousarray(windows[ends - 8]).view("<u8")[:, 0]


def build_segment(tokens: Tokens, *, start: int | None, segment_id: str, order: Tokens | None = None) -> Segment:
    """Sort whole sequences into a segment in memory, with read-only arrays.

    ``order`` is the result of ``build_suffix_array`` if that was called already.
    """
    assert len(tokens) > 0 and tokens[-1] == SEPARATOR
    width = width_for(int(tokens.max()))
    order = build_suffix_array(tokens) if order is None else order
    text = pack(tokens, width)
    sparse_index = build_sparse_index(text, order, width)
    for array in (text, order, sparse_index):
        array.flags.writeable = False
    return Segment(text, order, sparse_index, width, start, segment_id)
