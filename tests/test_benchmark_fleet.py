"""The simulation of a fleet: its server beside a real one, its shortcut beside whole replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fleet.command import is_same, main
from benchmarks.fleet.full import Fleet
from benchmarks.fleet.limits import Unit, limits_of, load_of
from benchmarks.fleet.streams import Streams
from benchmarks.fleet.told import guesses
from benchmarks.fleet.traffic import ROUTINGS, Load, Session, places_of, requests_of
from benchmarks.fleet.views import Lagging
from benchmarks.report.fleet import limits_section, shares_section
from cache_builder.evaluation.log import Row
from ssd.config import IndexConfig
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot
from ssd.sharing.connection import connect
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

_KEYS = st.sampled_from([b"a", b"b"])
_IDS = st.one_of(
    st.sampled_from([b"0-0", b"0-1", b"1-1", b"2-0", b"3-7", b"5", b"x", b"%d-%d" % (2**64 - 1, 2**64 - 1)]),
    st.builds(lambda ms, number: b"%d-%d" % (ms, number), st.integers(0, 6), st.integers(0, 6)),
)
_BOUNDS = st.one_of(_IDS, _IDS.map(lambda entry_id: b"(" + entry_id), st.sampled_from([b"-", b"+"]))
_COUNT = st.integers(1, 4).map(lambda count: [b"COUNT", b"%d" % count])
_COMMANDS = st.one_of(
    st.tuples(st.just(b"XADD"), _KEYS, _IDS, st.just(b"e"), st.binary(max_size=5)),
    st.tuples(st.just(b"XADD"), _KEYS, st.just(b"NOMKSTREAM"), _IDS, st.just(b"e"), st.binary(max_size=5)),
    st.tuples(st.just(b"XADD"), _KEYS, st.just(b"MAXLEN"), st.just(b"3"), _IDS, st.just(b"e"), st.just(b"x")),
    st.builds(lambda key, a, b, c: (b"XRANGE", key, a, b, *c), _KEYS, _BOUNDS, _BOUNDS, _COUNT),
    st.builds(lambda key, a, b, c: (b"XREVRANGE", key, a, b, *c), _KEYS, _BOUNDS, _BOUNDS, _COUNT),
    st.builds(lambda c, a, b: (b"XREAD", *c, b"STREAMS", b"a", b"b", a, b), _COUNT, _IDS, _IDS),
    st.tuples(st.just(b"XTRIM"), _KEYS, st.just(b"MINID"), _IDS),
    st.tuples(st.just(b"XTRIM"), _KEYS, st.just(b"MAXLEN"), st.just(b"2")),
    st.tuples(st.just(b"XLEN"), _KEYS),
    st.tuples(st.just(b"DEL"), _KEYS),
    st.tuples(st.just(b"PING")),
)


def _reply(client: redis.Redis, command: tuple[bytes, ...]) -> Any:
    try:
        return client.execute_command(*command)
    except redis.ResponseError as error:
        return str(error)


def test_the_server_in_this_process_answers_as_a_real_one(redis_server: RedisServer) -> None:
    there = connect(redis_server.url)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(_COMMANDS, max_size=20))
    def check(commands: list[tuple[bytes, ...]]) -> None:
        here, _ = Streams().client()
        there.flushall()
        for command in commands:
            assert _reply(here, command) == _reply(there, command), command

    check()
    there.close()


def test_a_transaction_fails_where_another_client_was_faster(redis_server: RedisServer) -> None:
    for one, other in (
        ((server := Streams()).client()[0], server.client()[0]),
        (connect(redis_server.url), connect(redis_server.url)),
    ):
        one.xadd("a", {"e": "1"})
        for touches in (False, True):
            with one.pipeline() as transaction:
                transaction.watch("a")
                if touches:
                    other.xadd("a", {"e": "2"})
                transaction.multi()
                transaction.delete("a")
                try:
                    assert transaction.execute() == [1] and not touches
                except redis.WatchError:
                    assert touches
            one.xadd("a", {"e": "1"})


def test_a_connection_that_lags_is_shown_the_past() -> None:
    server = Streams()
    writer: Any = server.client()[0]
    reader: Any = server.client(lag_s=2.0)[0]
    for second in range(5):
        server.now = float(second)
        writer.xadd("a", {"e": "x"})
    assert reader.xrange("a")[-1][0] == b"2000-0"
    assert reader.xrevrange("a", count=1)[0][0] == b"2000-0"
    assert len(reader.xread({"a": "0"})[0][1]) == 3
    assert reader.xread({"a": "2000-0"}, block=100) == []
    assert len(writer.xrange("a")) == 5


def _stored(snapshot: Snapshot) -> list[list[int]]:
    """The sequences that a snapshot holds, sorted."""
    positions = np.arange(snapshot.tail_start, snapshot.tail_stop)
    tail = snapshot.ring[positions & (len(snapshot.ring) - 1)]
    text = np.concatenate([*(segment.tokens for segment in snapshot.segments), tail])
    ends = np.flatnonzero(text == SEPARATOR)
    return sorted(part[part != SEPARATOR].tolist() for part in np.split(text, ends + 1)[:-1])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 4), st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from(ROUTINGS))
def test_a_replica_can_search_exactly_the_texts_that_the_shortcut_says(
    seed: int, replicas: int, lag_s: float, routing: Any
) -> None:
    random = np.random.default_rng(seed)
    sessions = []
    for _ in range(8):
        text = random.integers(0, 900, 40).astype(np.int32)
        cuts = np.sort(random.choice(np.arange(1, 40), 5, replace=False))
        pairs = zip(cuts[:-1:2], cuts[1::2], strict=True)
        sessions.append(Session("made", [Row(text[:begin], text[begin:end]) for begin, end in pairs]))
    load = Load(replicas=replicas, concurrency=2, tokens_per_s=10, think_s=0.3, scored=1, seed=seed)
    requests = requests_of(sessions, load)
    places = places_of(requests, replicas, routing, seed)
    config = IndexConfig(dedup_block_tokens=4, lead_in_tokens=2, seal_tokens=32)
    shortcut = Lagging(replicas, lag_s, config)
    whole = Fleet(replicas, lag_s, config, vocab_size=1000, max_tokens=1 << 20)
    events = [(request.end, 0, number) for number, request in enumerate(requests)]
    events += [(request.arrival, 1, number) for number, request in enumerate(requests)]
    for now, is_arrival, number in sorted(events):
        request, place = requests[number], places[number]
        if is_arrival:
            assert _stored(shortcut.snapshot(place, now)) == _stored(whole.snapshot(place, now))
        else:
            for view in (shortcut, whole):
                view.learn(place, now, request.text, len(request.row.context))
    num_written = sum(replica.written.commands["XADD"] for replica in whole.replicas)
    assert shortcut.told.num_entries == num_written


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 4), st.sampled_from([0.0, 0.3, 2.0]), st.integers(2, 5))
def test_filters_of_their_own_write_what_replicas_do_and_one_for_all_differs_only_by_guesses(
    seed: int, replicas: int, lag_s: float, num_ids: int
) -> None:
    random = np.random.default_rng(seed)
    sessions = []
    for _ in range(6):
        text = random.integers(0, num_ids, 60).astype(np.int32)  # so few that blocks often end alike
        sessions.append(Session("made", [Row(text[:begin], text[begin : begin + 10]) for begin in (5, 20, 35, 50)]))
    load = Load(replicas=replicas, concurrency=2, tokens_per_s=10, think_s=0.3, scored=1, seed=seed)
    requests = requests_of(sessions, load)
    places = places_of(requests, replicas, "random", seed)
    config = IndexConfig(dedup_block_tokens=4, lead_in_tokens=2, seal_tokens=32, eviction="fifo")
    whole = Fleet(replicas, lag_s, config, vocab_size=1000, max_tokens=1 << 20)
    for number in sorted(range(len(requests)), key=lambda number: requests[number].end):
        request = requests[number]
        whole.learn(places[number], request.end, request.text, len(request.row.context))
    found = guesses(requests, places, replicas, lag_s, config)
    assert found["entries"] == sum(replica.written.commands["XADD"] for replica in whole.replicas)
    assert found["unexplained"] == 0


def test_what_whole_replicas_write_is_to_be_foretold_to_the_entry() -> None:
    one_filter = {"entries": 8, "differing": 2, "unexplained": 0}
    assert is_same({"entries": [7, 7], "one_filter": one_filter})
    assert not is_same({"entries": [7, 8], "one_filter": one_filter})
    assert not is_same({"entries": [7, 7], "one_filter": {**one_filter, "unexplained": 1}})


def test_the_limit_that_breaks_first_leads_and_holds_exactly_so_many_replicas() -> None:
    unit = Unit(
        entries=2.0,
        tokens=800.0,
        sent_bytes=800.0,
        read_bytes=900.0,
        receive_s=2e-4,
        write_us=40.0,
        reply_us=20.0,
        delivered_us=1.0,
    )
    limits = limits_of(unit)
    assert list(limits.values()) == sorted(limits.values())
    most = limits["redis_cpu"]
    assert load_of(unit, most)["redis_cores"] <= 0.8 < load_of(unit, most + 1)["redis_cores"]
    assert limits_of(unit, 0.0)["redis_cpu"] < most  # what readers that pause are for
    assert load_of(unit, 64)["replica_commands_per_s"] < 2.0 + 1 / 0.05


@pytest.mark.slow
def test_the_benchmark_says_what_a_log_loses_and_what_caches_that_share_nothing_do(tmp_path: Path) -> None:
    out, plot = tmp_path / "fleet.json", tmp_path / "fleet.png"
    sizes = ["--replicas", "1", "2", "--share", "0.1", "--scored", "1", "--concurrency", "1"]
    arguments = ["python", *sizes, "--lags", "0.5", "--jobs", "1", "--load-seconds", "0.3"]
    assert main([*arguments, "--out", str(out), "--plot", str(plot)]) == 0
    result = json.loads(out.read_text())
    shares = {(row["kind"], row["routing"]): row["share"] for row in result["rows"] if row["replicas"] == 2}
    assert shares["log", "random"] > shares["isolated", "random"]
    assert "| 2 | a session stays |" in shares_section(result)
    assert "What breaks first" in limits_section(result)
    assert plot.stat().st_size > 1000
