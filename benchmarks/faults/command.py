"""Does any fault change an answer, fail a request or lose what was acknowledged?

``python -m benchmarks.faults [--rounds N] [--seed S] [--only NAME ...] [--combinations N] [--soak SECONDS]``

Each round starts a real server (bundled model, float32) with a durable cache, and clients that ask for completions and
streams, leave some of them early and verify every answer against one computed before without speculation: greedy
and sampled with a seed. Meanwhile faults are injected: processes are
killed and stopped, disks are full or refuse writes, files are changed under the server, Redis fails or holds what
others wrote, requests want too much; then one to three of them at random. Beside their questions the clients send
*notes*, texts with a number. Afterwards every note that was on disk before a fault, or was acknowledged before an
orderly close, must be in the cache once, and none in another namespace; where replicas share, another one must hear of
a new note within 30 s.

Ends with a table and, with --json, one JSON line. Exit status 1 if anything was changed, failed, lost, there twice or
elsewhere, if a server ended by itself or sharing did not come back.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.ending import begin, end, parser_of
from benchmarks.faults.questions import Question, ask_all
from benchmarks.faults.rounds import OUTCOMES, PROBLEMS, Row, Setup, play, soak
from benchmarks.faults.scene import server
from benchmarks.faults.table import FAULTS, NAMES, chosen
from ssd.bundled import MODEL_PATH
from ssd.text.codec import TextCodec


def main(argv: Sequence[str] | None = None) -> int:
    """Inject, verify, print. Returns the exit status."""
    args = _parser().parse_args(argv)
    logging.getLogger("ssd").setLevel(logging.CRITICAL)  # of the replica here, which is meant to be in trouble
    parameters = begin(args, ("rounds", "combinations", "seed", "clients", "tokens", "calm"))
    began = time.monotonic()
    setup = Setup(
        codec=TextCodec.load(str(MODEL_PATH)),
        questions=reference(args.tokens),
        seed=args.seed,
        num_clients=args.clients,
        calm_s=args.calm,
        return_s=args.patience,
    )
    print(f"{len(setup.questions)} questions answered without speculation", flush=True)
    rows: list[Row] = []
    memory: list[tuple[int, float]] = []
    if args.soak:
        rows.append(Row("soak"))
        lasting = [f for f in chosen(args.only) if not (f.is_alone or f.needs_small_disk or f.ends_server)]
        memory = soak(rows[0], lasting, setup, args.soak)
    else:
        for fault in chosen(args.only):
            rows.append(Row(fault.name))
            for _ in range(args.rounds):
                play(rows[-1], [fault], setup)
            print(_line(rows[-1]), flush=True)
        chance = random.Random(args.seed)
        combinable = [fault for fault in FAULTS if not fault.is_alone]
        for _ in range(args.combinations):
            faults = chance.sample(combinable, chance.randint(1, 3))
            rows.append(Row(" + ".join(fault.name for fault in faults)))
            play(rows[-1], faults, setup)
            print(_line(rows[-1]), flush=True)
    _print_table(rows)
    counted = (*OUTCOMES, *PROBLEMS)
    promised = sum(row.num_promised for row in rows)
    facts = [_facts(row) for row in rows]
    return end(args, "faults", parameters, rows, counted, began, rows=facts, promised=promised, memory_mib=memory)


def _parser() -> argparse.ArgumentParser:
    purpose = (__doc__ or "").splitlines()[0]
    parser = parser_of("faults", purpose, NAMES, rounds="1 of each fault", clients="4 at once", tokens=32, calm_s=2.0)
    parser.add_argument("--combinations", type=int, default=4, help="rounds of one to three faults (default: 4)")
    parser.add_argument("--soak", type=float, default=0.0, metavar="SECONDS", help="one long round; prints memory")
    return parser


def reference(num_tokens: int) -> list[Question]:
    """Questions, answered by a server that does not speculate."""
    with tempfile.TemporaryDirectory(prefix="faults-reference-") as home:
        plain = server(Path(home) / "server.log", "--no-speculation", "--no-enable-prefix-caching")
        try:
            plain.start()
            return ask_all(plain, num_tokens, seeds=(1, 2))
        finally:
            plain.kill()


def _facts(row: Row) -> dict[str, Any]:
    counts = {name: row.counts[name] for name in (*OUTCOMES, *PROBLEMS)}
    facts = {"fault": row.name, "rounds": row.num_rounds, **counts, "promised": row.num_promised}
    if row.sharing_s is not None:
        facts["sharing_back_s"] = round(row.sharing_s, 2)
    return facts | ({"skipped": row.skipped} if row.skipped else {})


def _line(row: Row) -> str:
    if row.skipped and not row.num_rounds:
        return f"{row.name:<44} skipped: {row.skipped}"
    reasons = "".join(f"\n    {reason}" for reason in row.reasons[:3])
    return " ".join([f"{row.name:<44}", *(f"{value:>9}" for value in _columns(row))]) + reasons


def _columns(row: Row) -> list[str]:
    counts = row.counts
    return [
        str(row.num_rounds),
        *(str(counts[name]) for name in ("right", "noted", "interrupted", "failed", "changed", "died")),
        str(row.num_promised),
        *(str(counts[name]) for name in ("lost", "twice", "elsewhere")),
        "deaf" if counts["deaf"] else "" if row.sharing_s is None else f"{row.sharing_s:.1f} s",
    ]


def _print_table(rows: Sequence[Row]) -> None:
    heads = ("rounds", "right", "notes", "cut-off", "failed", "changed", "died", "promised", "lost", "twice")
    print()
    print(" ".join([f"{'fault':<44}", *(f"{name:>9}" for name in (*heads, "elsewhere", "sharing"))]))
    for row in rows:
        print(_line(row))
