"""How far a replica has read a stream, in a form that survives restarts.

After a restart, a `ReplicaOffset` tells which entries of the log are in the cache already. It is written with the
cache's manifest (``NamespaceCache.set_source``), so that it never covers text that a crash has lost::

    entries of others    up to the newest offset that the log still has        later entries are read
    our own entries      by ring position, for each former incarnation         stored before it ended, or lost and read

An *incarnation* is one opening of a namespace's cache, under its own replica id. Its entries have the ring positions of
their text. Entries whose text reached a file are therefore known, whenever and in whatever order they were written to
the log. The text of the others was lost with the memtable and is read back. A copy of a directory on another machine
knows the same former incarnations and starts another one.

The *offset* is the entry read last, by stream id and sequence id. If the log has this entry, it is the log that was
read up to there. So a Redis server that lost its newest entries or all entries, or was replaced, is detected.

Duplicates are possible in these cases; outputs are never affected:

* The log has only older entries than the offset, or none, because Redis was restored without its newest entries or was
  replaced. The log is read completely, and other replicas' entries are stored a second time.
* An entry was written twice, and the first copy was read before the restart and trimmed meanwhile. It is stored twice.
* More than 64 incarnations began before one of our entries was read back. It is stored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ssd.replication.entry import Entry
from ssd.replication.stream import id_key, is_entry_id
from ssd.retrieval.cache_state import Checkpoint

_MAX_INCARNATIONS = 64


class StreamOffset(NamedTuple):
    """The entry of a stream that was read last.

    Attributes:
        number: The number of entries read, counted over all incarnations.
        entry_id: The entry's stream id.
        sequence_id: The entry's sequence id.
    """

    number: int
    entry_id: bytes
    sequence_id: bytes


class Incarnation(NamedTuple):
    """An earlier opening of the cache.

    Attributes:
        replica_id: The replica id of its entries.
        position: Its text before this ring position is in files, or was evicted.
    """

    replica_id: bytes
    position: int


class ReplicaOffset:
    """How far one stream was read, by this incarnation and earlier ones. Has one owner.

    Attributes:
        replica_id: The replica id of this incarnation.
        incarnations: The earlier incarnations, oldest first.
        last_read: The entry that was read last; None before the first.
    """

    def __init__(self, replica_id: bytes, checkpoint: Checkpoint | None = None) -> None:
        """Start an incarnation with ``replica_id``; ``checkpoint`` is the cache's, from the last ``to_json``.

        A checkpoint of another format is ignored.
        """
        self.replica_id = replica_id
        self.incarnations, self.last_read = _parse(checkpoint)
        self._positions = dict(self.incarnations)

    def to_json(self) -> Mapping[str, Any]:
        """Return the offset as JSON, for ``NamespaceCache.set_source``."""
        return {
            "replica": self.replica_id.hex(),
            "lives": [(each.replica_id.hex(), each.position) for each in self.incarnations],
            "waypoints": [(w.number, w.entry_id.decode(), w.sequence_id.hex()) for w in (self.last_read,) if w],
        }

    def is_stored(self, entry: Entry) -> bool:
        """Return whether this incarnation stored the text of ``entry``, or an earlier one did and it reached a file."""
        if entry.replica_id == self.replica_id:
            return True
        return position_of(entry.sequence_id) < self._positions.get(entry.replica_id, 0)

    def advance(self, entry_id: bytes, sequence_id: bytes) -> None:
        """Record that an entry was read."""
        self.last_read = StreamOffset(self.last_read.number + 1 if self.last_read else 1, entry_id, sequence_id)

    def locate(self, oldest_id: bytes | None, sequence_id_at: Callable[[bytes], bytes | None]) -> bytes | None:
        """Return the id up to which entries of this log were read; None if the log is another one or is empty.

        Args:
            oldest_id: The id of the oldest entry; None if there is none.
            sequence_id_at: Returns the sequence id of the entry with a stream id; None if there is no such entry.
        """
        if (last := self.last_read) is None or oldest_id is None:  # everything else is new, whatever its ids
            return None
        is_trimmed = id_key(last.entry_id) < id_key(oldest_id)  # all remaining entries are newer
        return last.entry_id if is_trimmed or sequence_id_at(last.entry_id) == last.sequence_id else None


def sequence_id_of(replica_id: bytes, position: int) -> bytes:
    """Return 16 unique bytes: the incarnation's replica id (8 bytes) and the ring position (8, little-endian)."""
    return replica_id + position.to_bytes(8, "little")


def position_of(sequence_id: bytes) -> int:
    """Return the ring position in a result of ``sequence_id_of``."""
    return int.from_bytes(sequence_id[8:], "little")


def _parse(checkpoint: Checkpoint | None) -> tuple[tuple[Incarnation, ...], StreamOffset | None]:
    """Parse a checkpoint, which may be any JSON. Former versions stored more than one offset."""
    if checkpoint is None:
        return (), None
    try:
        incarnations = tuple(
            _incarnation(*incarnation)
            for incarnation in [*checkpoint.source["lives"], (checkpoint.source["replica"], checkpoint.position)]
        )
        offsets = [_stream_offset(*each) for each in checkpoint.source["waypoints"]]
    except (KeyError, TypeError, ValueError):
        return (), None
    return incarnations[-_MAX_INCARNATIONS:], offsets[0] if offsets else None


def _incarnation(replica_id: object, position: object) -> Incarnation:
    if type(position) is not int or position < 0:
        raise ValueError(position)
    return Incarnation(_bytes(replica_id, 8), position)


def _stream_offset(number: object, entry_id: object, sequence_id: object) -> StreamOffset:
    if type(number) is not int or type(entry_id) is not str or not is_entry_id(entry_id.encode()):
        raise ValueError(number, entry_id)
    return StreamOffset(number, entry_id.encode(), _bytes(sequence_id, 16))


def _bytes(text: object, length: int) -> bytes:
    if type(text) is not str or len(text) != 2 * length:
        raise ValueError(text)
    return bytes.fromhex(text)
