"""How far a replica has read a stream, in a form that outlives the process.

A cursor answers one question after a restart: which entries of the log are in the cache already? It is written with
the cache's manifest (``SuffixCache.set_source``), so it never claims what a crash has lost::

    others' entries      up to the newest waypoint that the log still holds    what follows is read
    our own entries      by ring position, for each former life                stored before it ended, or lost and read

A *life* is one opening of a namespace's cache, under a replica id of its own. Its entries name their ring positions, so
those that reached a file are known whenever they were written to the log and in whatever order; the others are text
that was lost with the tail, and come back. A directory that was copied to another machine knows the same lives and
begins another one.

The *waypoint* is the entry read last, as stream id and sequence id. Found in the log it proves that the log is the one
that was read up to there. So a Redis that lost its newest entries, or all, or is another one, is noticed.

What may go wrong, and what it costs (never an output):

* The log does not hold the waypoint, yet entries older than it or none, as Redis came back without its newest ones or
  is another one: it is read whole, what others wrote of it is stored a second time.
* An entry was written twice, its first copy read before the restart and trimmed meanwhile: it is stored twice.
* More than 64 lives began while an entry of ours waited to be read back: it is stored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ssd.retrieval.cache_state import Checkpoint
from ssd.sharing.entry import Entry
from ssd.sharing.stream import is_entry_id, order

_MAX_LIVES = 64


class Waypoint(NamedTuple):
    """Entry ``number``, counted over all lives, was the last that was read, at ``entry_id`` of the stream."""

    number: int
    entry_id: bytes
    sequence_id: bytes


class Life(NamedTuple):
    """Entries of ``replica_id`` from ring positions below ``position`` are in files, or were evicted."""

    replica_id: bytes
    position: int


class Cursor:
    """How far one stream was read, by this life and those before. One owner.

    ``lives`` : the former ones, oldest first. ``waypoint`` : None before anything was read.
    """

    def __init__(self, replica_id: bytes, kept: Checkpoint | None = None) -> None:
        """``replica_id`` : of the life that begins; ``kept`` : what the cache kept of the last one's ``position``.

        One of another make counts as none.
        """
        self.replica_id = replica_id
        self.lives, self.waypoint = _read(kept)
        self._positions = dict(self.lives)

    def position(self) -> Mapping[str, Any]:
        """The cursor as JSON, for ``SuffixCache.set_source``."""
        return {
            "replica": self.replica_id.hex(),
            "lives": [(life.replica_id.hex(), life.position) for life in self.lives],
            "waypoints": [(w.number, w.entry_id.decode(), w.sequence_id.hex()) for w in (self.waypoint,) if w],
        }

    def is_ours(self, entry: Entry) -> bool:
        """Whether this life stored the text of ``entry``, or a former one did and it reached a file."""
        if entry.replica_id == self.replica_id:
            return True
        return position_of(entry.sequence_id) < self._positions.get(entry.replica_id, 0)

    def passed(self, entry_id: bytes, sequence_id: bytes) -> None:
        """The entry was read."""
        self.waypoint = Waypoint(self.waypoint.number + 1 if self.waypoint else 1, entry_id, sequence_id)

    def find(self, oldest_id: bytes | None, sequence_id_at: Callable[[bytes], bytes | None]) -> bytes | None:
        """The id up to which entries of this log were read, None if it is not the log that was read or is empty.

        ``oldest_id`` : of the oldest entry at hand, None if there is none; ``sequence_id_at`` : the sequence id of the
        entry with a stream id, None if there is no such entry.
        """
        if (last := self.waypoint) is None or oldest_id is None:  # what follows is new, whatever its ids
            return None
        is_trimmed = order(last.entry_id) < order(oldest_id)  # then all there is came later
        return last.entry_id if is_trimmed or sequence_id_at(last.entry_id) == last.sequence_id else None


def sequence_id_of(replica_id: bytes, position: int) -> bytes:
    """16 bytes no other entry has: the life's replica id (8 bytes), and the ring position (8 bytes, little-endian)."""
    return replica_id + position.to_bytes(8, "little")


def position_of(sequence_id: bytes) -> int:
    """The ring position in what ``sequence_id_of`` made."""
    return int.from_bytes(sequence_id[8:], "little")


def _read(kept: Checkpoint | None) -> tuple[tuple[Life, ...], Waypoint | None]:
    """What a manifest brought, which is whatever somebody wrote there; former versions kept more waypoints."""
    if kept is None:
        return (), None
    try:
        lives = tuple(_life(*life) for life in [*kept.source["lives"], (kept.source["replica"], kept.position)])
        waypoints = [_waypoint(*waypoint) for waypoint in kept.source["waypoints"]]
    except (KeyError, TypeError, ValueError):
        return (), None
    return lives[-_MAX_LIVES:], waypoints[0] if waypoints else None


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
