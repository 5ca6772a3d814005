"""Which stored text was of use: what a later output said again could be drafted from it.

Some windows of stored text are remembered by a hash of their tokens; which ones is a matter of the hash alone, so a
window that comes again is known again, wherever it lies. One that comes in an output marks the block of text where it
stood first. Prompts mark nothing: their senders choose them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, TokenIds, inlined, kernel
from ssd.retrieval.ring import power_of_two_at_least
from ssd.retrieval.segment import SEPARATOR, Segment

Flags = npt.NDArray[np.bool_]

WINDOW_TOKENS: Final = 8
"""So many tokens in a row are hardly ever a coincidence."""

BLOCK_TOKENS: Final = 64
"""Of a mark."""

_SAMPLED: Final = 1 << 62  # one window of 4 is remembered: an output of 20 tokens is hardly ever missed
_TOKENS_PER_SLOT: Final = 8
_MOST_SLOTS: Final = 1 << 24  # of a capacity beyond 128 M tokens fewer windows are remembered
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_LEAVING: Final = np.uint64(pow(int(_FACTOR), WINDOW_TOKENS, 1 << 64))
_SHIFT: Final = np.uint64(29)
_FREE: Final = 0
_POSITION_BITS: Final = 40
_POSITION: Final = (1 << _POSITION_BITS) - 1
_TAG: Final = ~_POSITION
_FOREVER: Final = 1 << 62


class Windows(NamedTuple):
    """Those of a text that are remembered, n of them.

    ``ends`` : int64[n], where the last token of each stands in the text. ``keys`` : int64[n], what each one is.
    """

    ends: Int64s
    keys: Int64s


NO_WINDOWS: Final = Windows(np.empty(0, np.int64), np.empty(0, np.int64))


class _Table(NamedTuple):
    """What the kernels read and change.

    ``slots`` : int64[n], of a window as many bits as there are beside its slot's number and, in the lowest
    _POSITION_BITS, the position after it; _FREE in a free slot: untouched pages cost no memory.
    ``marks`` : bool, of the block with absolute number b at ``b & (len - 1)``. ``starts``, ``stops`` : int64, positions
    that are stored, in order. ``recent`` : int64[1], what lies before is not marked.
    """

    slots: Int64s
    marks: Flags
    starts: Int64s
    stops: Int64s
    recent: Int64s


def windows(tokens: TokenIds) -> Windows:
    """About one in 4 of the windows of ``tokens``, int32[n]; none that holds a separator. O(n)."""
    room = max(0, len(tokens) - WINDOW_TOKENS + 1)
    ends, keys = np.empty(room, np.int64), np.empty(room, np.int64)
    count = _find(tokens, ends, keys)
    return Windows(ends[:count], keys[:count])


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


@inlined
def _is_stored(table: _Table, position: int) -> bool:
    owner = np.searchsorted(table.starts, position, side="right") - 1
    return bool(owner >= 0 and position < table.stops[owner])


@inlined
def _slot_of(table: _Table, key: int) -> int:
    return int(key & (len(table.slots) - 1))


@inlined
def _tag_of(key: int) -> int:
    return int((key << 1) & _TAG)  # keys have 62 bits


@kernel
def _mark(table: _Table, keys: Int64s) -> None:
    for key in keys:
        held = table.slots[_slot_of(table, key)]
        position = (held & _POSITION) - 1
        if held & _TAG == _tag_of(key) and position >= table.recent[0] and _is_stored(table, position):
            table.marks[(position // BLOCK_TOKENS) & (len(table.marks) - 1)] = True


@kernel
def _add(table: _Table, ends: Int64s, keys: Int64s, start: int, stop: int, is_new: bool) -> None:
    if is_new:  # what these blocks were marked for was other text
        for block in range((start + BLOCK_TOKENS - 1) // BLOCK_TOKENS, stop // BLOCK_TOKENS + 1):
            table.marks[block & (len(table.marks) - 1)] = False
    for i in range(len(keys)):
        slot = _slot_of(table, keys[i])
        if not _is_stored(table, (table.slots[slot] & _POSITION) - 1):
            table.slots[slot] = _tag_of(keys[i]) | (start + ends[i] + 1)


@kernel
def _learn(table: _Table, tokens: TokenIds, start: int, stop: int) -> None:
    room = max(0, len(tokens) - WINDOW_TOKENS + 1)
    ends, keys = np.empty(room, np.int64), np.empty(room, np.int64)
    count = _find(tokens, ends, keys)
    _add(table, ends[:count], keys[:count], start, stop, True)


@kernel
def _forget(table: _Table, keys: Int64s, start: int, stop: int) -> None:
    for key in keys:
        slot = _slot_of(table, key)
        if start < table.slots[slot] & _POSITION <= stop:
            table.slots[slot] = _FREE


class Usage:
    """Windows of what is stored, and which blocks of it were of use. One writer. 1 to 2 bytes a token of capacity.

    A window is remembered where it was stored first, for as long as that is stored; where two share a slot, the older
    one stays. So popular text is kept once.
    """

    def __init__(self, capacity_tokens: int) -> None:
        slots = min(power_of_two_at_least(max(64, capacity_tokens // _TOKENS_PER_SLOT)), _MOST_SLOTS)
        # Positions in use span little more than the capacity, so a circle of twice that knows them apart.
        blocks = power_of_two_at_least(2 * capacity_tokens // BLOCK_TOKENS + 2)
        nothing = np.empty(0, np.int64)
        self._table = _Table(
            np.zeros(slots, np.int64),
            np.zeros(blocks, np.bool_),
            nothing,
            nothing,
            np.zeros(1, np.int64),
        )
        self.set_stored((), 0, 0)
        # Compiled here and not where text is appended.
        none = windows(np.zeros(0, np.int32))
        self.learn(np.zeros(0, np.int32), 0, 0)
        self.add_again(none, 0)
        self.mark(none)
        self.forget(none, 0, 0)

    def set_stored(self, segments: Sequence[Segment], tail_start: int, recent: int) -> None:
        """What counts as stored now: ``segments`` in order of position, and all from ``tail_start`` on.

        ``recent`` : what lies before is not marked.
        """
        bounds = [(segment.start or 0, segment.stop or 0) for segment in segments]
        starts, stops = np.array([*bounds, (tail_start, _FOREVER)], np.int64).T.copy()
        self._table = self._table._replace(starts=starts, stops=stops)
        self._table.recent[0] = recent

    def mark(self, said: Windows) -> None:
        """An output held these windows: mark the blocks where they stand. O(windows)."""
        _mark(self._table, said.keys)

    def learn(self, tokens: TokenIds, start: int, stop: int) -> None:
        """New text, ``tokens`` : int32[n], is stored at positions [start, stop), not marked. O(n), in one kernel."""
        _learn(self._table, tokens, start, stop)

    def add_again(self, found: Windows, start: int) -> None:
        """Older text with these windows is stored at ``start`` now. O(windows)."""
        _add(self._table, found.ends, found.keys, start, start, False)

    def forget(self, found: Windows, start: int, stop: int) -> None:
        """Text with these windows is not stored at positions [start, stop) any more. O(windows)."""
        _forget(self._table, found.keys, start, stop)

    def used(self, start: int, stop: int) -> Flags:
        """Of each block with positions in [start, stop), whether it is marked. A copy. O(blocks)."""
        blocks = np.arange(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS))
        flags: Flags = self._table.marks[blocks & (len(self._table.marks) - 1)]
        return flags


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
