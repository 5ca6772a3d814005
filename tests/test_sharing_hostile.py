"""A log that somebody else writes to as well: whatever he puts there costs an entry, never the sharing."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import InvalidResponse

from benchmarks.reliability.faults import OVERSIZED_ANSWERS, WRONG_ANSWERS
from benchmarks.reliability.proxy import NO_FAULT, FaultProxy, LinkFault
from ssd.replication import clients as bounded_parser
from ssd.replication.background import Backoff
from ssd.replication.redis_stream import BEGINNING, FIELD
from ssd.replication.replication_log import RedisCounters
from tests.redis_server import RedisServer, client, redis_server, started
from tests.sharing_replica import KEY, Replica, entry, eventually, foreign, replica, stored

__all__ = ["client", "redis_server"]  # fixtures

ROOT = Path(__file__).parent.parent
LAST_ID = b"18446744073709551615-18446744073709551615"
FUTURE_ID = b"18446744073709551000-7"
OTHER_KEY = KEY.replace("default", "other")

Client = Any


def settled(one: Replica) -> None:
    """``one`` is connected and has found its place in the log."""
    eventually(lambda: one.log.stats().is_connected)


# Ids


@pytest.mark.parametrize("lost_by", ["flushall", "delete", "nothing"])
@pytest.mark.parametrize("hostile_id", [FUTURE_ID, LAST_ID], ids=["far ahead", "last possible"])
def test_a_hostile_id_does_not_end_sharing(
    redis_server: RedisServer, client: Client, tmp_path: Path, hostile_id: bytes, lost_by: str
) -> None:
    """Nor does a clock that was ahead: Redis gives ids after its newest one then."""
    with replica(redis_server.url, tmp_path / "one") as one, replica(redis_server.url) as two:
        one.append([1])
        eventually(lambda: two.stored() == [[1]])
        client.xadd(KEY, foreign(1), id=hostile_id)
        eventually(lambda: [7, 1] in one.stored() and [7, 1] in two.stored())
        if lost_by == "flushall":
            client.flushall()
        elif lost_by == "delete":
            client.delete(KEY)
        one.append([2])
        eventually(lambda: [2] in two.stored())
        two.append([3])
        eventually(lambda: [3] in one.stored())
        assert sorted(two.stored()) == sorted(one.stored()) == [[1], [2], [3], [7, 1]]
        eventually(lambda: one.log.stats().is_connected and two.log.stats().is_connected)
        assert (client.xlen(KEY) == 4) == (hostile_id == FUTURE_ID and lost_by == "nothing")
    with replica(redis_server.url, tmp_path / "one") as one:
        settled(one)
        client.xadd(KEY, foreign(2))
        eventually(lambda: [7, 2] in one.stored())
        assert sorted(one.stored()) == [[1], [2], [3], [7, 1], [7, 2]]


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("is_trimmed", [False, True], ids=["flushed", "trimmed"])
def test_what_follows_an_empty_log_is_read_once_whatever_its_ids(
    redis_server: RedisServer, client: Client, tmp_path: Path, is_trimmed: bool, restarts: bool
) -> None:
    with ExitStack() as stack:
        one = stack.enter_context(replica(redis_server.url, tmp_path / "one"))
        client.xadd(KEY, foreign(1), id=FUTURE_ID)
        eventually(lambda: one.stored() == [[7, 1]])
        if restarts:
            stack.close()
        if is_trimmed:
            client.xtrim(KEY, maxlen=0)
        else:
            client.flushall()
        if restarts:
            one = stack.enter_context(replica(redis_server.url, tmp_path / "one"))
        (stream,) = one.log.subscriber.streams()
        eventually(lambda: stream.last_id == BEGINNING)
        for number in (2, 3):
            client.xadd(KEY, foreign(number))
            eventually(lambda: [7, number] in one.stored())  # noqa: B023
        assert one.stored() == [[7, 1], [7, 2], [7, 3]]


def test_replicas_that_begin_a_new_log_at_once_lose_nothing(redis_server: RedisServer, client: Client) -> None:
    replicas = [replica(redis_server.url) for _ in range(4)]
    with replicas[0] as a, replicas[1] as b, replicas[2] as c, replicas[3] as d:
        for one in (a, b, c, d):
            settled(one)
        for attack in range(3):
            client.xadd(KEY, foreign(attack), id=LAST_ID)
            for number, one in enumerate((a, b, c, d)):
                one.append([10 * attack + number + 10])
            expected = {10 * past + number + 10 for past in range(attack + 1) for number in range(4)}
            eventually(
                lambda expected=expected: all(  # type: ignore[misc]
                    expected <= {text[0] for text in one.stored()} for one in (a, b, c, d)
                )
            )
        for one in (a, b, c, d):
            own = [text for text in one.stored() if text[0] >= 10]
            assert len(own) == 12  # nothing twice


# Sizes

_READER = """
import sys, time
from tests.sharing_replica import replica
from tests.test_sharing_hostile import peak_memory
with replica(sys.argv[1]) as one:
    while not one.log.stats().is_connected: time.sleep(0.01)
    before = peak_memory()
    print("ready", flush=True)
    deadline = time.monotonic() + 60
    while one.stored()[-1:] != [[7, 99]] and time.monotonic() < deadline: time.sleep(0.01)
    print(peak_memory() - before, one.stored() == [[7, n] for n in (0, 1, 98, 99)], one.log.stats().num_invalid)
"""


def peak_memory() -> int:
    """Most bytes this process ever had in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("is_there_before", [True, False], ids=["paged through", "followed"])
@pytest.mark.parametrize("kind", ["large values", "many fields"])
def test_what_an_entry_takes_is_known_before_it_is_fetched(
    redis_server: RedisServer, client: Client, is_there_before: bool, kind: str
) -> None:
    def write() -> None:
        client.xadd(KEY, foreign(0))
        client.xadd(KEY, foreign(1))
        for _ in range(6):
            if kind == "large values":
                client.xadd(KEY, {FIELD: bytes(24 << 20)})
            else:
                client.xadd(KEY, {b"%d" % number: b"" for number in range(200_000)})
        client.xadd(KEY, foreign(98))
        client.xadd(KEY, foreign(99))

    if is_there_before:
        write()
    with subprocess.Popen(
        [sys.executable, "-c", _READER, redis_server.url], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        if not is_there_before:
            write()
        num_bytes, is_right, num_invalid = child.stdout.read().split()
    assert is_right == "True"
    assert int(num_bytes) < 40 << 20
    assert int(num_invalid) == 6


def test_many_tiny_entries_are_few_to_a_reader(redis_server: RedisServer, client: Client) -> None:
    """A log is bounded in entries as well as in tokens, for whoever reads it."""
    pipeline = client.pipeline(transaction=False)
    for number in range(3000):
        pipeline.xadd(KEY, foreign(number % 900))
    pipeline.execute()
    with replica(redis_server.url, max_tokens=64_000) as one:  # 1,000 entries
        eventually(lambda: client.xlen(KEY) <= 1000)
        settled(one)
        client.xadd(KEY, {FIELD: entry(1, 2, 3)})
        eventually(lambda: [1, 2, 3] in one.stored())
        assert (
            one.log.stats().num_received + one.log.stats().num_known <= 1002
        )  # one beyond the bound shows that it is one


# Entries and keys that are not ours


def test_a_namespace_whose_key_is_of_another_kind_holds_up_no_other(redis_server: RedisServer, client: Client) -> None:
    client.set(KEY, "a string")
    with replica(redis_server.url) as (one, one_log), replica(redis_server.url) as (two, two_log):
        one.get(), two.get()
        for caches in (one, two):
            caches.get("other")
        for number in range(272):
            one.get().append([5, number])  # refused
            one.get("other").append([6, number])
        eventually(lambda: len(stored(two, "other")) == 272)
        assert stored(two) == []
        assert not one_log.stats().is_connected and not two_log.stats().is_connected
        client.delete(KEY)
        eventually(lambda: len(stored(two)) == 272)  # and nothing new was appended
        eventually(lambda: one_log.stats().num_dropped == one_log.stats().num_queued == 0)
        eventually(lambda: one_log.stats().is_connected and two_log.stats().is_connected)


def test_a_slow_namespace_holds_up_no_other(
    redis_server: RedisServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replica(redis_server.url) as (one, log):
        slow, _ = one.get(), one.get("other")
        eventually(lambda: log.stats().is_connected)
        append = slow.append_replicated

        def wait_for_room(*arguments: Any, **settings: Any) -> None:
            time.sleep(0.5)
            append(*arguments, **settings)

        monkeypatch.setattr(slow, "append_replicated", wait_for_room)
        for number in range(90):
            client.xadd(KEY, foreign(number))
        for number in range(300):
            client.xadd(OTHER_KEY, foreign(number, OTHER_KEY))
        eventually(lambda: len(stored(one, "other")) == 300)
        assert 0 < len(stored(one)) < 90


def test_a_machine_that_is_slow_reads_on(
    redis_server: RedisServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would rest ever longer, up to three seconds after each page."""
    for number in range(640):
        client.xadd(KEY, foreign(number))
    with replica(redis_server.url) as (one, log):
        cache, rested = one.get(), list[object]()
        monkeypatch.setattr(Backoff, "pause", lambda self: rested.append(self))
        append = cache.append_replicated

        def starved(*arguments: Any, **settings: Any) -> None:
            time.sleep(0.3)
            append(*arguments, **settings)

        monkeypatch.setattr(cache, "append_replicated", starved)
        eventually(lambda: len(stored(one)) == 640)
        assert log.stats().is_connected and not rested


# By a proxy that is late, broken, garbled or slow: nothing stays wrong


class Pair:
    """Two replicas of one Redis, the first by a proxy."""

    def __init__(self, one: Replica, two: Replica, proxy: FaultProxy) -> None:
        self.one, self.two, self.proxy = one, two, proxy
        self._number = 0

    def share(self) -> None:
        """Each learns a text and the other has it."""
        self._number += 1
        self.one.append([1, self._number])
        self.two.append([2, self._number])
        eventually(lambda: [1, self._number] in self.two.stored())
        eventually(lambda: [2, self._number] in self.one.stored())

    def write_meanwhile(self, seconds: float) -> None:
        """Both learn, a text every 20 ms."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._number += 1
            self.one.append([1, self._number])
            self.two.append([2, self._number])
            time.sleep(0.02)

    def check(self) -> None:
        """Nothing is there twice, nothing that nobody said."""
        for held in (self.one.stored(), self.two.stored()):
            assert len(held) == len({*map(tuple, held)})
            assert {text[0] for text in held} <= {1, 2} and {len(text) for text in held} == {2}
            assert max(text[1] for text in held) <= self._number


@pytest.fixture
def pair(redis_server: RedisServer) -> Iterator[Pair]:
    with ExitStack() as stack:
        proxy = stack.enter_context(FaultProxy(redis_server.port))
        one = stack.enter_context(replica(f"redis://127.0.0.1:{proxy.port}/0"))
        two = stack.enter_context(replica(redis_server.url))
        for each in (one, two):
            each.caches.get("other")
        made = Pair(one, two, proxy)
        made.share()
        yield made
        made.check()
        assert stored(one.caches, "other") == stored(two.caches, "other") == []


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text)


def _page(entry_id: bytes) -> bytes:
    """An entry under what may be no id."""
    return b"*1\r\n*2\r\n" + _bulk(entry_id) + b"*2\r\n" + _bulk(b"e") + _bulk(b"no entry")


@pytest.mark.parametrize(
    "fault",
    [
        LinkFault(delay_s=0.3),
        LinkFault(jitter_s=0.5),
        LinkFault(is_silent=True),
        LinkFault(is_broken_off=True),
        LinkFault(refuses=True),
        LinkFault(flips=0.5),
        LinkFault(trickle_s=0.05),
        LinkFault(sip_s=0.05),
        *(LinkFault(extra=extra) for extra in (b"+OK\r\n", b"*0\r\n", b":1\r\n")),
        # A replica that took it for the place it has read up to would ask for what comes after it for ever.
        *(
            LinkFault(answer=b"*1\r\n*2\r\n" + _bulk(KEY.encode()) + _page(entry_id))
            for entry_id in (b"17640x-0", b"", b"9" * 30 + b"-0", b"1-2-3", b"\xff-1", b"-1")
        ),
    ],
    ids=[
        *("delay", "jitter", "silent", "broken off", "refused", "flips", "trickle", "sip"),
        *("an answer too many", "an empty one too many", "a number too many"),
        *("no id", "empty id", "id of 30 digits", "id of three parts", "id of other bytes", "id below 0"),
    ],
)
def test_sharing_comes_back_after(pair: Pair, fault: LinkFault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_parser, "_PATIENCE_S", 1.0)
    pair.proxy.fault = fault
    pair.write_meanwhile(0.7 if fault.answer or fault.extra else 2.5)
    pair.proxy.fault = NO_FAULT
    pair.share()


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
def test_connections_that_are_cut_again_and_again_lose_nothing(pair: Pair, reset: bool) -> None:
    for _ in range(10):
        pair.write_meanwhile(0.1)
        pair.proxy.cut(reset=reset)
    pair.share()
    eventually(lambda: sorted(pair.one.stored()) == sorted(pair.two.stored()))


@pytest.mark.slow
def test_sharing_comes_back_after_wrong_answers(pair: Pair) -> None:
    for answer in (*WRONG_ANSWERS, *OVERSIZED_ANSWERS):
        pair.proxy.fault = LinkFault(answer=answer)
        pair.write_meanwhile(0.15)
        pair.proxy.fault = NO_FAULT
        pair.write_meanwhile(0.05)
    pair.share()


def test_the_search_for_a_place_to_begin_survives_ids_that_are_none(redis_server: RedisServer) -> None:
    with FaultProxy(redis_server.port) as proxy, replica(redis_server.url) as two:
        proxy.fault = LinkFault(answer=_page(b"17x-0"))
        with replica(f"redis://127.0.0.1:{proxy.port}/0") as one:
            one.append([1])
            time.sleep(0.5)
            proxy.fault = NO_FAULT
            two.append([2])
            eventually(lambda: [1] in two.stored() and [2] in one.stored())


@pytest.mark.parametrize("kind", [b"+", b"-", b":", b"$", b"*"])
def test_a_line_without_end_is_given_up(kind: bytes) -> None:
    ours, theirs = socket.socketpair()
    sent = 0

    def send() -> None:
        nonlocal sent
        with contextlib.suppress(OSError):
            theirs.sendall(kind)
            while sent < 64 << 20:
                sent += theirs.send(b"1" * (1 << 16))

    parser = bounded_parser.BoundedParser(1 << 16)
    parser.on_connect(SimpleNamespace(_sock=ours, socket_timeout=2, encoder=None))
    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(InvalidResponse, match="a line"):
        parser.read_response()
    ours.close()
    sender.join()
    theirs.close()
    assert sent < 8 << 20


def test_writers_follow_a_failover_that_ends_no_connection(redis_server: RedisServer, tmp_path: Path) -> None:
    """The former server takes no writes any more, and says so for as long as one asks it."""
    with (
        started(RedisServer(tmp_path / "second")) as second,
        FaultProxy(redis_server.port) as proxy,
        replica(f"redis://127.0.0.1:{proxy.port}/0") as one,
        replica(second.url) as two,
    ):
        two.append([0])
        eventually(lambda: two.log.stats().num_known == 1)  # it reads: to begin it must be allowed to write
        second.ask("REPLICAOF", "127.0.0.1", redis_server.port)
        one.append([1])
        eventually(lambda: [1] in two.stored())
        second.ask("REPLICAOF", "NO", "ONE")
        proxy.target = second.port
        redis_server.ask("REPLICAOF", "127.0.0.1", second.port)
        one.append([2])
        two.append([3])
        eventually(lambda: [2] in two.stored() and [3] in one.stored())
        assert [[0], *sorted(one.stored())] == sorted(two.stored()) == [[0], [1], [2], [3]]


def test_replicas_that_tell_an_emptied_redis_their_numbers_do_not_add_them_up(redis_server: RedisServer) -> None:
    """A number that grew would have a tenant's cache deleted."""
    with (
        contextlib.closing(RedisCounters(redis_server.url)) as one,
        contextlib.closing(RedisCounters(redis_server.url)) as two,
    ):
        assert one.read(["a", "b"]) == two.read(["a", "b"]) == [0, 0]
        assert one.raise_to("a", 5) == two.raise_to("a", 5) == one.raise_to("a", 3) == 5
        assert two.add("a", 1) == 6
        assert one.read(["a", "b"]) == [6, 0]
