"""Is what ``ssd-cache evaluate`` predicts what the engine then does? On the same requests, one at a time, greedy.

``python -m benchmarks.evaluate [MODEL] [--workloads NAME...] [--requests N] [--rounds N] [--out FILE] [--json]``

A workload's requests are answered with speculation off and on, all by default, the cache empty at first, in several
rounds. What was answered becomes a log, of which ``ssd-cache evaluate --measure MODEL`` says the speed-up: it measures
what steps cost by itself, and sees nothing of the rounds. Compared is the time of the output: what a replay speaks of.
Workloads: "mixed", "new", "often" and "variants", made of the standard library, and recorded requests by their trace.
Every output is compared token by token. Prints a table, ends stdout with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment import head, model_facts, model_name
from benchmarks.evaluate.measured import run_round
from benchmarks.evaluate.predicted import evaluate, write_log
from benchmarks.evaluate.workloads import MADE, open_workload
from benchmarks.models import add_model
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.loading.threads import settle_threads
from ssd.text.codec import TextCodec

_MARK = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differed."""
    options = _parse(arguments)
    codec = TextCodec.load(str(options.model))
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    settle_threads(open_target(model, num_slots=1, max_length=64, max_draft_tokens=1))
    result: dict[str, Any] = {
        **head("evaluate"),
        **model_facts(model_name(options.model), model),
        "parameters": {
            key: getattr(options, key) for key in ("requests", "max_tokens", "prompt_tokens", "rounds", "seed")
        },
        "workloads": [],
    }
    if not options.json:
        print(f"evaluate: {result['model']}, {result['device']}, {result['dtype']}, {json.dumps(result['parameters'])}")
        print(f"{'workload':<18} {'measured':>9} {'rounds':>15} {'predicted':>10} {'error':>7}  tokens a step, both")
    for name in options.workloads:
        stream = open_workload(name, codec, options.requests, options.seed, options.prompt_tokens)
        rounds = [run_round(model, codec, stream.prompts, options.max_tokens) for _ in range(options.rounds)]
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / f"{name}.jsonl"
            write_log(log, stream.prompts, rounds[0].outputs)
            predicted = evaluate(log, str(options.model))
        measured = median(one.speedup for one in rounds)
        found = {
            "workload": name,
            "shares": stream.shares,
            "checksum": stream.checksum,
            "output_tokens": sum(map(len, rounds[0].outputs)),
            "measured": round(measured, 4),
            "measured_rounds": [round(one.speedup, 4) for one in rounds],
            "measured_with_prompts": round(median(one.whole for one in rounds), 4),
            "tokens_per_step": round(median(one.tokens_per_step for one in rounds), 4),
            "predicted": round(predicted["speedup"], 4),
            "predicted_tokens_per_step": round(predicted["tokens_per_step"], 4),
            "cost": predicted["cost"],
            "error": round(predicted["speedup"] / measured - 1.0, 4),
            "mismatches": sum(one.num_mismatches for one in rounds),
        }
        result["workloads"].append(found)
        if not options.json:
            print(line(found), flush=True)
    errors = [abs(found["error"]) for found in result["workloads"]]
    result["median_error"] = round(median(errors), 4)
    if not options.json:
        print(f"median error {median(errors):.1%}, greatest {max(errors):.1%}; the mark is {_MARK:.0%}")
    said = json.dumps(result)
    if options.out:
        options.out.write_text(said + "\n")
    print(said)
    return int(any(found["mismatches"] for found in result["workloads"]))


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    rounds = found["measured_rounds"]
    return (
        f"{found['workload']:<18} {found['measured']:>8.2f}x {min(rounds):>6.2f} ... {max(rounds):.2f} "
        f"{found['predicted']:>9.2f}x {found['error']:>+7.1%}  "
        f"{found['tokens_per_step']:.2f}, {found['predicted_tokens_per_step']:.2f}"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluate", description=(__doc__ or "").split("\n")[0])
    add_model(parser)
    add = parser.add_argument
    add("--workloads", nargs="+", default=list(MADE), metavar="NAME", help=f"(default: {' '.join(MADE)})")
    add("--requests", type=int, default=32, help="of each workload (default: %(default)s)")
    add("--max-tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    add("--prompt-tokens", type=int, default=320, help="of a prompt, its end (default: %(default)s)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--out", type=Path, default=None, help="file to write")
    add("--json", action="store_true", help="print the JSON line alone")
    return parser.parse_args(arguments)
