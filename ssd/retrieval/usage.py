"""Which stored text was of use: what a later output said again could be drafted from it.

That is looked for when text leaves: some windows of it, told by a hash of their tokens, are looked up in all outputs
that are stored still and in the text that was kept before. A window that a later output said marks the block of text
where it stood first. Prompts mark nothing: their senders choose them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.jit.addresses import Int64s, TokenIds, kernel
from ssd.retrieval.ring import blocks_of
from ssd.retrieval.segment import SEPARATOR, Segment, Tokens, concatenate

Flags = npt.NDArray[np.bool_]

WINDOW_TOKENS: Final = 8
"""So many tokens in a row are hardly ever a coincidence."""

BLOCK_TOKENS: Final = 64
"""Of a mark."""

_SAMPLED: Final = 1 << 62  # one window of 4 is looked up: an output of 20 tokens is hardly ever missed
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_LEAVING: Final = np.uint64(pow(int(_FACTOR), WINDOW_TOKENS, 1 << 64))
_SHIFT: Final = np.uint64(29)
_FOREVER: Final = 1 << 62
_EVERYWHERE: Final = np.array([[_FOREVER, 0, _FOREVER]])


class Outputs:
    """Where outputs stand in the ring, oldest first: 24 bytes each. One writer."""

    def __init__(self) -> None:
        self._places = array("q")
        self._first = 0

    def add(self, begin: int, start: int, stop: int) -> None:
        """One has positions [start, stop); its prompt and it were stored from ``begin`` on. O(1)."""
        self._places.extend((begin, start, stop))

    def forget_before(self, position: int) -> None:
        """Those that end before are of no interest. O(1) amortised."""
        while self._first < len(self._places) and self._places[self._first + 2] <= position:
            self._first += 3
        if 2 * self._first > len(self._places):
            del self._places[: self._first]
            self._first = 0

    def places(self) -> Int64s:
        """int64[n, 3], a copy: begin, start and stop of each. O(n)."""
        return np.array(self._places[self._first :], np.int64).reshape(-1, 3)


class Leaving(NamedTuple):
    """``left`` : segments that are searched no more, oldest first. What of them was of use, the others say.

    ``kept`` : segments of what was of use before. ``newer`` : the other ones, all behind ``left``. ``tail`` : int32[n],
    what is in no segment, at positions from ``tail_start`` on. ``outputs`` : as ``Outputs.places`` gives them.
    """

    left: tuple[Segment, ...]
    kept: tuple[Segment, ...]
    newer: tuple[Segment, ...]
    tail_start: int
    tail: Tokens
    outputs: Int64s


class Windows(NamedTuple):
    """Those of a text that are looked up, n of them.

    ``ends`` : int64[n], where the last token of each stands. ``keys`` : int64[n], what each one is.
    """

    ends: Int64s
    keys: Int64s


def windows(tokens: TokenIds, start: int = 0) -> Windows:
    """About one in 4 of the windows of ``tokens``, int32[n] from position ``start`` on; none with a separator. O(n)."""
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
            rolling -= _LEAVING * np.uint64(tokens[end - WINDOW_TOKENS])
        elif run < WINDOW_TOKENS:
            continue
        key = (rolling ^ (rolling >> _SHIFT)) * _FACTOR
        if key < np.uint64(_SAMPLED):
            ends[found], keys[found] = end, np.int64(key)
            found += 1
    return found


@kernel
def _mark(ends: Int64s, keys: Int64s, outputs: Int64s, wanted: Int64s, places: Int64s, flags: Flags) -> None:
    """Flag those of ``wanted``, sorted, that are among ``keys`` within an output which begins behind its place.

    ``ends`` : in order; ``keys`` : of the windows that end there. ``places`` : where each of ``wanted`` stands first.
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


def used_texts(due: Leaving) -> list[tuple[Segment, Tokens]]:
    """Of each of ``due.left`` that has any, its text that was of use. O(all that is stored), a block at a time.

    Raises SegmentCorrupt where a text that has left is not what its checksum says.
    """
    if not len(due.outputs):
        return []
    found = [windows(concatenate((segment,)), segment.start or 0) for segment in due.left]
    wanted, first = np.unique(np.concatenate([each.keys for each in found]), return_index=True)
    places = np.concatenate([each.ends for each in found])[first]
    del found
    said, is_known = np.zeros(len(wanted), np.bool_), np.zeros(len(wanted), np.bool_)
    newer = chain.from_iterable(map(_windows_of, (*due.left, *due.newer)))
    for ends, keys in chain(newer, [windows(due.tail, due.tail_start)]):
        _mark(ends, keys, _within(due.outputs, ends), wanted, places, said)
    for ends, keys in chain.from_iterable(map(_windows_of, due.kept)):
        _mark(ends, keys, _EVERYWHERE, wanted, places, is_known)
    used = np.unique(places[said & ~is_known] // BLOCK_TOKENS)
    texts: list[tuple[Segment, Tokens]] = []
    for segment in due.left:
        start, stop = segment.start or 0, segment.stop or 0
        flags = np.isin(np.arange(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)), used)
        if flags.any() and len(text := used_text(concatenate((segment,)), start, flags)):
            texts.append((segment, text))
    return texts


def _within(outputs: Int64s, ends: Int64s) -> Int64s:
    """Of ``outputs`` those that end behind the first of ``ends``. O(log n)."""
    return outputs[np.searchsorted(outputs[:, 2], ends[0], side="right") :] if len(ends) else outputs[:0]


def _windows_of(segment: Segment) -> Iterator[Windows]:
    """The segment's windows at their positions, some at a time: nobody else waits for the interpreter for long."""
    position, before = segment.start or 0, np.empty(0, np.int32)
    for block in blocks_of(segment):
        text = np.concatenate([before, block])
        yield windows(text, position - len(before))
        position += len(block)
        before = text[1 - WINDOW_TOKENS :]


def used_text(tokens: TokenIds, start: int, used: Flags) -> TokenIds:
    """What of a segment is worth keeping: marked blocks with one block before and after, cut where sequences end.

    ``tokens`` : int32[n], whole sequences, each closed by a separator, stored at position ``start``. ``used`` : of its
    blocks. Returns text of the same kind, every run of it a sequence of its own; it may be empty. O(n).
    """
    kept = used.copy()
    kept[1:] |= used[:-1]
    kept[:-1] |= used[1:]
    blocks = (start + np.arange(len(tokens))) // BLOCK_TOKENS - start // BLOCK_TOKENS
    text = np.where(kept[blocks], tokens, np.int32(SEPARATOR))
    before = np.concatenate([[SEPARATOR], text[:-1]])
    kept_text: TokenIds = text[(text != SEPARATOR) | (before != SEPARATOR)]
    return kept_text


def warm_up_usage() -> None:
    """Compile what looks for text that was of use."""
    none = windows(np.zeros(0, np.int32))
    _mark(*none, _EVERYWHERE, none.keys, none.ends, np.zeros(0, np.bool_))
