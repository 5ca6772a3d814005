"""Faults of Redis itself, and of who administers it."""

from __future__ import annotations

import signal
import time

from benchmarks.fleet_faults.fleet import USER, Fleet
from ssd.sharing.append import FIELD

_DAY_MS = 86_400_000


def pause(fleet: Fleet) -> None:
    """CLIENT PAUSE: answers nobody for four seconds."""
    with fleet.client() as client:
        client.client_pause(4000)
    fleet.hold(5.0)


def stop(fleet: Fleet) -> None:
    """The process hangs, its connections open."""
    fleet.redis.signal(signal.SIGSTOP)
    fleet.hold(4.0)
    fleet.redis.signal(signal.SIGCONT)


def flushall(fleet: Fleet) -> None:
    """Loses everything, several times."""
    with fleet.client() as client:
        for _ in range(4):
            client.flushall()
            fleet.hold(0.7)


def kill(fleet: Fleet) -> None:
    """kill -9, and back with all it had written."""
    fleet.redis.kill()
    fleet.hold(3.0)
    fleet.restart_redis(is_empty=False)


def kill_and_lose(fleet: Fleet) -> None:
    """kill -9, and back with nothing."""
    fleet.redis.kill()
    fleet.hold(3.0)
    fleet.restart_redis(is_empty=True)


def failover(fleet: Fleet) -> None:
    """The standby takes over; connections to the former one stay, which now follows and takes no writes."""
    standby = fleet.new_standby()
    with fleet.client(standby) as client:
        client.replicaof("NO", "ONE")
    former = fleet.switch_to(standby)
    with fleet.client(former) as client:
        client.replicaof("127.0.0.1", str(standby.port))
    fleet.hold(4.0)
    former.kill()


def failover_after_kill(fleet: Fleet) -> None:
    """The first one is killed, the standby takes over."""
    standby = fleet.new_standby()
    fleet.redis.kill()
    fleet.hold(2.0)
    with fleet.client(standby) as client:
        client.replicaof("NO", "ONE")
    fleet.switch_to(standby)
    fleet.hold(2.0)


def failover_to_the_past(fleet: Fleet) -> None:
    """The standby that takes over lacks the newest entries, and has others at their ids' place."""
    standby = fleet.new_standby()
    with fleet.client(standby) as client:
        client.replicaof("NO", "ONE")
    fleet.hold(3.0)  # what is written now it will never have
    fleet.switch_to(standby).kill()
    fleet.hold(2.0)


def full(fleet: Fleet) -> None:
    """maxmemory is reached, and nothing may be evicted: no write is taken."""
    with fleet.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        fleet.hold(4.0)
        client.config_set("maxmemory", 0)


def evicting(fleet: Fleet) -> None:
    """maxmemory is reached, and our keys are evicted all the time."""
    with fleet.client() as client:
        client.config_set("maxmemory-policy", "allkeys-random")
        client.config_set("maxmemory", 1)
        fleet.hold(4.0)
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")


def password(fleet: Fleet) -> None:
    """The user's password is another one for a while, and all have to log in again."""
    with fleet.client() as client:
        client.execute_command("ACL", "SETUSER", USER, "resetpass", ">another")  # type: ignore[no-untyped-call]
        _end_connections(fleet)
        fleet.hold(4.0)
        fleet.give_rights(client)


def rights(fleet: Fleet) -> None:
    """Rights are taken away one after another: to write, to read, all of them, the user itself."""
    with fleet.client() as client:
        for taken in (["-xadd"], ["-xread", "-xrange", "-xrevrange"], ["resetkeys"], ["-@all"], ["off"]):
            client.execute_command("ACL", "SETUSER", USER, *taken)  # type: ignore[no-untyped-call]
            fleet.hold(0.8)
        client.execute_command("ACL", "DELUSER", USER)  # type: ignore[no-untyped-call]
        fleet.hold(0.8)
        fleet.give_rights(client)


def clock_ahead(fleet: Fleet) -> None:
    """Ids of a day ahead: of a Redis whose clock was set back since."""
    with fleet.client() as client:
        for stream in fleet.streams:
            client.xadd(stream, {FIELD: b"junk"}, id=f"{int(time.time() * 1000) + _DAY_MS}-0")
    fleet.hold(2.0)


def clock_back(fleet: Fleet) -> None:
    """Ids of a day ahead are read, then a log begins anew with ids of now; and once more at the end of all ids."""
    with fleet.client() as client:
        for last in (f"{int(time.time() * 1000) + _DAY_MS}-0", f"{(1 << 64) - 1}-{(1 << 64) - 1}"):
            for stream in fleet.streams:
                client.delete(stream)
                client.xadd(stream, {FIELD: b"junk"}, id=last)
            fleet.hold(2.0)
            client.delete(*fleet.streams)
            fleet.hold(1.0)


def keys_of_another_kind(fleet: Fleet) -> None:
    """Each key of ours holds a string for a while."""
    with fleet.client() as client:
        for key in [*fleet.streams, "ssd:1:generations"]:
            client.set(key, "a string")
        fleet.hold(3.0)
        client.delete(*fleet.streams, "ssd:1:generations")


def logs_mixed_up(fleet: Fleet) -> None:
    """One tenant's log is copied under the other's name, as a restore that goes wrong does."""
    first, second = fleet.streams
    with fleet.client() as client:
        client.copy(first, second, replace=True)
        fleet.hold(3.0)
        client.delete(first, second)


def published_garbled(fleet: Fleet) -> None:
    """Published heads and chunks are torn, swapped between the tenants, made up and removed; logs are lost as well."""
    (first, first_chunks), (second, second_chunks) = fleet.published
    with fleet.client() as client:
        for head, chunks in fleet.published:
            for name in client.hkeys(chunks)[::2]:
                client.hset(chunks, name, fleet.chance.randbytes(1000))
            client.setrange(head, fleet.chance.randint(0, 200), fleet.chance.randbytes(20))
        client.delete(*fleet.streams)
        fleet.hold(3.0)
        if client.exists(first, first_chunks) == 2:
            client.copy(first, second, replace=True)
            client.copy(first_chunks, second_chunks, replace=True)
        client.delete(*fleet.streams)
        fleet.hold(3.0)
        client.set(first, bytes(1 << 20))
        client.set(second, fleet.chance.randbytes(5000))
        client.delete(first_chunks)
        client.set(second_chunks, "a string")
        fleet.hold(2.0)
        client.delete(*fleet.streams, first, second, second_chunks)


def _end_connections(fleet: Fleet) -> None:
    for member in fleet.members:
        member.proxy.cut()
