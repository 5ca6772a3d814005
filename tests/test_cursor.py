"""What a cursor knows of a log, against a plain record of what was read."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ssd.replication.entry import Entry
from ssd.replication.offsets import ReplicaOffset, position_of, sequence_id_of
from ssd.replication.redis_stream import id_key
from ssd.retrieval.cache_state import Checkpoint

ONE, TWO, THREE = b"one.....", b"two.....", b"three..."


def stream(num_entries: int, first: int = 0) -> dict[bytes, bytes]:
    """Stream ids and the sequence ids behind them, oldest first."""
    return {b"%d-%d" % (7 + n // 3, n % 3): b"sequence%08d" % n for n in range(first, first + num_entries)}


def after_restart(cursor: ReplicaOffset, replica_id: bytes = TWO, position: int = 0) -> ReplicaOffset:
    """The cursor of the next life, as a manifest brings it."""
    return ReplicaOffset(replica_id, Checkpoint(json.loads(json.dumps(cursor.to_json())), position))


def that_read(log: dict[bytes, bytes]) -> ReplicaOffset:
    """A cursor after all of ``log``."""
    cursor = ReplicaOffset(ONE)
    for entry_id, sequence_id in log.items():
        cursor.advance(entry_id, sequence_id)
    return cursor


def found(cursor: ReplicaOffset, log: dict[bytes, bytes]) -> int:
    """How many entries of ``log`` the cursor knows."""
    known = cursor.locate(next(iter(log), None), log.get)
    return sum(known is not None and id_key(entry_id) <= id_key(known) for entry_id in log)


def by(replica_id: bytes, position: int) -> Entry:
    return Entry(replica_id, sequence_id_of(replica_id, position), np.array([1], np.int32))


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 30))
def test_what_was_read_is_known_after_a_restart_however_the_log_was_trimmed(
    num_read: int, num_trimmed: int, num_new: int
) -> None:
    cursor = after_restart(that_read(stream(num_read)))
    log = dict(list(stream(num_read + num_new).items())[num_trimmed:])
    assert found(cursor, log) == max(0, num_read - num_trimmed)


def test_a_mark_of_a_former_version_is_read() -> None:
    mark = {"replica": "00" * 8, "lives": [], "waypoints": [[9, "9-0", "09" * 16], [4, "4-0", "04" * 16]]}
    cursor = ReplicaOffset(ONE, Checkpoint(mark, 5))
    log = {b"9-0": b"\x09" * 16}
    assert cursor.locate(b"1-0", log.get) == b"9-0"


@given(st.integers(1, 200), st.integers(1, 200))
def test_another_log_with_the_same_ids_is_not_known(num_read: int, num_entries: int) -> None:
    other = {entry_id: sequence_id[::-1] for entry_id, sequence_id in stream(num_entries).items()}
    cursor = after_restart(that_read(stream(num_read)))
    assert found(cursor, other) == 0


def test_of_an_empty_log_nothing_is_known() -> None:
    assert that_read(stream(3)).locate(None, lambda _: None) is None


def test_a_mark_stays_small() -> None:
    cursor = that_read(stream(1000))
    for life in range(200):
        cursor = after_restart(cursor, b"%08d" % life)
    assert len(cursor.incarnations) == 64
    assert len(json.dumps(cursor.to_json())) < 4000


def test_our_own_entries_are_known_by_position_and_life() -> None:
    second = after_restart(ReplicaOffset(ONE), TWO, position=100)
    third = after_restart(second, THREE, position=250)
    assert third.is_stored(by(THREE, 10**9)) and third.is_stored(by(ONE, 99)) and third.is_stored(by(TWO, 249))
    assert not third.is_stored(by(ONE, 100))  # lost with the tail
    assert not third.is_stored(by(TWO, 250))
    assert not third.is_stored(by(b"another.", 0))
    assert position_of(sequence_id_of(ONE, 1 << 40)) == 1 << 40


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
