"""Faults between the servers and Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from benchmarks.fleet_faults.fleet import Fleet, Member
from benchmarks.fleet_faults.proxy import CLEAR, Weather

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


def delay(fleet: Fleet) -> None:
    """A fixed delay, from small to longer than a client waits."""
    for member in fleet.some():
        member.proxy.weather = Weather(delay_s=fleet.chance.choice((0.02, 0.2, 0.6, 2.5)))
    fleet.hold(5.0)
    _clear(fleet)


def jitter(fleet: Fleet) -> None:
    """Delays of up to 1.5 s, another for each chunk."""
    with _weather(fleet.some(), Weather(jitter_s=1.5)):
        fleet.hold(5.0)


def resets(fleet: Fleet) -> None:
    """All connections are reset, again and again; new ones too for a while."""
    members = fleet.some()
    for _ in range(20):
        for member in members:
            member.proxy.cut()
        fleet.hold(0.1)
    with _weather(members, Weather(refuses=True)):
        fleet.hold(2.0)


def ends(fleet: Fleet) -> None:
    """All connections are closed in order, again and again."""
    for _ in range(20):
        for member in fleet.members:
            member.proxy.cut(reset=False)
        fleet.hold(0.1)


def half_open(fleet: Fleet) -> None:
    """Connections are accepted and nothing is ever answered; those that met it stay so."""
    with _weather(fleet.some(), Weather(is_silent=True)):
        fleet.hold(5.0)


def broken_off(fleet: Fleet) -> None:
    """Answers stop in their middle, connections stay open."""
    with _weather(fleet.some(), Weather(is_broken_off=True)):
        fleet.hold(5.0)


def flipped_bits(fleet: Fleet) -> None:
    """A bit of every second chunk is another one, both ways."""
    with _weather(fleet.some(), Weather(flips=0.5)):
        fleet.hold(6.0)


def random_bytes(fleet: Fleet) -> None:
    """Answers are random bytes."""
    _answers(fleet, [fleet.chance.randbytes(fleet.chance.randint(1, 4000)) for _ in range(20)])


def wrong_answers(fleet: Fleet) -> None:
    """Answers are well-formed, or nearly, and not to what was asked."""
    _answers(fleet, fleet.chance.sample(WRONG_ANSWERS, 20))


def oversized_answers(fleet: Fleet) -> None:
    """Answers announce what nobody has memory for, or never end."""
    _answers(fleet, OVERSIZED_ANSWERS)


def shifted_answers(fleet: Fleet) -> None:
    """An answer too many comes before the right one, so that all that follow are those of another command."""
    for _ in range(10):
        with _weather(fleet.some(), Weather(extra=fleet.chance.choice((b"+OK\r\n", b"*0\r\n", b":1\r\n", b"*-1\r\n")))):
            time.sleep(0.3)
        time.sleep(0.3)


def trickle(fleet: Fleet) -> None:
    """Answers come a byte every 20 ms; connections that met it stay so."""
    with _weather(fleet.some(), Weather(trickle_s=0.02)):
        fleet.hold(6.0)


def sip(fleet: Fleet) -> None:
    """Commands are read a byte every 20 ms; connections that met it stay so."""
    with _weather(fleet.some(), Weather(sip_s=0.02)):
        fleet.hold(6.0)


def _answers(fleet: Fleet, answers: Sequence[bytes]) -> None:
    for answer in answers:
        with _weather(fleet.some(), Weather(answer=answer)):
            time.sleep(0.3)


def _clear(fleet: Fleet) -> None:
    for member in fleet.members:
        member.proxy.weather = CLEAR
