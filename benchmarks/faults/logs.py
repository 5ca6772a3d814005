"""Faults of Redis, and of what others write to it."""

from __future__ import annotations

import signal
import time
from typing import Any

from benchmarks.faults.scene import Scene
from ssd.sharing.append import FIELD

_FUTURE = b"18446744073709551000-7"
_LAST = b"18446744073709551615-18446744073709551615"
_HUGE_BYTES = 96 << 20


def kill(scene: Scene) -> None:
    """Killed, and started again, empty."""
    assert scene.redis is not None
    scene.redis.kill()
    scene.hold(2.0)
    scene.redis.start()


def pause(scene: Scene) -> None:
    """Answers nobody for three seconds."""
    with scene.redis_client() as client:
        client.client_pause(3000)
    scene.hold(4.0)


def maxmemory(scene: Scene) -> None:
    """Takes no writes for want of memory."""
    with scene.redis_client() as client:
        client.config_set("maxmemory", 1)
        scene.hold(3.0)
        client.config_set("maxmemory", 0)


def flushall(scene: Scene) -> None:
    """Loses everything, several times."""
    with scene.redis_client() as client:
        for _ in range(3):
            client.flushall()
            scene.hold(1.0)


def password(scene: Scene) -> None:
    """Wants a password that we have not."""
    with scene.redis_client() as client:
        client.config_set("requirepass", "another")
        client.execute_command("AUTH", "another")  # type: ignore[no-untyped-call]
        _cut(client)
        scene.hold(3.0)
        client.config_set("requirepass", "")


def stop(scene: Scene) -> None:
    """Hangs, connections open."""
    assert scene.redis is not None
    scene.redis.signal(signal.SIGSTOP)
    scene.hold(4.0)
    scene.redis.signal(signal.SIGCONT)


def cuts(scene: Scene) -> None:
    """Closes every connection, forty times."""
    with scene.redis_client() as client:
        for _ in range(40):
            _cut(client)
            time.sleep(0.05)


def junk(scene: Scene) -> None:
    """Entries that are none, of many kinds."""
    with scene.redis_client() as client:
        for _ in range(20):
            for fields in (
                {FIELD: b""},
                {FIELD: scene.chance.randbytes(scene.chance.randint(1, 400))},
                {FIELD: b"\x01" + bytes(60)},
                {b"other": b"field"},
                {b"%d" % number: b"" for number in range(500)},
            ):
                client.xadd(scene.stream, fields)  # type: ignore[arg-type]
    scene.hold(1.0)


def future_id(scene: Scene) -> None:
    """An id far ahead is read, then the log is emptied."""
    with scene.redis_client() as client:
        client.xadd(scene.stream, {FIELD: b"junk"}, id=_FUTURE)
        scene.hold(1.5)
        client.flushall()


def last_id(scene: Scene) -> None:
    """The last id there is: a stream takes nothing after it."""
    with scene.redis_client() as client:
        client.xadd(scene.stream, {FIELD: b"junk"}, id=_LAST)
    scene.hold(1.0)


def huge_values(scene: Scene) -> None:
    """Six values of 96 MB."""
    with scene.redis_client() as client:
        for _ in range(6):
            client.xadd(scene.stream, {FIELD: bytes(_HUGE_BYTES)})
        scene.hold(2.0)
        client.xtrim(scene.stream, maxlen=0, approximate=False)  # gives the memory back


def another_kind(scene: Scene) -> None:
    """The log's key holds a string for a while."""
    with scene.redis_client() as client:
        client.set(scene.stream, "a string")
        scene.hold(2.0)
        client.delete(scene.stream)


def _cut(client: Any) -> None:
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
