"""Compare the speed-up that ``ssd-cache evaluate`` predicts with the speed-up that it measures on the same requests.

``python -m benchmarks.evaluate [MODEL] [--workloads NAME...] [--requests N] [--rounds N] [--out FILE] [--json]``

``ssd-cache evaluate --measure MODEL`` decodes the requests of a workload greedily, one at a time, with and without
drafts, with an empty cache at first. It also predicts the speed-up by replaying the outputs with the measured costs of
forward passes. Both are repeated in several rounds. Only the time for the output is compared, because the prediction
does not include the prefill. Workloads are "mixed", "new", "often" and "variants" (see `benchmarks.workloads`), or the
names of recorded traces. Every output is compared. The goal is a median error of at most 10 %. Prints a table; the
last line of stdout is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.models import model_name
from benchmarks.run import ENGINE, Option, Run
from benchmarks.workloads import MADE, open_stream
from ssd.text.codec import TextCodec

OPTIONS: dict[str, Any] = {
    "workloads": Option(default=list(MADE), metavar="NAME"),
    "requests": Option(default=32, help="number of requests per workload"),
    "max_tokens": Option(default=64, help="maximum number of output tokens per request"),
    "prompt_tokens": Option(default=320, help="maximum number of tokens per prompt; only the end is used"),
    "rounds": 3,
    "save_cost": Option(default=None, kind=Path, metavar="FILE", help="file for the measured costs of forward passes"),
    "seed": 0,
}
UNDER = (*ENGINE, "cache_builder/evaluation")
COLUMNS = (
    ("model", "{model}"),
    ("workload", "{workload}"),
    (">measured speed-up", "{measured:.2f}x"),
    (">predicted speed-up", "{predicted:.2f}x"),
    (">error of the prediction", "{error:+.1%}"),
    (">tokens per forward pass", "{tokens_per_step:.2f}"),
)
WORDS = {
    "workload": {
        "mixed": "some prompts repeated",
        "new": "no prompt repeated",
        "often": "most prompts repeated",
        "variants": "prompts with small changes",
    }
}
EACH = "{model}: the median error is {median_error:.1%}."
RUN = (
    "{parameters[requests]} requests of {parameters[max_tokens]} output tokens per workload, rounds: "
    "{parameters[rounds]}"
)
NOTE = (
    "The measured speed-up is the decoding time with speculation off divided by the decoding time with speculation on. "
    "Decoding was greedy, caches were empty at first, and all outputs were equal. The command is "
    "`python -m benchmarks.evaluate`, with float32 weights. Measured on {measured}."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if drafts changed an output, else 0."""
    unsaid = ("workloads", "save_cost")
    run = Run("evaluate", __doc__, argv, OPTIONS, COLUMNS, has_model=True, unsaid=unsaid, under=UNDER)
    args = run.args
    if (args.dtype, args.device) != ("auto", "auto"):
        run.parser.error("`ssd-cache evaluate` takes the model's own --dtype and the device that is there")
    codec, saved = TextCodec.load(str(args.model)), list[dict[str, Any]]()
    for name in args.workloads:
        stream = open_stream(name, codec, args.requests, args.seed, args.prompt_tokens)
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / f"{name}.jsonl"
            write_log(log, stream.prompts, args.max_tokens)
            cost = Path(directory) / "cost.json"
            rounds = []
            for _ in range(args.rounds):
                rounds.append(evaluate(log, str(args.model), args.max_tokens, cost))
                saved.append(json.loads(cost.read_text()))
        decoded = [found["measured"] for found in rounds]  # each in a process of its own
        run.facts = {"model": model_name(args), **{key: decoded[0][key] for key in ("device", "dtype")}}
        ways, replayed = [each["temperatures"][0] for each in decoded], [each["replayed"] for each in decoded]
        measured = median(way["output_speedup"] for way in ways)
        predicted = median(each["speedup"] for each in replayed)
        run.row(
            {
                "workload": name,
                "shares": stream.shares,
                "checksum": stream.checksum,
                "output_tokens": ways[0]["output_tokens"],
                "measured": measured,
                "measured_rounds": [way["output_speedup"] for way in ways],
                "tokens_per_step": round(median(way["output_tokens"] / way["passes_with"] for way in ways), 4),
                "predicted": predicted,
                "threads": [each["threads"] for each in decoded],
                "cost": rounds[0]["cost"],
                "error": round(predicted / measured - 1.0, 4),
                "mismatches": sum(way["outputs_differ"] + way["bits_differ"] for way in ways),
            }
        )
    if args.save_cost is not None:
        args.save_cost.write_text(json.dumps(merged(saved)) + "\n")
    error = median(abs(row["error"]) for row in run.rows)
    run.say(f"median error {error:.1%}")
    failed = any(row["mismatches"] for row in run.rows)
    return run.end(median_error=round(error, 4), is_wrong=failed)


def write_log(path: Path, prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Write a log with one record of token ids per request. Outputs are zeros, because only their length is used."""
    with path.open("w") as file:
        for prompt in prompts:
            file.write(json.dumps({"token_ids": [*prompt, *[0] * max_tokens], "prompt_length": len(prompt)}) + "\n")


def merged(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine several measured cost curves of one model into one: the median of each figure for each pass width."""
    columns = {key: [each[key] for each in measured] for key in ("ms", "costs", "step_ms", "overhead", "recycling")}
    medians = {key: np.round(np.median(values, axis=0), 4).tolist() for key, values in columns.items()}
    return {**measured[0], "requests": sum(each["requests"] for each in measured), **medians}


def evaluate(log: Path, model: str, max_tokens: int, save_cost: Path) -> dict[str, Any]:
    """Run ``ssd-cache evaluate LOG --measure MODEL`` on all requests with greedy decoding, and return its JSON result.

    The measured costs of forward passes are written to ``save_cost``. Raises SystemExit if the command fails.
    """
    arguments = [sys.executable, "-m", "cache_builder", "evaluate", str(log), "--measure", model, "--temperature", "0"]
    limits = ["--measure-requests", "1000000", "--measure-tokens", str(max_tokens), "--measure-minutes", "600"]
    limits += ["--save-cost", str(save_cost), "--json"]
    done = subprocess.run([*arguments, *limits], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ssd-cache evaluate ended with status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
