"""Does any fault change an answer, fail a request, lose what was acknowledged or end sharing?

``python -m benchmarks.faults [--servers N] [--rounds N] [--seed S] [--only NAME ...]``

Real servers (bundled model, float32) with durable caches, and clients that ask for answers of every kind, whole and
streamed, leave some of them early and verify each against one that a server gave before without speculation.
Beside their questions they send *notes*, texts with a number. A note that was on disk before a fault, or was
acknowledged before an orderly close, is promised: it must afterwards be in the cache once, and none in another
namespace. That is verified at the end, and before each fault that no note of a server outlives.

Each round something fails. Of one server (the default): it is killed or closed, its disk is full, files are changed
under it. More share through one Redis, a proxy before each, asked by two tenants; there also the network (late, cut,
half open, garbled, slow) and Redis (paused, emptied, killed, full, its logs mixed up or full of junk), in every fourth
round one of each kind at once. Then a text that each server learns must be drafted by all others within --patience
seconds. A fault that finds nothing to hit ends the run.

Prints a table; the last line of stdout is one JSON object. Exit status 1 if anything was changed, failed, lost, there
twice or elsewhere, if a server ended by itself, sharing did not come back or nothing was promised.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.faults.fleet import Fleet, SkippedError
from benchmarks.faults.injected import AMONG_OTHERS, FAULTS, KINDS, SERVER, drawn
from benchmarks.load import questions
from benchmarks.run import Option, Run
from ssd.bundled import MODEL_PATH
from ssd.text.codec import TextCodec

OUTCOMES: Final = ("right", "cancelled", "noted", "refused", "interrupted")
PROBLEMS: Final = ("failed", "changed", "died", "lost", "twice", "elsewhere", "deaf")
"""A request failed; an answer changed; a server ended by itself; a promised note is gone, is there twice, or lies in
another namespace; a text did not reach all servers in time after the fault."""
_QUESTIONS: Final = 27
_LOG_CHARACTERS: Final = 8000  # of each server, where a request failed
OPTIONS: dict[str, Any] = {
    "servers": 1,
    "rounds": Option(default=18, help="of one fault, or of one of each kind"),
    "seed": 0,
    "only": Option(default=None, several=True, choices=tuple(FAULTS), metavar="NAME", help="of these faults"),
    "clients": Option(default=2, help="of each tenant at each server"),
    "tokens": Option(default=32, help="of each answer"),
    "calm": Option(default=1.5, help="seconds before and after a fault"),
    "patience": Option(default=30.0, help="seconds within which sharing must be back"),
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
    "`python -m benchmarks.faults` ran on {date} on {environment[cpu]} with {environment[cores]} cores. Clients sent "
    "requests while the faults were injected, and every answer was compared with the answer without speculation. "
    "{right:,} answers were correct, {changed} were wrong and {failed} failed. {interrupted:,} answers were "
    "interrupted because their server was killed. Of {promised:,} texts that were on disk before a fault or were "
    "accepted before a regular shutdown, {lost} were lost, {twice} were stored twice, and {elsewhere} were in another "
    "namespace. A dash means that stored texts were not counted after this fault."
)
DESCRIPTIONS: Final = {
    "server-kill": "server killed (SIGKILL)",
    "server-kill-loading": "server killed while it starts",
    "server-kill-closing": "server killed while it shuts down",
    "server-kill-unheard": "server killed while Redis does not answer",
    "server-restart": "server restarted regularly",
    "server-anew": "server restarted with an empty cache directory",
    "disk-full": "disk full",
    "segment-damaged": "cache files damaged",
    "delay": "Redis connections slow by up to 2.7 s",
    "half-open": "Redis connections silent",
    "broken-off": "Redis answers truncated",
    "flipped-bits": "bits flipped in Redis answers",
    "trickle": "Redis answers sent byte by byte",
    "resets": "Redis connections reset",
    "wrong-answers": "Redis answers replaced by random or oversized data",
    "redis-stop": "Redis paused",
    "redis-flushall": "Redis emptied",
    "redis-kill": "Redis killed, restarted with its data",
    "redis-kill-and-lose": "Redis killed, restarted without its data",
    "redis-full": "Redis out of memory",
    "redis-evicting": "Redis evicts keys",
    "logs-mixed-up": "stream of one tenant copied to another tenant's name",
    "log-junk": "invalid entries in the streams",
    "orderly close": "regular shutdown of all servers at the end",
}
"""The faults as the documentation names them."""


def shown_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a result with descriptions of the faults. Rounds with the same faults are added up."""
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
    order = list(DESCRIPTIONS)
    names = sorted(merged, key=lambda name: (name.count("+"), order.index(name.split(" + ")[0])))
    return [{**merged[name], "faults": "; ".join(DESCRIPTIONS[fault] for fault in name.split(" + "))} for name in names]


class Row:
    """What came of one round."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.name = " + ".join(faults) or "orderly close"
        self.num_promised: int | None = None  # where it is not looked
        self.counts: Counter[str] = Counter()
        self.sharing_s: float | None = None
        """Seconds until a text learned by each server was drafted by all others, the longest."""
        self.reasons: list[str] = []
        self.skipped = ""
        self._faults = faults
        self._began = time.monotonic()

    def play(self, fleet: Fleet, args: argparse.Namespace, seed: str) -> None:
        """All faults of the round at once, while clients ask."""
        before = fleet.counts
        with ExitStack() as stack:
            for number, load in enumerate(fleet.loads):
                stack.enter_context(load.running(args.clients, seed=f"{seed}-{number}"))
            fleet.hold(args.calm)
            with ThreadPoolExecutor(len(self._faults)) as lanes:
                for lane in [lanes.submit(FAULTS[name][1], fleet) for name in self._faults]:
                    try:
                        lane.result()
                    except SkippedError as reason:
                        self.skipped = f" skipped: {reason}"
            for member in fleet.members:
                member.revive()
            fleet.hold(args.calm)
        if len(fleet.members) > 1:
            try:
                self.sharing_s = fleet.sharing_returns(args.patience)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.counts["failed"] += 1
                self.reasons.append(f"a probe: {type(error).__name__}: {error}"[:200])
            self.counts["deaf"] += self.sharing_s is None
        self.counts += fleet.counts - before
        self._take(fleet)
        for load in fleet.loads:
            self.reasons += load.failures
            load.failures.clear()

    def check(self, fleet: Fleet) -> None:
        """All servers are closed in order; what lies on their disks is added."""
        fleet.close_all()
        self._take(fleet)

    def _take(self, fleet: Fleet) -> None:
        """Deaths, and verdicts on directories."""
        for member in fleet.members:
            self.counts["died"] += member.server.num_deaths
            member.server.num_deaths = 0
        for place, verdict in fleet.verdicts:
            self.num_promised = (self.num_promised or 0) + verdict.num_promised
            for name, notes in (("lost", verdict.lost), ("twice", verdict.twice), ("elsewhere", verdict.elsewhere)):
                self.counts[name] += len(notes)
                self.reasons += [f"{place}: {name}: notes {notes[:10]}"] if notes else []
        fleet.verdicts.clear()

    def facts(self) -> dict[str, Any]:
        """As it stands in the result."""
        return {
            "faults": self.name,
            **{name: self.counts[name] for name in (*OUTCOMES, *PROBLEMS)},
            "wrong": "; ".join(f"{self.counts[name]} {name}" for name in PROBLEMS if self.counts[name]) or "nothing",
            "promised": self.num_promised,
            "sharing_back_s": None if self.sharing_s is None else round(self.sharing_s, 2),
            "seconds": round(time.monotonic() - self._began, 1),
            "skipped": self.skipped,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Inject, verify, print. Returns the exit status."""
    under = ("benchmarks/history.py", "benchmarks/load.py", "ssd", "server")
    run = Run("faults", __doc__, argv, OPTIONS, COLUMNS, unsaid=("only",), under=under)
    args = run.args
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of the proxies, which are meant to be in trouble
    codec = TextCodec.load(str(MODEL_PATH))
    with (
        tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as home,
        Fleet(Path(home), codec, args.servers, random.Random(args.seed)) as fleet,
    ):
        asked = questions(fleet.members[0].server, _QUESTIONS, args.tokens, fleet.keys[0])
        run.say(f"{len(asked)} questions answered without speculation")
        for load in fleet.loads:
            load.questions = asked
        only = args.only
        if args.servers == 1:
            only = only or [name for name, (kind, _) in FAULTS.items() if kind == SERVER and name not in AMONG_OTHERS]
        rounds = drawn(args.rounds, args.seed, KINDS, only)
        for number, faults in enumerate([*rounds, ()]):
            row = Row(faults)
            if faults:
                row.play(fleet, args, f"{args.seed}-{number}")
            else:
                row.check(fleet)
            run.row(row.facts())
            for reason in row.reasons[:5]:
                run.say(f"    {reason}")
            for member in fleet.members:
                log = member.server.new_log()
                if row.counts["failed"] or row.counts["died"]:
                    run.say(f"log of {member.directory.name}:\n{log[-_LOG_CHARACTERS:]}")
    sums = {name: sum(row[name] or 0 for row in run.rows) for name in (*OUTCOMES, *PROBLEMS, "promised")}
    if not sums["promised"]:
        run.say("nothing was promised, so that nothing was verified on disk")
    return run.end(**sums, is_wrong=not sums["promised"] or any(sums[name] for name in PROBLEMS))


if __name__ == "__main__":
    sys.exit(main())
