"""Does any fault change an answer, fail a request, lose what was acknowledged or end sharing?

``python -m benchmarks.faults [--servers N] [--rounds N] [--seed S] [--only NAME ...]``

Real servers (bundled model, float32) with durable caches, and clients that ask for answers of every kind, whole and
streamed, leave some of them early and verify each against one that the engine gave before without speculation.
Beside their questions they send *notes*, texts with a number. Every note that was on disk before a fault, or was
acknowledged before an orderly close, must afterwards be in the cache once, and none in another namespace.

- One server (the default): each round a new one and one fault, then one to three at random (--combinations). Processes
  are killed and stopped, disks are full or refuse writes, files are changed under it, requests want too much.
- More: they share through one Redis, a proxy before each, asked by two tenants. Each round something fails: the network
  (late, cut, half open, garbled, slow), Redis (paused, emptied, killed, failed over, full, without rights, with another
  clock), a server, or one of each at once. Then a text that each server learns must be drafted by all others within
  --patience seconds.

Prints a table; the last line of stdout is one JSON object. Exit status 1 if anything was changed, failed, lost, there
twice or elsewhere, if a server ended by itself or sharing did not come back.
"""

from __future__ import annotations

import argparse
import http.client
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.faults import local, remote
from benchmarks.faults.fleet import Fault, Fleet, SkippedError
from benchmarks.load import Question, questions
from benchmarks.run import Option, Run
from ssd.bundled import MODEL_PATH
from ssd.text.codec import TextCodec

OUTCOMES: Final = ("right", "cancelled", "noted", "refused", "interrupted")
PROBLEMS: Final = ("failed", "changed", "died", "lost", "twice", "elsewhere", "deaf")
"""A request failed; an answer changed; a server ended by itself; a promised note is gone, is there twice, or lies in
another namespace; a text did not reach all servers in time after the fault."""
_QUESTIONS: Final = 27
NAMES: Final = tuple(fault.name for fault in (*local.FAULTS, *remote.FAULTS))

OPTIONS: dict[str, Any] = {
    "servers": 1,
    "rounds": Option(default=None, kind=int, help="one server: of each fault (default: 1); more: in all (default: 20)"),
    "combinations": Option(default=4, least=0, help="rounds of one to three faults, of one server"),
    "seed": 0,
    "only": Option(default=None, several=True, choices=NAMES, metavar="NAME", help="of these faults"),
    "clients": Option(default=None, kind=int, help="of each tenant at each server (default: 4 of one server, else 1)"),
    "tokens": Option(default=32, help="of each answer"),
    "calm": Option(default=1.5, help="seconds before and after a fault"),
    "patience": Option(default=30.0, help="seconds within which sharing must be back"),
}
COLUMNS = (
    ("faults", "{faults}{skipped}"),
    *((f">{name}", f"{{{name}:,}}") for name in ("right", "interrupted", "promised")),
    (">sharing back after, s", "{sharing_back_s:.1f}"),
    ("wrong", "{wrong}"),
)
NOTE = (
    "`python -m benchmarks.faults` on {date}: real servers of the bundled model under clients, {environment[cpu]}, "
    "{environment[cores]} cores, seed {parameters[seed]}; of several each has a proxy before one Redis and two tenants "
    "ask. All: {right:,} answers right, {interrupted:,} interrupted because the server was killed meanwhile, {failed} "
    "failed, {changed} not what the same model says without speculation; of {promised:,} notes (texts that were "
    "acknowledged) {lost} were lost, {twice} there twice, {elsewhere} in another namespace. Deaf: what a server "
    "learned was not drafted by all within 30 s."
)


class Row:
    """What came of the rounds of one fault, or of one combination of faults."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self.name = " + ".join(fault.name for fault in faults) or "orderly close"
        self.num_rounds = self.num_promised = 0
        self.counts: Counter[str] = Counter()
        self.sharing_s: float | None = None
        """Seconds until a text learned by each server was drafted by all others, the longest."""
        self.memory_mib = 0.0
        self.reasons: list[str] = []
        self.skipped = ""
        self._began = time.monotonic()

    def play(self, fleet: Fleet, faults: Sequence[Fault], args: argparse.Namespace, seed: str) -> None:
        """One round: faults of one server one after another, of several at once."""
        is_alone, before = len(fleet.members) == 1, fleet.counts
        with ExitStack() as stack:
            for number, load in enumerate(fleet.loads):
                stack.enter_context(load.running(args.clients, seed=f"{seed}-{number}"))
            fleet.hold(args.calm)
            for group in [[fault] for fault in faults] if is_alone else [faults]:
                with ThreadPoolExecutor(len(group)) as lanes:
                    for lane in [lanes.submit(fault.inject, fleet) for fault in group]:
                        lane.result()
                for member in fleet.members:
                    member.revive()
                fleet.hold(args.calm)
        self.num_rounds += 1
        if not is_alone:
            try:
                self.sharing_s = fleet.sharing_returns(args.patience)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.counts["failed"] += 1
                self.reasons.append(f"a probe: {type(error).__name__}: {error}"[:200])
            self.counts["deaf"] += self.sharing_s is None
        self.counts += fleet.counts - before
        for member in fleet.members:
            self.counts["died"] += member.server.num_deaths
            member.server.num_deaths = 0
            self.memory_mib = max(self.memory_mib, member.server.memory_mib())
        for load in fleet.loads:
            self.reasons += load.failures
            load.failures.clear()

    def check(self, fleet: Fleet) -> None:
        """All servers are closed in order; what lies on their disks is added."""
        found, num_promised, reasons = fleet.check()
        self.counts += found
        self.num_promised += num_promised
        self.reasons += reasons

    def facts(self) -> dict[str, Any]:
        """As it stands in the result."""
        return {
            "faults": self.name,
            "rounds": self.num_rounds,
            **{name: self.counts[name] for name in (*OUTCOMES, *PROBLEMS)},
            "wrong": "; ".join(f"{self.counts[name]} {name}" for name in PROBLEMS if self.counts[name]) or "nothing",
            "promised": self.num_promised,
            "sharing_back_s": None if self.sharing_s is None else round(self.sharing_s, 2),
            "memory_mib": round(self.memory_mib),
            "seconds": round(time.monotonic() - self._began, 1),
            "skipped": f" skipped: {self.skipped}" if self.skipped else "",
        }


@contextmanager
def _fleet(codec: TextCodec, questions: Sequence[Question], size: int, seed: str, **more: bool) -> Iterator[Fleet]:
    with (
        tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as home,
        Fleet(Path(home), codec, questions, size, random.Random(seed), **more) as fleet,
    ):
        yield fleet


def _of_one(codec: TextCodec, questions: Sequence[Question], args: argparse.Namespace) -> Iterator[Row]:
    chance = random.Random(args.seed)
    combinable = [fault for fault in local.FAULTS if not fault.is_alone]
    drawn = [chance.sample(combinable, chance.randint(1, 3)) for _ in range(args.combinations)]
    alone = [[fault] for fault in local.FAULTS if args.only is None or fault.name in args.only]
    for faults, rounds in [*((faults, args.rounds) for faults in alone), *((faults, 1) for faults in drawn)]:
        row = Row(faults)
        for number in range(rounds):
            seed, is_small = f"{args.seed}-{row.name}-{number}", any(fault.needs_small_disk for fault in faults)
            try:
                with _fleet(codec, questions, 1, seed, has_small_disk=is_small) as fleet:
                    row.play(fleet, faults, args, seed)
                    fleet.promise(fleet.members[0])
                    row.check(fleet)
            except SkippedError as reason:
                row.skipped = str(reason)
                break
        yield row


def _of_several(codec: TextCodec, questions: Sequence[Question], args: argparse.Namespace) -> Iterator[Row]:
    with _fleet(codec, questions, args.servers, str(args.seed)) as fleet:
        for number, faults in enumerate(remote.drawn(args.rounds, args.seed, args.only)):
            row = Row(faults)
            row.play(fleet, faults, args, f"{args.seed}-{number}")
            yield row
        row = Row()
        row.check(fleet)
        yield row


def main(argv: Sequence[str] | None = None) -> int:
    """Inject, verify, print. Returns the exit status."""
    run = Run("faults", __doc__, argv, OPTIONS, COLUMNS, unsaid=("only", "patience"), under=("ssd", "server"))
    args, is_alone = run.args, run.args.servers == 1
    args.rounds, args.clients = args.rounds or (1 if is_alone else 20), args.clients or (4 if is_alone else 1)
    run.parameters |= {"rounds": args.rounds, "clients": args.clients}
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of the proxies, which are meant to be in trouble
    codec, asked = TextCodec.load(str(MODEL_PATH)), questions(_QUESTIONS, args.tokens)
    run.say(f"{len(asked)} questions answered without speculation")
    for row in (_of_one if is_alone else _of_several)(codec, asked, args):
        run.row(row.facts())
        for reason in row.reasons[:5]:
            run.say(f"    {reason}")
    sums = {name: sum(row[name] for row in run.rows) for name in (*OUTCOMES, *PROBLEMS, "promised")}
    return run.end(**sums, is_wrong=any(sums[name] for name in PROBLEMS))


if __name__ == "__main__":
    sys.exit(main())
