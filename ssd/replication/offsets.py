"""The position up to which a replica has read a replication stream, in a form that survives restarts.

After a restart, a `ReplicaOffset` determines which entries of the stream are in the cache already and need not be
stored again. It is saved with the cache's manifest (``NamespaceCache.set_source``), so that it never covers text that a
crash has lost::

    entries of other replicas    are in the cache up to the offset, unless the stream was emptied or replaced
    entries of this replica      are in the cache if their ring position was in a file when their incarnation ended

An *incarnation* is one opening of a namespace's cache, under its own replica id. Its entries contain the ring-buffer
positions of their text, so it does not matter when and in which order they were written to the stream. Text of this
replica that had not reached a file was lost with the memtable and is read back. A copy of a cache directory on another
machine begins an incarnation of its own.

The *offset* identifies the last entry that was read, by stream id and sequence id. If the stream is empty, or begins
before the offset but does not have this entry, the Redis server was replaced or has lost entries.

Duplicates are possible in these cases; outputs are never affected:

* The stream has only entries older than the offset, or none, because Redis was restored without its newest entries or
  was replaced. The stream is read completely, and entries of other replicas are stored a second time.
* An entry was written twice, and the first copy was read before the restart and trimmed since. It is stored twice.
* More than 64 incarnations began before an entry of this replica was read back. The entry is stored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ssd.replication.entry import Entry
from ssd.replication.redis_stream import id_key, is_entry_id
from ssd.retrieval.cache_state import Checkpoint

_MAX_INCARNATIONS = 64


class StreamOffset(NamedTuple):
    """The position up to which a replica has read a replication stream, given by the last entry that it read."""

    number: int  # the number of entries read, counted over all incarnations
    entry_id: bytes
    sequence_id: bytes


class Incarnation(NamedTuple):
    """One earlier opening of a namespace's cache by this replica. Each opening has a replica id of its own."""

    replica_id: bytes
    position: int  # its text before this ring position is in files, or was evicted


class ReplicaOffset:
    """The position up to which a replica has read a replication stream, stored with the cache to survive restarts.

    It determines which entries of the stream are already in the cache. Not thread-safe.
    """

    def __init__(self, replica_id: bytes, checkpoint: Checkpoint | None = None) -> None:
        """Restore the position from the ``checkpoint`` that was stored with the cache, under a new ``replica_id``.

        A checkpoint in another format than that of `to_json` is ignored.
        """
        self.replica_id = replica_id
        self.incarnations, self.last_read = _parse(checkpoint)
        self._positions = dict(self.incarnations)

    def to_json(self) -> Mapping[str, Any]:
        return {
            "replica": self.replica_id.hex(),
            "lives": [(each.replica_id.hex(), each.position) for each in self.incarnations],
            "waypoints": [(w.number, w.entry_id.decode(), w.sequence_id.hex()) for w in (self.last_read,) if w],
        }

    def is_stored(self, entry: Entry) -> bool:
        """Return whether this replica wrote the stream entry itself and still has the entry's text after restarts."""
        if entry.replica_id == self.replica_id:
            return True
        return position_of(entry.sequence_id) < self._positions.get(entry.replica_id, 0)

    def advance(self, entry_id: bytes, sequence_id: bytes) -> None:
        self.last_read = StreamOffset(self.last_read.number + 1 if self.last_read else 1, entry_id, sequence_id)

    def locate(self, oldest_id: bytes | None, sequence_id_at: Callable[[bytes], bytes | None]) -> bytes | None:
        """Return the Redis stream id of the last entry that was read; None if the stream was emptied or replaced since.

        Other replicas' entries up to this id are in the cache. ``oldest_id`` is the id of the stream's oldest entry,
        None if the stream is empty. ``sequence_id_at`` returns the sequence id of the entry with a given stream id,
        None if there is no such entry.
        """
        if (last := self.last_read) is None or oldest_id is None:  # everything else is new, whatever its ids
            return None
        is_trimmed = id_key(last.entry_id) < id_key(oldest_id)  # all remaining entries are newer
        return last.entry_id if is_trimmed or sequence_id_at(last.entry_id) == last.sequence_id else None


def sequence_id_of(replica_id: bytes, position: int) -> bytes:
    """Return the unique 16-byte id of a replication entry: the writer's replica id and a ring-buffer position."""
    return replica_id + position.to_bytes(8, "little")


def position_of(sequence_id: bytes) -> int:
    return int.from_bytes(sequence_id[8:], "little")


def _parse(checkpoint: Checkpoint | None) -> tuple[tuple[Incarnation, ...], StreamOffset | None]:
    """Parse a stored position of a replication stream; return an empty position if the JSON has another format."""
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
