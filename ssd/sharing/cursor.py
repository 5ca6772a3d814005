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

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from ssd.retrieval.cache_state import Checkpoint
from ssd.sharing.entry import Entry
from ssd.sharing.stream import is_entry_id, order

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

    def position(self) -> Mapping[str, Any]:
        """The cursor as JSON, for ``SuffixCache.set_source``."""
        return {
            "replica": self.replica_id.hex(),
            "lives": [(life.replica_id.hex(), life.position) for life in self.lives],
            "waypoints": [(w.number, w.entry_id.decode(), w.sequence_id.hex()) for w in self.waypoints],
        }

    def is_ours(self, entry: Entry) -> bool:
        """Whether this life stored the text of ``entry``, or a former one did and it reached a file."""
        if entry.replica_id == self.replica_id:
            return True
        return position_of(entry.sequence_id) < self._positions.get(entry.replica_id, 0)

    def passed(self, entry_id: bytes, sequence_id: bytes) -> None:
        """The entry was read. O(log of the number of entries read)."""
        number = self.waypoints[0].number + 1 if self.waypoints else 1
        # One number in each range of distances 2^k ... 2^(k+1) - 1 is kept; a number once dropped stays so.
        older = [p for p in self.waypoints if not p[0] % (1 << ((number - p[0]).bit_length() - 1))]
        self.waypoints = (Waypoint(number, entry_id, sequence_id), *older[: _MAX_WAYPOINTS - 1])

    def find(self, oldest_id: bytes | None, sequence_id_at: Callable[[bytes], bytes | None]) -> bytes | None:
        """The id up to which entries of this log were read, None if it is not the log that was read.

        ``oldest_id`` : of the oldest entry at hand, None if there is none; ``sequence_id_at`` : the sequence id of the
        entry with a stream id, None if there is no such entry. Forgets waypoints that are not of this log.
        """
        for index, point in enumerate(self.waypoints):
            is_trimmed = oldest_id is None or order(point.entry_id) < order(oldest_id)  # then all there is came later
            if is_trimmed or sequence_id_at(point.entry_id) == point.sequence_id:
                self.waypoints = self.waypoints[index:]
                return point.entry_id
        self.waypoints = ()
        return None


def sequence_id_of(replica_id: bytes, position: int) -> bytes:
    """16 bytes no other entry has: the life's replica id (8 bytes), and the ring position (8 bytes, little-endian)."""
    return replica_id + position.to_bytes(8, "little")


def position_of(sequence_id: bytes) -> int:
    """The ring position in what ``sequence_id_of`` made."""
    return int.from_bytes(sequence_id[8:], "little")


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
