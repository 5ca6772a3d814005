"""Does anything that happens between servers and the Redis they share change an answer or what they know?

``python -m benchmarks.fleet_faults [--servers N] [--rounds N] [--seed S] [--only NAME ...] [--steps PAIRS]``

Several real servers (bundled model, float32), each with a durable cache and a proxy of its own before one real Redis,
are asked by two tenants: completions and streams, greedy and with seeds, whose answers were computed before without
speculation, and notes, texts with a number. Each round something fails, in an order that the seed says: the network
between them (late, cut, half open, garbled, slow), Redis (paused, emptied, killed, failed over, full, without rights,
with another clock), a server, or one of each at once. After each round a text that each server learns must be drafted
by all others within 30 s, or --patience, for both tenants. At the end all servers are closed in order, and every note
that was promised must be in its server's directory, none twice and none in the other tenant's.

Then, with --steps, requests are asked in pairs of a server that shares with a healthy Redis, on which others write, and
of one that does not: the ratio of the medians of their times.

Ends with a table and, with --json, one JSON line. Exit status 1 if anything failed, changed, was lost, twice or
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

from benchmarks.faults.command import reference
from benchmarks.faults.ending import begin, end, parser_of
from benchmarks.fleet_faults.fleet import Fleet
from benchmarks.fleet_faults.rounds import OUTCOMES, PROBLEMS, Row, close, play
from benchmarks.fleet_faults.steps import compare
from benchmarks.fleet_faults.table import NAMES, drawn
from ssd.bundled import MODEL_PATH
from ssd.text.codec import TextCodec


def main(argv: Sequence[str] | None = None) -> int:
    """Inject, verify, print. Returns the exit status."""
    args = _parser().parse_args(argv)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of the proxies, which are meant to be in trouble
    parameters = begin(args, ("servers", "rounds", "seed", "clients", "tokens", "calm", "steps"))
    began = time.monotonic()
    codec, questions = TextCodec.load(str(MODEL_PATH)), reference(args.tokens)
    print(f"{len(questions)} questions answered without speculation", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="fleet-faults-", ignore_cleanup_errors=True) as home:
        with Fleet(Path(home), codec, questions, args.servers, random.Random(args.seed)) as fleet:
            print(_HEADS, flush=True)
            for number, faults in enumerate(drawn(args.rounds, args.seed, args.only)):
                name = f"{args.seed}-{number}"
                rows.append(
                    play(fleet, faults, num_clients=args.clients, calm_s=args.calm, return_s=args.patience, seed=name)
                )
                print(_line(rows[-1]), flush=True)
            last, num_promised = close(fleet)
            rows.append(last)
            print(_line(last), flush=True)
        steps = compare(Path(home), args.steps, args.tokens) if args.steps else None
    if steps is not None:
        low, high = steps["interval"]
        print(f"step with Redis over without: {steps['ratio']:.4f} ({low:.4f} ... {high:.4f}), {args.steps} pairs")
    counted = (*OUTCOMES, *PROBLEMS)
    facts = [_facts(row) for row in rows]
    return end(args, "fleet_faults", parameters, rows, counted, began, rows=facts, promised=num_promised, steps=steps)


def _parser() -> argparse.ArgumentParser:
    purpose = (__doc__ or "").splitlines()[0]
    clients = "1 of each of two tenants at each server"
    parser = parser_of("fleet_faults", purpose, NAMES, rounds="20", clients=clients, tokens=24, calm_s=1.0)
    parser.add_argument("--servers", type=int, default=3, help="(default: 3)")
    parser.add_argument("--steps", type=int, default=400, metavar="PAIRS", help="0 leaves them out (default: 400)")
    return parser


def _facts(row: Row) -> dict[str, Any]:
    sharing_s = None if row.sharing_s is None else round(row.sharing_s, 2)
    facts = {"faults": row.name, **{name: row.counts[name] for name in (*OUTCOMES, *PROBLEMS)}}
    return {**facts, "sharing_back_s": sharing_s, "memory_mib": round(row.memory_mib), "seconds": round(row.seconds, 1)}


_SHOWN = ("right", "noted", "interrupted", *PROBLEMS)
_HEADS = " ".join([f"{'faults':<52}", *(f"{name:>11}" for name in _SHOWN), "  sharing   memory"])


def _line(row: Row) -> str:
    sharing = "" if row.sharing_s is None else f"{row.sharing_s:.1f} s"
    reasons = "".join(f"\n    {reason}" for reason in row.reasons[:5])
    counts = (f"{row.counts[name]:>11}" for name in _SHOWN)
    return " ".join([f"{row.name:<52}", *counts, f"{sharing:>9}", f"{row.memory_mib:>8.0f}"]) + reasons
