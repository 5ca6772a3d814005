"""Does any fault change an answer, fail a request or lose what was acknowledged?

``python -m benchmarks.faults [--rounds N] [--seed S] [--only NAME ...] [--combinations N]``

Each round starts a real server (bundled model, float32) with a durable cache, and clients that ask for completions and
streams, leave some of them early and verify every answer against one computed before without speculation: greedy
and sampled with a seed. Meanwhile faults are injected: processes are killed and stopped, disks are full or refuse
writes, files are changed under the server, requests want too much; then one to three of them at random. (Faults of
Redis and of what lies between are those of ``benchmarks.fleet_faults``.) Beside their questions the clients send
*notes*, texts with a number. Afterwards every note that was on disk before a fault, or was acknowledged before an
orderly close, must be in the cache once, and none in another namespace.

Prints a table; the last line of stdout is one JSON object. Exit status 1 if anything was changed, failed, lost, there
twice or elsewhere, or if a server ended by itself.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.load import Question, ask_all
from benchmarks.faults.scene import FAULTS, NAMES, Fault, Scene, SkippedError, server
from benchmarks.run import Option, Run
from ssd.bundled import MODEL_PATH
from ssd.text.codec import TextCodec

OUTCOMES = ("right", "cancelled", "noted", "refused", "interrupted")
PROBLEMS = ("failed", "changed", "died", "lost", "twice", "elsewhere")
"""A request failed; an answer changed; the server ended by itself; a promised note is gone, is there twice, or lies in
another namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all rounds have in common."""

    codec: TextCodec
    questions: Sequence[Question]
    seed: int
    num_clients: int
    calm_s: float
    """Before, between and after the faults."""


@dataclass(slots=True)
class Row:
    """What came of the rounds of one fault, or of one combination of faults."""

    name: str
    num_rounds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    num_promised: int = 0
    reasons: list[str] = field(default_factory=list)
    skipped: str = ""

    @property
    def num_problems(self) -> int:
        """0 where all is well."""
        return sum(self.counts[name] for name in PROBLEMS)


def play(row: Row, faults: Sequence[Fault], setup: Setup) -> None:
    """One round of these faults, one after another; adds to ``row``."""
    chance = random.Random(f"{setup.seed}-{row.name}-{row.num_rounds}")
    with (
        tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as home,
        Scene(Path(home), setup.codec, setup.questions, chance) as scene,
    ):
        try:
            scene.open(with_small_disk=any(fault.needs_small_disk for fault in faults))
            with scene.load.running(setup.num_clients, setup.seed):
                scene.hold(setup.calm_s)
                for fault in faults:
                    fault.inject(scene)
                    scene.revive_server()
                    scene.hold(setup.calm_s)
        except SkippedError as reason:
            row.skipped = str(reason)
            return
        _judge(row, scene)
        row.num_rounds += 1


def _judge(row: Row, scene: Scene) -> None:
    scene.revive_server()
    scene.promise_committed()
    scene.close_server()
    stored = scene.history.check(scene.notes_on_disk())
    row.num_promised += stored.num_promised
    row.counts += scene.load.counts
    row.counts += Counter(
        died=scene.server.num_deaths,
        lost=len(stored.lost),
        twice=len(stored.twice),
        elsewhere=len(stored.elsewhere),
    )
    row.reasons += scene.load.failures


def reference(num_tokens: int) -> list[Question]:
    """Questions, answered by a server that does not speculate."""
    with tempfile.TemporaryDirectory(prefix="faults-reference-") as home:
        plain = server(Path(home) / "server.log", "--no-speculation", "--no-enable-prefix-caching")
        try:
            plain.start()
            return ask_all(plain, num_tokens, seeds=(1, 2))
        finally:
            plain.kill()


OPTIONS: dict[str, Any] = {
    "rounds": Option(default=1, help="of each fault"),
    "combinations": Option(default=4, least=0, help="rounds of one to three faults"),
    "seed": 0,
    "only": Option(default=list(NAMES), choices=NAMES, metavar="NAME", help="faults"),
    "clients": Option(default=4, help="at once"),
    "tokens": Option(default=32, help="of each answer"),
    "calm": Option(default=2.0, help="seconds before and after a fault"),
}
COLUMNS = (
    ("fault", "{fault}"),
    *((f">{name}", f"{{{name}}}") for name in ("rounds", "right", "noted", *PROBLEMS, "promised")),
    ("", "{skipped}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Inject, verify, print. Returns the exit status."""
    run = Run("faults", __doc__, argv, OPTIONS, COLUMNS, unsaid=("only",))
    args = run.args
    codec = TextCodec.load(str(MODEL_PATH))
    setup = Setup(
        codec=codec, questions=reference(args.tokens), seed=args.seed, num_clients=args.clients, calm_s=args.calm
    )
    run.say(f"{len(setup.questions)} questions answered without speculation")
    chance = random.Random(args.seed)
    combinable = [fault for fault in FAULTS if not fault.is_alone]
    drawn = [chance.sample(combinable, chance.randint(1, 3)) for _ in range(args.combinations)]
    alone = [[fault] for fault in FAULTS if fault.name in args.only]
    failed = False
    for faults, rounds in [*((faults, args.rounds) for faults in alone), *((faults, 1) for faults in drawn)]:
        row = Row(" + ".join(fault.name for fault in faults))
        for _ in range(rounds):
            play(row, faults, setup)
        counts = {name: row.counts[name] for name in (*OUTCOMES, *PROBLEMS)}
        facts = {"fault": row.name, "rounds": row.num_rounds, **counts, "promised": row.num_promised}
        run.row({**facts, "skipped": row.skipped})
        for reason in row.reasons[:3]:
            run.say(f"    {reason}")
        failed |= row.num_problems > 0
    sums = {name: sum(row[name] for row in run.rows) for name in (*OUTCOMES, *PROBLEMS, "promised")}
    return run.end(rows=run.rows, **sums, is_wrong=failed, indent=1)


if __name__ == "__main__":
    sys.exit(main())
