"""The faults, a function each: of one server, of the network before Redis, of Redis; and rounds of them."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, TypeVar

from benchmarks.faults.fleet import Fleet, Member, SkippedError
from benchmarks.faults.proxy import CLEAR, Weather
from ssd.replication.redis_stream import FIELD

SERVER, NETWORK, STORE = KINDS = ("server", "network", "store")
FAULTS: Final[dict[str, tuple[str, Callable[[Fleet], None]]]] = {}
"""By name: the kind, and what injects it and returns when it is over; clients ask meanwhile."""
AMONG_OTHERS: Final = frozenset({"server-anew", "server-kill-unheard"})
"""Faults of a server that say something only where others share with it."""


_Inject = TypeVar("_Inject", bound=Callable[..., None])


def _fault(kind: str) -> Callable[[_Inject], _Inject]:
    def register(inject: _Inject) -> _Inject:
        FAULTS[inject.__name__.replace("_", "-")] = kind, inject
        return inject

    return register


def drawn(num_rounds: int, seed: int, kinds: Sequence[str], only: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    """Names of what happens in each round: mostly one fault, in every fourth one of each kind at once.

    All are drawn before any comes again, in an order that the seed says. ``only`` : of these names, one a round.
    """
    chance = random.Random(seed)
    names = {kind: [name for name, (its, _) in FAULTS.items() if its == kind] for kind in kinds}
    everything = list(only) if only else [name for some in names.values() for name in some]
    rounds: list[tuple[str, ...]] = []
    waiting: list[str] = []
    for number in range(num_rounds):
        if not only and number % 4 == 3:
            rounds.append(tuple(chance.choice(some) for some in names.values()))
            continue
        waiting = waiting or chance.sample(everything, len(everything))
        rounds.append((waiting.pop(),))
    return rounds


# Of a server: processes that end or hang, disks and files that fail


@_fault(SERVER)
def server_kill(fleet: Fleet) -> None:
    """kill -9 in the middle of what it is doing."""
    fleet.kill_server(fleet.one())


@_fault(SERVER)
def server_kill_loading(fleet: Fleet) -> None:
    """Killed while it loads, then started again."""
    member = fleet.one()
    with member.outage():
        fleet.promise(member)
        member.kill()
        member.server.start(wait=False)
        time.sleep(fleet.chance.uniform(0.0, 6.0))
        member.kill()
        member.server.start()


@_fault(SERVER)
def server_kill_closing(fleet: Fleet) -> None:
    """Killed while it closes in order."""
    member = fleet.one()
    with member.outage():
        fleet.promise(member)
        member.close(kill_after_s=fleet.chance.uniform(0.0, 1.0))
        member.server.start()


@_fault(SERVER)
def server_restart(fleet: Fleet) -> None:
    """Closed in order; it comes back with its directory."""
    member = fleet.one()
    with member.outage():
        member.close()
        member.server.start()


@_fault(SERVER)
def disk_full(fleet: Fleet) -> None:
    """No byte left on the disk for a while."""
    if not fleet.has_small_disks:
        raise SkippedError("a small disk needs the right to mount a tmpfs")
    filler = fleet.one().directory / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    fleet.hold(4.0)
    filler.unlink()


_HEADER = 256  # bytes of a segment file
_PATIENCE_S = 20.0


@_fault(SERVER)
def segment_damaged(fleet: Fleet) -> None:
    """Mapped segments lose their second half, or all but the header is written over; the server begins anew then."""
    member = fleet.one()
    fleet.settle(member)
    deadline = time.monotonic() + _PATIENCE_S
    while not (segments := list(member.directory.glob("*/*.seg"))):
        if time.monotonic() > deadline:
            raise AssertionError("no segment was there to be damaged")
        time.sleep(0.1)
    for number, path in enumerate(segments):
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(_HEADER)
            file.write(fleet.chance.randbytes(size - _HEADER)) if number % 2 else file.truncate(size // 2)
    fleet.hold(3.0)
    member.begin_anew()


# Of the network between servers and Redis, and of Redis; to one cache more of them come in tests/test_sharing_*.py.

WRONG_ANSWERS: Final = (
    *(b"+OK\r\n", b"+\r\n", b":1\r\n", b":-1\r\n", b":x\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"$5\r\nhello\r\n"),
    *(b"$-7\r\n", b"*-7\r\n", b"$x\r\n", b"*x\r\n", b"\r\n", b"?\r\n", b">1\r\n+message\r\n", b"%1\r\n+a\r\n+b\r\n"),
    *(b"-ERR no\r\n", b"-LOADING wait\r\n", b"-READONLY no\r\n", b"-NOAUTH no\r\n", b"-MOVED 1 127.0.0.1:1\r\n"),
    *(b"-CLUSTERDOWN no\r\n", b"-OOM no\r\n", b"-NOPERM no\r\n", b"-WRONGTYPE no\r\n", b"-MASTERDOWN no\r\n"),
    *(b"*1\r\n*2\r\n$3\r\n1-x\r\n*2\r\n$1\r\ne\r\n$1\r\ny\r\n", b"*1\r\n*2\r\n$3\r\n9-1\r\n*-1\r\n", b"*1\r\n" * 2000),
    *(b"*2\r\n:1\r\n:2\r\n", b"*1\r\n*1\r\n*1\r\n:1\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"*1\r\n*2\r\n$1\r\nx\r\n*0\r\n"),
)
OVERSIZED_ANSWERS: Final = (
    *(b"$999999999999\r\n", b"*999999999999\r\n", b"$999999999999\r\n" + bytes(1 << 20), b"+" + bytes(1 << 20)),
    *(b"-" + b"x" * (1 << 20), b":" + b"9" * (1 << 20), b"*2000000000\r\n" + b":1\r\n" * 100_000, b"*1\r\n" * 100_000),
)


@contextmanager
def _weather(members: Sequence[Member], weather: Weather) -> Iterator[None]:
    for member in members:
        member.proxy.weather = weather
    try:
        yield
    finally:
        for member in members:
            member.proxy.weather = CLEAR


def _under(weather: Weather, fleet: Fleet) -> None:
    """Some servers have this weather for a while."""
    with _weather(fleet.some(), weather):
        fleet.hold(5.0)


FAULTS.update(
    {
        name: (NETWORK, partial(_under, weather))
        for name, weather in {
            "delay": Weather(delay_s=0.2, jitter_s=2.5),
            "half-open": Weather(is_silent=True),
            "broken-off": Weather(is_broken_off=True),
            "flipped-bits": Weather(flips=0.5),
            "trickle": Weather(trickle_s=0.02, sip_s=0.02),
        }.items()
    }
)


@_fault(NETWORK)
def resets(fleet: Fleet) -> None:
    """All connections are reset or closed, again and again; new ones are reset too for a while."""
    members = fleet.some()
    for number in range(20):
        for member in members:
            member.proxy.cut(reset=number % 2 == 0)
        fleet.hold(0.1)
    with _weather(members, Weather(refuses=True)):
        fleet.hold(2.0)


@_fault(NETWORK)
def wrong_answers(fleet: Fleet) -> None:
    """Answers are random bytes, not to what was asked, announce what nobody has memory for, or are one too many."""
    answers = [fleet.chance.randbytes(fleet.chance.randint(1, 4000)) for _ in range(5)]
    answers += [*fleet.chance.sample(WRONG_ANSWERS, 10), *fleet.chance.sample(OVERSIZED_ANSWERS, 5)]
    extras = [Weather(extra=extra) for extra in (b"+OK\r\n", b"*0\r\n", b":1\r\n", b"*-1\r\n")]
    for weather in (*(Weather(answer=answer) for answer in answers), *extras):
        with _weather(fleet.some(), weather):
            time.sleep(0.3)


@_fault(SERVER)
def server_anew(fleet: Fleet) -> None:
    """A server comes back with nothing, while what it asks Redis for is late and cut off."""
    member = fleet.one()
    fleet.settle(member)
    with _weather([member], Weather(jitter_s=0.3)):
        member.begin_anew()
        for _ in range(5):
            fleet.hold(0.3)
            member.proxy.cut()


@_fault(SERVER)
def server_kill_unheard(fleet: Fleet) -> None:
    """kill -9 of a server that Redis answers nothing, which comes back while it still does not."""
    member = fleet.one()
    with _weather([member], Weather(is_silent=True)):
        fleet.hold(2.0)
        fleet.kill_server(member)


@_fault(STORE)
def redis_stop(fleet: Fleet) -> None:
    """The process hangs, its connections open."""
    fleet.redis.signal(signal.SIGSTOP)
    fleet.hold(4.0)
    fleet.redis.signal(signal.SIGCONT)


@_fault(STORE)
def redis_flushall(fleet: Fleet) -> None:
    """Loses everything, several times."""
    with fleet.client() as client:
        for _ in range(4):
            client.flushall()
            fleet.hold(0.7)


@_fault(STORE)
def redis_kill(fleet: Fleet, *, is_empty: bool = False) -> None:
    """kill -9, and back with all it had written."""
    fleet.redis.kill()
    fleet.hold(3.0)
    fleet.restart_redis(is_empty=is_empty)


@_fault(STORE)
def redis_kill_and_lose(fleet: Fleet) -> None:
    """kill -9, and back with nothing."""
    redis_kill(fleet, is_empty=True)


@_fault(STORE)
def redis_full(fleet: Fleet, policy: str = "noeviction") -> None:
    """maxmemory is reached, and nothing may be evicted: no write is taken."""
    with fleet.client() as client:
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", 1)
        fleet.hold(4.0)
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")


@_fault(STORE)
def redis_evicting(fleet: Fleet) -> None:
    """maxmemory is reached, and our keys are evicted all the time."""
    redis_full(fleet, "allkeys-random")


@_fault(STORE)
def logs_mixed_up(fleet: Fleet) -> None:
    """One tenant's log is copied under the other's name, as a restore that goes wrong does."""
    first, second = fleet.streams
    with fleet.client() as client:
        if not client.copy(first, second, replace=True):
            raise AssertionError("no log was there to be copied")
        fleet.hold(3.0)
        client.delete(first, second)


@_fault(STORE)
def log_junk(fleet: Fleet) -> None:
    """Entries that are none, of many kinds, and some of 96 MB."""
    with fleet.client() as client:
        for stream in 10 * fleet.streams:
            for fields in (
                {FIELD: b""},
                {FIELD: fleet.chance.randbytes(fleet.chance.randint(1, 400))},
                {FIELD: b"\x01" + bytes(60)},
                {b"other": b"field"},
                {b"%d" % number: b"" for number in range(500)},
            ):
                client.xadd(stream, fields)  # type: ignore[arg-type]
        for stream in fleet.streams:
            client.xadd(stream, {FIELD: bytes(96 << 20)})
        fleet.hold(2.0)
        for stream in fleet.streams:
            client.xtrim(stream, maxlen=0, approximate=False)  # gives the memory back
