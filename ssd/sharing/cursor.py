"""How far a replica has read a stream, in a form that outlives the process.

A cursor answers one question after a restart: which entries of the log are in the cache already? It is written with
the cache's manifest (``SuffixCache.set_source``), so it never claims what a crash has lost::

    others' entries      up to the newest waypoint that the log still holds    what follows is read
    our own entries      by ring position, for each former life                stored before it ended, or lost and read

A *life* is one opening of a namespace's cache, under a replica id of its own. Its entries name their ring positions, so
those that reached a file are known whenever they were written to the log and in whatever order; the others are text
that was lost with the tail, and come back. A directory that was copied to another machine knows the same lives and
begins another one.

*Waypoints* are entries read, each as stream id and sequence id: the newest, and older ones in growing distances. One
that is found in the log proves that the log is the one that was read up to there. So a Redis that lost its newest
entries, or all, or is another one, is noticed.

What may go wrong, and what it costs (never an output):

* Redis came back without its newest r entries: at most 3r older ones are stored a second time.
* The log holds no waypoint, yet entries older than some: it is another one and is read whole, what we have as well.
* An entry was written twice, its first copy read before the restart and trimmed meanwhile: it is stored twice.
* More than 64 lives began while an entry of ours waited to be read back: it is stored twice.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ssd.retrieval.cache_state import Checkpoint
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.connection import Backoff
from ssd.sharing.entry import Entry
from ssd.sharing.stats import Received
from ssd.sharing.stream import BEGINNING, id_before, is_entry_id, order

MAX_RECENT = 1024
"""Sequence ids that a head names: a writer that was cut off writes an entry twice, a moment after the first copy."""

_MAX_LIVES = 64
_MAX_WAYPOINTS = 64  # one for each doubling of the distance; never reached


class Waypoint(NamedTuple):
    """Entry ``number``, counted over all lives, was read at ``entry_id`` of the stream."""

    number: int
    entry_id: bytes
    sequence_id: bytes


class Life(NamedTuple):
    """Entries of ``replica_id`` from ring positions below ``position`` are in files, or were evicted."""

    replica_id: bytes
    position: int


class Cursor:
    """How far one stream was read, by this life and those before. One owner.

    ``lives`` : the former ones, oldest first. ``waypoints`` : newest first.
    """

    def __init__(self, replica_id: bytes, kept: Checkpoint | None = None) -> None:
        """``replica_id`` : of the life that begins; ``kept`` : what the cache kept of the last one's ``position``.

        One of another make counts as none.
        """
        self.replica_id = replica_id
        self.lives, self.waypoints = _read(kept)
        self._positions = dict(self.lives)
        self._num_passed = 0
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=MAX_RECENT)
        self.is_continued = False
        """Whether the log that ``find`` last looked at goes on just where it was read up to."""

    def join(self, other: Checkpoint) -> None:
        """All that ``other``, the checkpoint of another cache, speaks of is in this cache as well from now on.

        Of the waypoints of both, ``find`` takes the newest that the log holds.
        """
        lives, waypoints = _read(other)
        positions = dict(self.lives)
        theirs = {life.replica_id: max(life.position, positions.pop(life.replica_id, 0)) for life in lives}
        kept = [*(Life(*life) for life in theirs.items()), *(Life(*life) for life in positions.items())]
        self.lives = tuple(kept[-_MAX_LIVES:])
        self._positions = dict(self.lives)
        self.waypoints = _merged(self.waypoints, waypoints)

    def position(self) -> Mapping[str, Any]:
        """The cursor as JSON, for ``SuffixCache.set_source``."""
        return {
            "replica": self.replica_id.hex(),
            "lives": [(life.replica_id.hex(), life.position) for life in self.lives],
            "waypoints": [(w.number, w.entry_id.decode(), w.sequence_id.hex()) for w in self.waypoints],
            "passed": self._num_passed,
        }

    def is_ours(self, entry: Entry) -> bool:
        """Whether this life stored the text of ``entry``, or a former one did and it reached a file."""
        if entry.replica_id == self.replica_id:
            return True
        return position_of(entry.sequence_id) < self._positions.get(entry.replica_id, 0)

    def passed(self, entry_id: bytes, sequence_id: bytes) -> None:
        """The entry was read. O(log of the number of entries read)."""
        self.knows((sequence_id,))
        number = self.waypoints[0].number + 1 if self.waypoints else 1
        # One number in each range of distances 2^k ... 2^(k+1) - 1 is kept; a number once dropped stays so.
        older = [p for p in self.waypoints if not p[0] % (1 << ((number - p[0]).bit_length() - 1))]
        self.waypoints = (Waypoint(number, entry_id, sequence_id), *older[: _MAX_WAYPOINTS - 1])

    def knows(self, sequence_ids: Sequence[bytes]) -> None:
        """The next ``position`` includes these entries, wherever they were read. O(their number)."""
        self._num_passed += 1
        self._recent.extend((self._num_passed, sequence_id) for sequence_id in sequence_ids)

    def recent(self, kept: Checkpoint) -> tuple[bytes, ...]:
        """Sequence ids of the newest entries that ``kept``, a position of this life, includes: MAX_RECENT at most.

        A waypoint tells what was read before it while the log holds it; a log that was emptied may be given a second
        copy of what only these know. Safe from any thread.
        """
        passed = kept.source.get("passed", 0)
        return tuple(sequence_id for number, sequence_id in self._recent.copy() if number <= passed)  # copied at once

    def find(self, oldest_id: bytes | None, sequence_id_at: Callable[[bytes], bytes | None]) -> bytes | None:
        """The id up to which entries of this log were read, None if it is not the log that was read.

        ``oldest_id`` : of the oldest entry at hand, None if there is none; ``sequence_id_at`` : the sequence id of the
        entry with a stream id, None if there is no such entry. Forgets waypoints that are not of this log.
        """
        for index, point in enumerate(self.waypoints):
            is_trimmed = oldest_id is None or order(point.entry_id) < order(oldest_id)  # then all there is came later
            if is_trimmed or sequence_id_at(point.entry_id) == point.sequence_id:
                self.waypoints = self.waypoints[index:]
                self.is_continued = index == 0 and not is_trimmed
                return point.entry_id
        self.waypoints = ()
        self.is_continued = False
        return None


def sequence_id_of(replica_id: bytes, position: int) -> bytes:
    """16 bytes no other entry has: the life's replica id (8 bytes), and the ring position (8 bytes, little-endian)."""
    return replica_id + position.to_bytes(8, "little")


def position_of(sequence_id: bytes) -> int:
    """The ring position in what ``sequence_id_of`` made."""
    return int.from_bytes(sequence_id[8:], "little")


def _merged(*waypoints: tuple[Waypoint, ...]) -> tuple[Waypoint, ...]:
    """Those of two cursors in the log's order, the newest first, and numbered in that order."""
    by_id = {point.entry_id: point for each in waypoints for point in each}
    merged: list[Waypoint] = []
    for point in sorted(by_id.values(), key=lambda point: order(point.entry_id)):
        number = max(point.number, merged[-1].number + 1 if merged else 0)
        merged.append(point._replace(number=number))
    return tuple(merged[: -_MAX_WAYPOINTS - 1 : -1])


def _read(kept: Checkpoint | None) -> tuple[tuple[Life, ...], tuple[Waypoint, ...]]:
    """What a manifest brought, which is whatever somebody wrote there."""
    if kept is None:
        return (), ()
    try:
        lives = tuple(_life(*life) for life in [*kept.source["lives"], (kept.source["replica"], kept.position)])
        waypoints = tuple(_waypoint(*waypoint) for waypoint in kept.source["waypoints"])
    except (KeyError, TypeError, ValueError):
        return (), ()
    if any(newer.number <= older.number for newer, older in pairwise(waypoints)):
        return (), ()
    return lives[-_MAX_LIVES:], waypoints[:_MAX_WAYPOINTS]


def _life(replica_id: object, position: object) -> Life:
    if type(position) is not int or position < 0:
        raise ValueError(position)
    return Life(_bytes(replica_id, 8), position)


def _waypoint(number: object, entry_id: object, sequence_id: object) -> Waypoint:
    if type(number) is not int or type(entry_id) is not str or not is_entry_id(entry_id.encode()):
        raise ValueError(number, entry_id)
    return Waypoint(number, entry_id.encode(), _bytes(sequence_id, 16))


def _bytes(text: object, length: int) -> bytes:
    if type(text) is not str or len(text) != 2 * length:
        raise ValueError(text)
    return bytes.fromhex(text)


PAGE = 64
"""Entries of a page, where none is too large; 1 MB at most."""

_MAX_SEEN = 1 << 16


class Stream:
    """Only the reader's thread changes it.

    ``cursor`` : what of it is in the cache, over restarts. ``last_id`` : what comes after it is to be read, None
    before the place was found where reading begins. ``entries`` : (id, tokens) of what the log holds, oldest first, to
    keep it within its bounds.
    """

    def __init__(self, key: str, cache: SuffixCache, cursor: Cursor) -> None:
        self.key = key
        self.cache = weakref.ref(cache)
        self.cursor = cursor
        self.page = PAGE
        """Entries to ask for at once: 1 after one was too large, as the server makes all of the reply at once."""
        self.is_refused = False
        """Whether the server refused the last command for this stream."""
        self.is_cut = False
        """Whether it did not answer, while others may: a node of a cluster."""
        self.compare_at = 0.0
        self.received = Received()
        self.held_until = 0.0
        """When it may be read, by ``time.monotonic``: somebody else is giving its cache what came before."""
        self.num_gaps = 0
        """How often reading began where it is not known that nothing was missed."""
        self.is_joined = False
        """Whether what may have been missed was taken from elsewhere just before reading begins."""
        self.entries: deque[tuple[bytes, int]] = deque()
        self.num_tokens = 0
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._backoff = Backoff()
        self._rests_until = 0.0
        self.forget()

    def forget(self) -> None:
        """The log is not the one that was read: a place to begin is to be found."""
        self.last_id: bytes | None = None
        self.anchor: bytes | None = None
        """An entry that is in the log as long as it is the one that was read; the newest of them that was fetched."""
        self.search = Search()
        self._known: tuple[int, int] | None = None
        self.entries.clear()
        self.num_tokens = 0

    def begin(self, known_id: bytes | None) -> None:
        """The search has come to its end; entries up to ``known_id`` are in the cache already."""
        self.num_gaps += not (self.cursor.is_continued or self.is_joined)
        self.is_joined = False
        oldest = self.search.oldest
        self.last_id = BEGINNING if oldest is None or self.search.is_whole else id_before(oldest)
        self.anchor = oldest
        self._known = None if known_id is None else order(known_id)

    def is_known(self, entry_id: bytes) -> bool:
        """Whether the cursor is past this entry."""
        return self._known is not None and order(entry_id) <= self._known

    def saw(self, entry_id: bytes, num_tokens: int, *, was_fetched: bool) -> None:
        """Entry ``entry_id`` is in the log and has been read, or was too large to be."""
        self.last_id = entry_id
        if was_fetched or self.anchor is None:
            self.anchor = entry_id
        self.entries.append((entry_id, num_tokens))
        self.num_tokens += num_tokens

    def has_seen(self, sequence_id: bytes) -> bool:
        """Whether an entry with this sequence id was read before, among the last 65,536; from now on it was."""
        if sequence_id in self._seen:
            self._seen.move_to_end(sequence_id)
            return True
        self._seen[sequence_id] = None
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        return False

    def saw_before(self, sequence_ids: Iterable[bytes]) -> None:
        """Entries with these sequence ids are stored, though they were not read here."""
        for sequence_id in sequence_ids:
            self.has_seen(sequence_id)

    def turn_page(self, *, was_cut: bool) -> None:
        """A page was read. ``was_cut`` : an entry of it was too large."""
        self.page = 1 if was_cut else min(2 * self.page, PAGE)

    def refuse(self, *, is_cut: bool) -> None:
        """The server refused a command, or ``is_cut`` : did not answer. The log may be another one afterwards."""
        self.is_refused, self.is_cut = True, is_cut
        if is_cut:
            self.compare_at = 0.0
        self.rest()

    def rest(self) -> None:
        """Leave it alone for a while, so that the others are served."""
        self._rests_until = time.monotonic() + self._backoff.next_delay_s()

    def wake(self) -> None:
        """All is well with it."""
        self.is_refused = False
        self._backoff.reset()

    @property
    def is_resting(self) -> bool:
        """Whether it is to be left alone."""
        return time.monotonic() < max(self._rests_until, self.held_until)


class Search:
    """Where the newest part of a log begins that is within the bounds, from its end backwards.

    ``oldest`` : id of the oldest entry found so far. ``is_whole`` : the log holds no older one.
    """

    def __init__(self) -> None:
        self.oldest: bytes | None = None
        self.is_whole = False
        self.num_entries = 0
        self.num_tokens = 0

    def found(self, entry_id: bytes, num_tokens: int) -> None:
        """The next older entry."""
        self.oldest = entry_id
        self.num_entries += 1
        self.num_tokens += num_tokens
