"""Test whether faults of servers, network or Redis change answers, fail requests, lose text or stop its sharing.

``python -m benchmarks.reliability --question faults [--servers N] [--rounds N] [--seed S] [--only NAME ...]``

Clients request answers of all kinds from real servers (bundled model, float32, durable caches), and compare each answer
with the answer without speculation. They also send notes, texts with a unique number. A note that was on disk before a
fault, or was answered before a regular shutdown, must be in the cache afterwards: once, and in its namespace only. This
is checked at the end, and before each fault that destroys a server's cache.

A fault is injected in each round. A single server (the default) is killed or shut down, its disk is full, or its files
are damaged. Several servers share one Redis, each through a proxy, and serve two tenants. Then the network and Redis
fail too, and every fourth round has one fault of each kind at once. After each round, a text from each server must be
drafted by all others within --patience seconds. A fault that has no effect ends the run.

Prints a table; the last line of stdout is one JSON object. The exit status is 1 if an answer was changed, a request
failed, a note was lost, stored twice or stored in a wrong namespace, a server ended by itself, sharing did not resume,
or no note was checked.
"""

from __future__ import annotations

import argparse
import http.client
import logging
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.reliability.clients import questions
from benchmarks.reliability.fleet import Fleet, Member, SkippedError
from benchmarks.reliability.proxy import NO_FAULT, LinkFault
from benchmarks.run import Option, Run
from ssd.bundled import MODEL_PATH
from ssd.replication.redis_stream import FIELD
from ssd.text.codec import TextCodec

SERVER, NETWORK, STORE = KINDS = ("server", "network", "store")


class Fault(NamedTuple):
    """A fault that can be injected into servers, the network or Redis.

    Attributes:
        kind: SERVER, NETWORK or STORE (Redis).
        title: The name in the documentation.
        inject: Injects the fault, and returns when the fault is over.
        needs_fleet: Whether the fault only matters to servers that share text.
    """

    kind: str
    title: str
    inject: Callable[[Fleet], None]
    needs_fleet: bool = False


FAULTS: dict[str, Fault] = {}
_CLOSE: Final = "orderly close"


def _fault(kind: str, title: str, *, needs_fleet: bool = False) -> Callable[[Any], Any]:
    def register(inject: Any) -> Any:
        FAULTS[inject.__name__.replace("_", "-")] = Fault(kind, title, inject, needs_fleet)
        return inject

    return register


def drawn(num_rounds: int, seed: int, only: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    """Choose the faults of each round at random: one fault, and in every fourth round one of each kind.

    Every fault is chosen once before any is chosen again. With ``only``, each round has one of these faults.
    """
    chance = random.Random(seed)
    names = {kind: [name for name, fault in FAULTS.items() if fault.kind == kind] for kind in KINDS}
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


# Faults of a server


@_fault(SERVER, "server killed (SIGKILL)")
def server_kill(fleet: Fleet) -> None:
    fleet.kill_server(fleet.one())


@_fault(SERVER, "server killed while it starts")
def server_kill_loading(fleet: Fleet) -> None:
    member = fleet.one()
    fleet.promise(member)
    member.kill()
    member.server.start(wait=False)
    time.sleep(fleet.chance.uniform(0.0, 6.0))
    member.kill()
    member.server.start()


@_fault(SERVER, "server killed while it shuts down")
def server_kill_closing(fleet: Fleet) -> None:
    member = fleet.one()
    fleet.promise(member)
    is_closed = member.server.terminate(kill_after_s=fleet.chance.uniform(0.0, 1.0))
    member.history.end_life(in_order=is_closed)
    member.server.start()


@_fault(SERVER, "server killed while Redis does not answer", needs_fleet=True)
def server_kill_unheard(fleet: Fleet) -> None:
    member = fleet.one()
    with _link_fault([member], LinkFault(is_silent=True)):
        fleet.hold(2.0)
        fleet.kill_server(member)


@_fault(SERVER, "server restarted regularly")
def server_restart(fleet: Fleet) -> None:
    member = fleet.one()
    member.close()
    member.server.start()


@_fault(SERVER, "server restarted with an empty cache directory", needs_fleet=True)
def server_anew(fleet: Fleet) -> None:
    """Restart a server with an empty cache directory, while replies of Redis are delayed and connections reset."""
    member = fleet.one()
    fleet.settle(member)
    with _link_fault([member], LinkFault(jitter_s=0.3)):
        member.begin_anew()
        for _ in range(5):
            fleet.hold(0.3)
            member.proxy.cut()


@_fault(SERVER, "disk full")
def disk_full(fleet: Fleet) -> None:
    if not fleet.has_small_disks:
        raise SkippedError("a small disk needs the right to mount a tmpfs")
    filler = fleet.one().directory / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    fleet.hold(4.0)
    filler.unlink()


_HEADER_BYTES = 256
_PATIENCE_S = 20.0


@_fault(SERVER, "cache files damaged")
def segment_damaged(fleet: Fleet) -> None:
    """Truncate segment files in use, or overwrite all but their headers; then restart the server without them."""
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
            file.seek(_HEADER_BYTES)
            file.write(fleet.chance.randbytes(size - _HEADER_BYTES)) if number % 2 else file.truncate(size // 2)
    fleet.hold(3.0)
    member.begin_anew()


# Faults of the network between servers and Redis; tests/test_sharing_*.py inject more of them into one cache

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
def _link_fault(members: Sequence[Member], fault: LinkFault) -> Iterator[None]:
    for member in members:
        member.proxy.fault = fault
    try:
        yield
    finally:
        for member in members:
            member.proxy.fault = NO_FAULT


def _hold_link_fault(fault: LinkFault, fleet: Fleet) -> None:
    with _link_fault(fleet.some(), fault):
        fleet.hold(5.0)


FAULTS |= {
    name: Fault(NETWORK, title, partial(_hold_link_fault, link))
    for name, title, link in (
        ("delay", "Redis connections slow by up to 2.7 s", LinkFault(delay_s=0.2, jitter_s=2.5)),
        ("half-open", "Redis connections silent", LinkFault(is_silent=True)),
        ("broken-off", "Redis answers truncated", LinkFault(is_broken_off=True)),
        ("flipped-bits", "bits flipped in Redis answers", LinkFault(flips=0.5)),
        ("trickle", "Redis answers sent byte by byte", LinkFault(trickle_s=0.02, sip_s=0.02)),
    )
}


@_fault(NETWORK, "Redis connections reset")
def resets(fleet: Fleet) -> None:
    members = fleet.some()
    for number in range(20):
        for member in members:
            member.proxy.cut(reset=number % 2 == 0)
        fleet.hold(0.1)
    with _link_fault(members, LinkFault(refuses=True)):
        fleet.hold(2.0)


@_fault(NETWORK, "Redis answers replaced by random or oversized data")
def wrong_answers(fleet: Fleet) -> None:
    answers = [fleet.chance.randbytes(fleet.chance.randint(1, 4000)) for _ in range(5)]
    answers += [*fleet.chance.sample(WRONG_ANSWERS, 10), *fleet.chance.sample(OVERSIZED_ANSWERS, 5)]
    extras = [LinkFault(extra=extra) for extra in (b"+OK\r\n", b"*0\r\n", b":1\r\n", b"*-1\r\n")]
    for fault in (*(LinkFault(answer=answer) for answer in answers), *extras):
        with _link_fault(fleet.some(), fault):
            time.sleep(0.3)


# Faults of Redis


@_fault(STORE, "Redis paused")
def redis_stop(fleet: Fleet) -> None:
    fleet.redis.signal(signal.SIGSTOP)
    fleet.hold(4.0)
    fleet.redis.signal(signal.SIGCONT)


@_fault(STORE, "Redis emptied")
def redis_flushall(fleet: Fleet) -> None:
    with fleet.client() as client:
        for _ in range(4):
            client.flushall()
            fleet.hold(0.7)


def _restart_redis(is_empty: bool, fleet: Fleet) -> None:
    fleet.redis.kill()
    fleet.hold(3.0)
    fleet.restart_redis(is_empty=is_empty)


def _reach_max_memory(policy: str, fleet: Fleet) -> None:
    with fleet.client() as client:
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", 1)
        fleet.hold(4.0)
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")


FAULTS |= {
    "redis-kill": Fault(STORE, "Redis killed, restarted with its data", partial(_restart_redis, False)),
    "redis-kill-and-lose": Fault(STORE, "Redis killed, restarted without its data", partial(_restart_redis, True)),
    "redis-full": Fault(STORE, "Redis out of memory", partial(_reach_max_memory, "noeviction")),
    "redis-evicting": Fault(STORE, "Redis evicts keys", partial(_reach_max_memory, "allkeys-random")),
}


@_fault(STORE, "stream of one tenant copied to another tenant's name")
def logs_mixed_up(fleet: Fleet) -> None:
    first, second = fleet.streams
    with fleet.client() as client:
        if not client.copy(first, second, replace=True):
            raise AssertionError("no log was there to be copied")
        fleet.hold(3.0)
        client.delete(first, second)


@_fault(STORE, "invalid entries in the streams")
def log_junk(fleet: Fleet) -> None:
    """Add invalid entries of many kinds to the Redis streams, among them entries of 96 MB."""
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
            client.xtrim(stream, maxlen=0, approximate=False)  # frees the memory


# The rounds

OUTCOMES: Final = ("right", "cancelled", "noted", "refused", "interrupted")
PROBLEMS: Final = ("failed", "changed", "died", "lost", "twice", "elsewhere", "deaf")
"""The kinds of problems, in this order: a request failed; an answer changed; a server ended by itself; a stored test
text was lost, was found twice, or was found in a wrong namespace; a text did not reach all servers in time after a
fault."""
_NUM_QUESTIONS: Final = 27
_LOG_CHARACTERS: Final = 8000
OPTIONS: dict[str, Any] = {
    "servers": 1,
    "rounds": Option(default=18, help="number of rounds, each with one fault or one of each kind"),
    "seed": 0,
    "only": Option(default=None, several=True, choices=tuple(FAULTS), metavar="NAME", help="inject only these faults"),
    "clients": Option(default=2, help="number of clients per tenant and server"),
    "tokens": Option(default=32, help="maximum number of tokens per answer"),
    "calm": Option(default=1.5, help="seconds without a fault before and after each fault"),
    "patience": Option(default=30.0, help="seconds within which servers must share text again after a fault"),
}
COLUMNS = (
    ("fault", "{faults}{skipped}"),
    (">rounds", "{rounds}"),
    (">correct answers", "{right:,}"),
    (">answers interrupted by a killed server", "{interrupted:,}"),
    (">stored texts checked", "{promised:,}"),
    (">replication restored after, s", "{sharing_back_s:.1f}"),
    ("wrong", "{wrong}"),
)
NOTE = (
    "`python -m benchmarks.reliability --question faults` ran on {date} on {environment[cpu]} with "
    "{environment[cores]} cores. Clients sent requests while the faults were injected, and every answer was compared "
    "with the answer without speculation. {right:,} answers were correct, {changed} were wrong and {failed} failed. "
    "{interrupted:,} answers were interrupted because their server was killed. Of {promised:,} texts that were on disk "
    "before a fault or were accepted before a regular shutdown, {lost} were lost, {twice} were stored twice, and "
    "{elsewhere} were in another namespace. A dash means that stored texts were not counted after this fault."
)


def shown_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a result with descriptions of the faults; rounds with the same faults become one row."""
    titles = {name: fault.title for name, fault in FAULTS.items()}
    titles[_CLOSE] = "regular shutdown of all servers at the end"
    merged: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        found = merged.setdefault(row["faults"], {**row, "rounds": 0, "right": 0, "interrupted": 0, "promised": None})
        found["rounds"] += 1
        found["right"] += row["right"]
        found["interrupted"] += row["interrupted"]
        if row["promised"] is not None:
            found["promised"] = (found["promised"] or 0) + row["promised"]
        if row["sharing_back_s"] is not None:
            found["sharing_back_s"] = max(found["sharing_back_s"] or 0.0, row["sharing_back_s"])
    order = list(titles)
    names = sorted(merged, key=lambda name: (name.count("+"), order.index(name.split(" + ")[0])))
    return [{**merged[name], "faults": "; ".join(titles[fault] for fault in name.split(" + "))} for name in names]


def play(fleet: Fleet, faults: Sequence[str], args: argparse.Namespace, seed: str) -> tuple[dict[str, Any], list[str]]:
    """Inject the faults of one round concurrently while clients send requests; return its row and its problems.

    Without faults, shut down all servers and check that the expected notes (numbered test texts) are on disk.
    """
    began, before, counts, reasons = time.monotonic(), fleet.counts, Counter[str](), list[str]()
    skipped, sharing_s = "", None
    if not faults:
        for member in fleet.members:
            fleet.close(member)
    else:
        with ExitStack() as stack:
            for number, load in enumerate(fleet.loads):
                stack.enter_context(load.running(args.clients, seed=f"{seed}-{number}"))
            fleet.hold(args.calm)
            with ThreadPoolExecutor(len(faults)) as lanes:
                for lane in [lanes.submit(FAULTS[name].inject, fleet) for name in faults]:
                    try:
                        lane.result()
                    except SkippedError as reason:
                        skipped = f" skipped: {reason}"
            for member in fleet.members:
                member.revive()
            fleet.hold(args.calm)
        if len(fleet.members) > 1:
            try:
                sharing_s = fleet.sharing_returns(args.patience)
            except (OSError, http.client.HTTPException, ValueError) as error:
                counts["failed"] += 1
                reasons.append(f"a probe: {type(error).__name__}: {error}"[:200])
            counts["deaf"] += sharing_s is None
    counts += fleet.counts - before
    for member in fleet.members:
        counts["died"] += member.server.num_deaths
        member.server.num_deaths = 0
    for place, verdict in fleet.verdicts:
        for name in ("lost", "twice", "elsewhere"):
            notes = getattr(verdict, name)
            counts[name] += len(notes)
            reasons += [f"{place}: {name}: notes {notes[:10]}"] if notes else []
    promised = sum(verdict.num_promised for _, verdict in fleet.verdicts) if fleet.verdicts else None
    fleet.verdicts.clear()
    for load in fleet.loads:
        reasons += load.failures
        load.failures.clear()
    return {
        "faults": " + ".join(faults) or _CLOSE,
        **{name: counts[name] for name in (*OUTCOMES, *PROBLEMS)},
        "wrong": "; ".join(f"{counts[name]} {name}" for name in PROBLEMS if counts[name]) or "nothing",
        "promised": promised,
        "sharing_back_s": None if sharing_s is None else round(sharing_s, 2),
        "seconds": round(time.monotonic() - began, 1),
        "skipped": skipped,
    }, reasons


def main(argv: Sequence[str] | None = None) -> int:
    program, under = "reliability --question faults", ("ssd", "server")
    run = Run("faults", __doc__, argv, OPTIONS, COLUMNS, unsaid=("only",), program=program, under=under)
    args = run.args
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # the proxies' connections are meant to fail
    codec = TextCodec.load(str(MODEL_PATH))
    with (
        tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as home,
        Fleet(Path(home), codec, args.servers, random.Random(args.seed)) as fleet,
    ):
        expected = questions(fleet.members[0].server, _NUM_QUESTIONS, args.tokens, fleet.keys[0])
        run.say(f"{len(expected)} questions answered without speculation")
        for load in fleet.loads:
            load.questions = expected
        only = args.only
        if args.servers == 1:
            only = only or [name for name, fault in FAULTS.items() if fault.kind == SERVER and not fault.needs_fleet]
        for number, faults in enumerate([*drawn(args.rounds, args.seed, only), ()]):
            row, reasons = play(fleet, faults, args, f"{args.seed}-{number}")
            run.row(row)
            for reason in reasons[:5]:
                print(f"    {reason}", file=sys.stderr)
            for member in fleet.members:
                log = member.server.new_log()
                if row["failed"] or row["died"]:
                    print(f"log of {member.directory.name}:\n{log[-_LOG_CHARACTERS:]}", file=sys.stderr)
    sums = {name: sum(row[name] or 0 for row in run.rows) for name in (*OUTCOMES, *PROBLEMS, "promised")}
    if not sums["promised"]:
        run.say("nothing was promised, so that nothing was verified on disk")
    return run.end(**sums, is_wrong=not sums["promised"] or any(sums[name] for name in PROBLEMS))
