"""Does anything that happens between servers and the Redis they share change an answer or what they know?

``python -m benchmarks.fleet_faults [--servers N] [--rounds N] [--seed S] [--only NAME ...]``

Several real servers (bundled model, float32), each with a durable cache and a proxy of its own before one real Redis,
are asked by two tenants: completions and streams, greedy and with seeds, whose answers were computed before without
speculation, and notes, texts with a number. Each round something fails, in an order that the seed says: the network
between them (late, cut, half open, garbled, slow), Redis (paused, emptied, killed, failed over, full, without rights,
with another clock), a server, or one of each at once. After each round a text that each server learns must be drafted
by all others within 30 s, or --patience, for both tenants. At the end all servers are closed in order, and every note
that was promised must be in its server's directory, none twice and none in the other tenant's.

Prints a table; the last line of stdout is one JSON object. Exit status 1 if anything failed, changed, was lost, twice
or elsewhere, if a server ended by itself or sharing did not come back.
"""

from __future__ import annotations

import http.client
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.faults.__main__ import reference
from benchmarks.fleet_faults.faults import NAMES, Fault, drawn
from benchmarks.fleet_faults.fleet import Fleet
from benchmarks.run import Option, Run
from ssd.bundled import MODEL_PATH
from ssd.text.codec import TextCodec

OUTCOMES: Final = ("right", "cancelled", "noted", "interrupted")
PROBLEMS: Final = ("failed", "changed", "died", "lost", "twice", "elsewhere", "deaf")
"""A request failed; an answer changed; a server ended by itself; a promised note is gone from its server, is twice in
one, or lies in another tenant's cache; a text did not reach all servers in time after the fault."""


@dataclass(slots=True)
class Row:
    """What came of one round."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    sharing_s: float | None = None
    """Seconds until a text learned by each server was drafted by all others, the longest."""
    memory_mib: float = 0.0
    """Of the largest server."""
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)

    @property
    def num_problems(self) -> int:
        """0 where all is well."""
        return sum(self.counts[name] for name in PROBLEMS)


def play(fleet: Fleet, faults: Sequence[Fault], *, num_clients: int, calm_s: float, return_s: float, seed: str) -> Row:
    """One round. ``num_clients`` : of each tenant at each server. ``return_s`` : after which sharing must be back."""
    row, begin, before = Row(" + ".join(fault.name for fault in faults)), time.monotonic(), fleet.counts
    with ExitStack() as stack:
        for number, load in enumerate(fleet.loads):
            stack.enter_context(load.running(num_clients, seed=f"{seed}-{number}"))
        fleet.hold(calm_s)
        with ThreadPoolExecutor(len(faults)) as lanes:
            for lane in [lanes.submit(fault.inject, fleet) for fault in faults]:
                lane.result()
        row.counts["died"] += sum(member.server.revive() for member in fleet.members)
        fleet.hold(calm_s)
    try:
        row.sharing_s = fleet.sharing_returns(return_s)
    except (OSError, http.client.HTTPException, ValueError) as error:
        row.counts["failed"] += 1
        row.reasons.append(f"a probe: {type(error).__name__}: {error}"[:200])
    row.counts["deaf"] += row.sharing_s is None
    row.counts += fleet.counts - before
    row.memory_mib = max(member.server.memory_mib() for member in fleet.members)
    row.seconds = time.monotonic() - begin
    for load in fleet.loads:
        row.reasons += load.failures
        load.failures.clear()
    return row


def close(fleet: Fleet) -> tuple[Row, int]:
    """Ends the servers in order and reads all their directories. Returns what was found and the notes promised."""
    row, num_promised, begin = Row("orderly close"), 0, time.monotonic()
    fleet.close_servers()
    for number, member in enumerate(fleet.members):
        verdict = member.history.check(fleet.notes_on_disk(member))
        num_promised += verdict.num_promised
        for name, notes in (("lost", verdict.lost), ("twice", verdict.twice), ("elsewhere", verdict.elsewhere)):
            row.counts[name] += len(notes)
            if notes:
                row.reasons.append(f"server {number}: {name}: notes {notes[:10]}")
    row.seconds = time.monotonic() - begin
    return row, num_promised


OPTIONS: dict[str, Any] = {
    "servers": 3,
    "rounds": 20,
    "seed": 0,
    "only": Option(default=None, several=True, choices=NAMES, metavar="NAME", help="of these faults, one a round"),
    "clients": Option(default=1, help="of each of two tenants at each server"),
    "tokens": Option(default=24, help="of each answer"),
    "calm": Option(default=1.0, help="seconds before and after a fault"),
    "patience": Option(default=30.0, help="seconds within which sharing must be back"),
}
COLUMNS = (
    ("faults", "{faults}"),
    *((f">{name}", f"{{{name}}}") for name in ("right", "noted", "interrupted", *PROBLEMS)),
    (">sharing back after, s", "{sharing_back_s}"),
    (">MiB", "{memory_mib}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Inject, verify, print. Returns the exit status."""
    run = Run("fleet_faults", __doc__, argv, OPTIONS, COLUMNS, unsaid=("only", "patience"))
    args = run.args
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of the proxies, which are meant to be in trouble
    codec, questions = TextCodec.load(str(MODEL_PATH)), reference(args.tokens)
    run.say(f"{len(questions)} questions answered without speculation")
    num_problems = 0
    with (
        tempfile.TemporaryDirectory(prefix="fleet-faults-", ignore_cleanup_errors=True) as home,
        Fleet(Path(home), codec, questions, args.servers, random.Random(args.seed)) as fleet,
    ):
        rounds = drawn(args.rounds, args.seed, args.only)
        for number, faults in enumerate((*rounds, None)):
            if faults is None:
                row, num_promised = close(fleet)
            else:
                name = f"{args.seed}-{number}"
                row = play(fleet, faults, num_clients=args.clients, calm_s=args.calm, return_s=args.patience, seed=name)
            run.row(
                {
                    "faults": row.name,
                    **{name: row.counts[name] for name in (*OUTCOMES, *PROBLEMS)},
                    "sharing_back_s": None if row.sharing_s is None else round(row.sharing_s, 2),
                    "memory_mib": round(row.memory_mib),
                    "seconds": round(row.seconds, 1),
                }
            )
            for reason in row.reasons[:5]:
                run.say(f"    {reason}")
            num_problems += row.num_problems
    sums = {name: sum(row[name] for row in run.rows) for name in (*OUTCOMES, *PROBLEMS)}
    return run.end(rows=run.rows, promised=num_promised, **sums, is_wrong=num_problems > 0, indent=1)


if __name__ == "__main__":
    sys.exit(main())
