"""The faults: of the network between servers and Redis, of Redis and who administers it, of servers; rounds of them."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from benchmarks.faults.fleet import USER, Fault, Fleet, Member
from benchmarks.faults.proxy import CLEAR, Weather
from ssd.sharing.stream import FIELD

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


def _under(weather: Weather, seconds: float = 5.0) -> Callable[[Fleet], None]:
    """Some servers have this weather for a while."""

    def inject(fleet: Fleet) -> None:
        with _weather(fleet.some(), weather):
            fleet.hold(seconds)

    return inject


def delay(fleet: Fleet) -> None:
    """A fixed delay, from small to longer than a client waits."""
    _under(Weather(delay_s=fleet.chance.choice((0.02, 0.2, 0.6, 2.5))))(fleet)


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


def _answers(fleet: Fleet, answers: Sequence[bytes]) -> None:
    for answer in answers:
        with _weather(fleet.some(), Weather(answer=answer)):
            time.sleep(0.3)


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


def full(fleet: Fleet, policy: str = "noeviction") -> None:
    """maxmemory is reached, and nothing may be evicted: no write is taken."""
    with fleet.client() as client:
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", 1)
        fleet.hold(4.0)
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")


def evicting(fleet: Fleet) -> None:
    """maxmemory is reached, and our keys are evicted all the time."""
    full(fleet, "allkeys-random")


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


def junk(fleet: Fleet) -> None:
    """Entries that are none, of many kinds."""
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
    fleet.hold(1.0)


def huge_values(fleet: Fleet) -> None:
    """Six values of 96 MB."""
    with fleet.client() as client:
        for _ in range(3):
            for stream in fleet.streams:
                client.xadd(stream, {FIELD: bytes(96 << 20)})
        fleet.hold(2.0)
        for stream in fleet.streams:
            client.xtrim(stream, maxlen=0, approximate=False)  # gives the memory back


def _end_connections(fleet: Fleet) -> None:
    for member in fleet.members:
        member.proxy.cut()


def restart(fleet: Fleet) -> None:
    """One server is closed in order and comes back with its directory."""
    member = fleet.chance.choice(fleet.members)
    with member.outage():
        member.close()
        member.server.start()


def anew(fleet: Fleet) -> None:
    """One server is closed and comes back with nothing, while what it asks Redis for is late and cut off."""
    member = fleet.chance.choice(fleet.members)
    with member.outage():
        member.close()
        member.history.lose_all()
        shutil.rmtree(member.directory)
        member.proxy.weather = Weather(jitter_s=0.3)
        member.server.start()
    for _ in range(5):
        fleet.hold(0.3)
        member.proxy.cut()
    member.proxy.weather = CLEAR


def kill_unheard(fleet: Fleet) -> None:
    """kill -9 of a server that Redis answers nothing, which comes back while it still does not."""
    member = fleet.chance.choice(fleet.members)
    member.proxy.weather = Weather(is_silent=True)
    fleet.hold(2.0)
    fleet.kill_server(member)
    member.proxy.weather = CLEAR


NETWORK: Final = (
    Fault("delay", delay),
    Fault("jitter", _under(Weather(jitter_s=1.5))),
    Fault("resets", resets),
    Fault("ends", ends),
    Fault("half-open", _under(Weather(is_silent=True))),
    Fault("broken-off", _under(Weather(is_broken_off=True))),
    Fault("flipped-bits", _under(Weather(flips=0.5), 6.0)),
    Fault("random-bytes", random_bytes),
    Fault("wrong-answers", wrong_answers),
    Fault("oversized-answers", oversized_answers),
    Fault("shifted-answers", shifted_answers),
    Fault("trickle", _under(Weather(trickle_s=0.02), 6.0)),
    Fault("sip", _under(Weather(sip_s=0.02), 6.0)),
)
STORE: Final = (
    Fault("pause", pause),
    Fault("stop", stop),
    Fault("flushall", flushall),
    Fault("redis-kill", kill),
    Fault("redis-kill-and-lose", kill_and_lose),
    Fault("failover", failover),
    Fault("failover-after-kill", failover_after_kill),
    Fault("failover-to-the-past", failover_to_the_past),
    Fault("full", full),
    Fault("evicting", evicting),
    Fault("password", password),
    Fault("rights", rights),
    Fault("clock-ahead", clock_ahead),
    Fault("clock-back", clock_back),
    Fault("keys-of-another-kind", keys_of_another_kind),
    Fault("logs-mixed-up", logs_mixed_up),
    Fault("log-junk", junk),
    Fault("log-huge-values", huge_values),
)
MEMBERS: Final = (
    Fault("server-kill", lambda fleet: fleet.kill_server(fleet.chance.choice(fleet.members))),
    Fault("server-restart", restart),
    Fault("server-anew", anew),
    Fault("server-kill-unheard", kill_unheard),
)
FAULTS: Final = (*NETWORK, *STORE, *MEMBERS)


def drawn(num_rounds: int, seed: int, only: Sequence[str] | None = None) -> list[tuple[Fault, ...]]:
    """What happens in each round: mostly one fault, in every fourth one of each kind at once.

    All are drawn before any comes again, in an order that the seed says. ``only`` : of these names, one a round.
    """
    chance = random.Random(seed)
    everything = [fault for fault in FAULTS if only is None or fault.name in only]
    rounds: list[tuple[Fault, ...]] = []
    waiting: list[Fault] = []
    for number in range(num_rounds):
        if only is None and number % 4 == 3:
            rounds.append(tuple(chance.choice(kind) for kind in (NETWORK, STORE, MEMBERS)))
            continue
        waiting = waiting or chance.sample(everything, len(everything))
        rounds.append((waiting.pop(),))
    return rounds
