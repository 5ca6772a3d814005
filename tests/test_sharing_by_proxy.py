"""What lies between a replica and Redis may be late, broken, garbled or slow: nothing stays wrong."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis.exceptions import InvalidResponse

from benchmarks.faults.injected import OVERSIZED_ANSWERS, WRONG_ANSWERS
from benchmarks.faults.proxy import CLEAR, FaultProxy, Weather
from ssd.sharing import clients as bounded_parser
from ssd.sharing.redis_log import RedisCounters
from tests.redis_server import RedisServer, redis_server, started
from tests.sharing_replica import KEY, Replica, eventually, replica, stored

__all__ = ["redis_server"]  # the fixture


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
    "weather",
    [
        Weather(delay_s=0.3),
        Weather(jitter_s=0.5),
        Weather(is_silent=True),
        Weather(is_broken_off=True),
        Weather(refuses=True),
        Weather(flips=0.5),
        Weather(trickle_s=0.05),
        Weather(sip_s=0.05),
        *(Weather(extra=extra) for extra in (b"+OK\r\n", b"*0\r\n", b":1\r\n")),
        # A replica that took it for the place it has read up to would ask for what comes after it for ever.
        *(
            Weather(answer=b"*1\r\n*2\r\n" + _bulk(KEY.encode()) + _page(entry_id))
            for entry_id in (b"17640x-0", b"", b"9" * 30 + b"-0", b"1-2-3", b"\xff-1", b"-1")
        ),
    ],
    ids=[
        *("delay", "jitter", "silent", "broken off", "refused", "flips", "trickle", "sip"),
        *("an answer too many", "an empty one too many", "a number too many"),
        *("no id", "empty id", "id of 30 digits", "id of three parts", "id of other bytes", "id below 0"),
    ],
)
def test_sharing_comes_back_after(pair: Pair, weather: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_parser, "_PATIENCE_S", 1.0)
    pair.proxy.weather = weather
    pair.write_meanwhile(0.7 if weather.answer or weather.extra else 2.5)
    pair.proxy.weather = CLEAR
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
        pair.proxy.weather = Weather(answer=answer)
        pair.write_meanwhile(0.15)
        pair.proxy.weather = CLEAR
        pair.write_meanwhile(0.05)
    pair.share()


def test_the_search_for_a_place_to_begin_survives_ids_that_are_none(redis_server: RedisServer) -> None:
    with FaultProxy(redis_server.port) as proxy, replica(redis_server.url) as two:
        proxy.weather = Weather(answer=_page(b"17x-0"))
        with replica(f"redis://127.0.0.1:{proxy.port}/0") as one:
            one.append([1])
            time.sleep(0.5)
            proxy.weather = CLEAR
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
