"""Detect stored text that a later output repeated ("reused" text), so that it is retained instead of evicted.

Reuse is detected when segments are evicted. About a quarter of the windows of evicted text, identified by hashes of
their tokens, are looked up in all stored outputs and in the retained text. If a window occurs in a later output, the
block of text in which it occurred first is retained. Windows in prompts do not count, because clients choose prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.jit.addresses import Int64s, TokenIds, kernel
from ssd.retrieval.ring import iter_blocks
from ssd.retrieval.segment import SEPARATOR, Segment, Tokens, concatenate

Flags = npt.NDArray[np.bool_]

WINDOW_TOKENS: Final = 8
"""The number of consecutive tokens that a later output must repeat so that stored text counts as reused."""

BLOCK_TOKENS: Final = 64
"""The number of tokens per block of stored text; text that outputs repeated is retained in whole blocks."""

_SAMPLED: Final = 1 << 62  # one window in 4 is looked up, so that an output of 20 tokens is hardly ever missed
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_OLDEST_FACTOR: Final = np.uint64(pow(int(_FACTOR), WINDOW_TOKENS, 1 << 64))
_SHIFT: Final = np.uint64(29)
_FOREVER: Final = 1 << 62
_EVERYWHERE: Final = np.array([[_FOREVER, 0, _FOREVER]])


class OutputSpans:
    """The ring-buffer positions of outputs (as opposed to prompts), oldest first. Only one thread may write."""

    def __init__(self) -> None:
        self._spans = array("q")
        self._first = 0

    def add(self, begin: int, start: int, stop: int) -> None:
        """Add an output at ring-buffer positions [start, stop), whose prompt was stored from position ``begin`` on."""
        self._spans.extend((begin, start, stop))

    def forget_before(self, position: int) -> None:
        """Remove outputs that end before ring-buffer position ``position``."""
        while self._first < len(self._spans) and self._spans[self._first + 2] <= position:
            self._first += 3
        if 2 * self._first > len(self._spans):
            del self._spans[: self._first]
            self._first = 0

    def spans(self) -> Int64s:
        """Return for each output where its prompt begins, where the output begins, and where it ends: int64[n, 3]."""
        return np.array(self._spans[self._first :], np.int64).reshape(-1, 3)


class EvictionPass(NamedTuple):
    """The input of `reused_texts`: the evicted segments, and the newer text in which their reused parts are looked for.

    Attributes:
        evicted: Segments that are not searched any more, oldest first.
        retained: Segments of text that was retained earlier; their text is not retained again.
        newer: The ring segments that are newer than ``evicted``.
        memtable: int32[n], the text at position ``memtable_start`` of the ring buffer, which is in no segment yet.
        outputs: The result of ``OutputSpans.spans``.
    """

    evicted: tuple[Segment, ...]
    retained: tuple[Segment, ...]
    newer: tuple[Segment, ...]
    memtable_start: int
    memtable: Tokens
    outputs: Int64s


class Windows(NamedTuple):
    """The sampled windows (runs of WINDOW_TOKENS tokens) of a text.

    Attributes:
        ends: The position of the last token of each window, int64[n].
        keys: The hash of each window, int64[n].
    """

    ends: Int64s
    keys: Int64s


def windows(tokens: TokenIds, start: int = 0) -> Windows:
    """Sample about a quarter of a text's windows (runs of WINDOW_TOKENS tokens); return their positions and hashes.

    No window contains a separator. ``start`` is the position of the first token.
    """
    room = max(0, len(tokens) - WINDOW_TOKENS + 1)
    ends, keys = np.empty(room, np.int64), np.empty(room, np.int64)
    count = _find(tokens, ends, keys)
    return Windows(ends[:count] + start, keys[:count])


@kernel
def _find(tokens: TokenIds, ends: Int64s, keys: Int64s) -> int:
    found, run, rolling = 0, 0, np.uint64(0)
    for end in range(len(tokens)):
        if tokens[end] < 0:
            run, rolling = 0, np.uint64(0)
            continue
        run += 1
        rolling = rolling * _FACTOR + np.uint64(tokens[end])
        if run > WINDOW_TOKENS:
            rolling -= _OLDEST_FACTOR * np.uint64(tokens[end - WINDOW_TOKENS])
        elif run < WINDOW_TOKENS:
            continue
        key = (rolling ^ (rolling >> _SHIFT)) * _FACTOR
        if key < np.uint64(_SAMPLED):
            ends[found], keys[found] = end, np.int64(key)
            found += 1
    return found


@kernel
def _mark(ends: Int64s, keys: Int64s, outputs: Int64s, wanted: Int64s, places: Int64s, flags: Flags) -> None:
    """Mark the evicted windows (runs of WINDOW_TOKENS tokens) that an output in newer text repeats.

    ``flags[i]`` is set if an output contains a window with the hash ``wanted[i]``, and the prompt of this output begins
    after ``places[i]``. ``wanted`` are the sorted hashes of the evicted windows, and ``places`` the positions at which
    they first occur. ``ends`` and ``keys`` are the positions and hashes of the newer windows.
    """
    output = 0
    for i in range(len(keys)):
        while output < len(outputs) and outputs[output, 2] <= ends[i]:
            output += 1
        if output == len(outputs):
            return
        if ends[i] < outputs[output, 1]:
            continue
        at = np.searchsorted(wanted, keys[i])
        if at < len(wanted) and wanted[at] == keys[i] and places[at] < outputs[output, 0]:
            flags[at] = True


def reused_texts(due: EvictionPass) -> list[tuple[Segment, Tokens]]:
    """Return, for each evicted segment, the text that later outputs repeated, if any. O(all stored text).

    The text is read a block at a time. Raises SegmentCorrupt if the text of an evicted segment does not match its
    checksum.
    """
    if not len(due.outputs):
        return []
    found = [windows(concatenate((segment,)), segment.start or 0) for segment in due.evicted]
    wanted, first = np.unique(np.concatenate([each.keys for each in found]), return_index=True)
    places = np.concatenate([each.ends for each in found])[first]
    del found
    is_reused, is_known = np.zeros(len(wanted), np.bool_), np.zeros(len(wanted), np.bool_)
    newer = chain.from_iterable(map(_iter_windows, (*due.evicted, *due.newer)))
    for ends, keys in chain(newer, [windows(due.memtable, due.memtable_start)]):
        _mark(ends, keys, _spans_after(due.outputs, ends), wanted, places, is_reused)
    for ends, keys in chain.from_iterable(map(_iter_windows, due.retained)):
        _mark(ends, keys, _EVERYWHERE, wanted, places, is_known)
    used = np.unique(places[is_reused & ~is_known] // BLOCK_TOKENS)
    texts: list[tuple[Segment, Tokens]] = []
    for segment in due.evicted:
        start, stop = segment.start or 0, segment.stop or 0
        flags = np.isin(np.arange(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)), used)
        if flags.any() and len(text := reused_text(concatenate((segment,)), start, flags)):
            texts.append((segment, text))
    return texts


def _spans_after(outputs: Int64s, ends: Int64s) -> Int64s:
    return outputs[np.searchsorted(outputs[:, 2], ends[0], side="right") :] if len(ends) else outputs[:0]


def _iter_windows(segment: Segment) -> Iterator[Windows]:
    """Yield the sampled windows of a segment's text a block at a time, so that other threads get the GIL in between."""
    position, before = segment.start or 0, np.empty(0, np.int32)
    for block in iter_blocks(segment):
        text = np.concatenate([before, block])
        yield windows(text, position - len(before))
        position += len(block)
        before = text[1 - WINDOW_TOKENS :]


def reused_text(tokens: TokenIds, start: int, used: Flags) -> TokenIds:
    """Return the reused text of a segment: the blocks marked in ``used``, each with its two neighbouring blocks.

    ``tokens`` are whole sequences, each ending with a separator; ``start`` is the first token's ring-buffer position.
    Each run of consecutive blocks becomes a sequence of its own. The result may be empty.
    """
    hot = used.copy()
    hot[1:] |= used[:-1]
    hot[:-1] |= used[1:]
    blocks = (start + np.arange(len(tokens))) // BLOCK_TOKENS - start // BLOCK_TOKENS
    text = np.where(hot[blocks], tokens, np.int32(SEPARATOR))
    before = np.concatenate([[SEPARATOR], text[:-1]])
    compact: TokenIds = text[(text != SEPARATOR) | (before != SEPARATOR)]
    return compact


def compile_reuse_kernels() -> None:
    none = windows(np.zeros(0, np.int32))
    _mark(*none, _EVERYWHERE, none.keys, none.ends, np.zeros(0, np.bool_))
