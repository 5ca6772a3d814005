"""Marks of a log as a former version wrote them, or anybody: each makes a cursor that works."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ssd.replication.entry import Entry
from ssd.replication.offsets import ReplicaOffset, sequence_id_of
from ssd.replication.redis_stream import id_key
from ssd.retrieval.cache_state import Checkpoint

ONE, TWO, THREE = b"one.....", b"two.....", b"three..."


def stream(num_entries: int, first: int = 0) -> dict[bytes, bytes]:
    """Stream ids and the sequence ids behind them, oldest first."""
    return {b"%d-%d" % (7 + n // 3, n % 3): b"sequence%08d" % n for n in range(first, first + num_entries)}


def after_restart(cursor: ReplicaOffset, replica_id: bytes = TWO, position: int = 0) -> ReplicaOffset:
    """The cursor of the next life, as a manifest brings it."""
    return ReplicaOffset(replica_id, Checkpoint(json.loads(json.dumps(cursor.to_json())), position))


def found(cursor: ReplicaOffset, log: dict[bytes, bytes]) -> int:
    """How many entries of ``log`` the cursor knows."""
    known = cursor.locate(next(iter(log), None), log.get)
    return sum(known is not None and id_key(entry_id) <= id_key(known) for entry_id in log)


def by(replica_id: bytes, position: int) -> Entry:
    return Entry(replica_id, sequence_id_of(replica_id, position), np.array([1], np.int32))


def test_a_mark_of_a_former_version_is_read() -> None:
    mark = {"replica": "00" * 8, "lives": [], "waypoints": [[9, "9-0", "09" * 16], [4, "4-0", "04" * 16]]}
    cursor = ReplicaOffset(ONE, Checkpoint(mark, 5))
    log = {b"9-0": b"\x09" * 16}
    assert cursor.locate(b"1-0", log.get) == b"9-0"


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40) | st.just("00" * 8)
json_values = (
    scalars | st.lists(scalars | st.lists(scalars, max_size=4), max_size=4) | st.dictionaries(st.text(), scalars)
)


ALMOST = {"replica": "00" * 8, "lives": [], "waypoints": []}


@example({**ALMOST, "replica": "00"}, 5)
@example({**ALMOST, "lives": [["00" * 8, float("inf")]]}, 5)
@example({**ALMOST, "waypoints": [[1, "1_0-1", "00" * 16]]}, 5)  # a number to Python, not to Redis
@example({**ALMOST, "waypoints": [[1, "18446744073709551616-1", "00" * 16]]}, 5)
@given(
    st.fixed_dictionaries({}, optional={"replica": json_values, "lives": json_values, "waypoints": json_values}),
    st.integers(0, 1 << 70),
)
def test_whatever_a_manifest_holds_makes_a_cursor_that_works(mark: dict[str, object], position: int) -> None:
    cursor = ReplicaOffset(ONE, Checkpoint(mark, position))
    assert found(cursor, stream(5)) == 0 and cursor.last_read is None
    for entry_id, sequence_id in stream(3).items():
        cursor.advance(entry_id, sequence_id)
    assert cursor.is_stored(by(ONE, 7)) and not cursor.is_stored(by(THREE, 1 << 60))
    assert found(after_restart(cursor), stream(5)) == 3
