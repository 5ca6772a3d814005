"""Is what ``ssd-cache evaluate`` predicts what the engine then does? On the same requests, one at a time, greedy.

``python -m benchmarks.evaluate [MODEL] [--workloads NAME...] [--requests N] [--rounds N] [--out FILE] [--json]``

``ssd-cache evaluate --measure MODEL`` decodes a workload's requests with drafts and without, the cache empty at first,
and says what a replay of the same outputs predicts from measured costs; several times. Compared is the time of the
output: what a replay speaks of. Workloads: "mixed", "new", "often" and "variants", made of the standard library, and
recorded requests by their trace. Every output is compared. The mark is a median error of 10 %. Prints a table, ends
stdout with one JSON line.
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

from benchmarks.run import ENGINE, Option, Run
from benchmarks.workloads import MADE, open_stream

OPTIONS: dict[str, Any] = {
    "workloads": Option(default=list(MADE), metavar="NAME"),
    "requests": Option(default=32, help="of each workload"),
    "max_tokens": Option(default=64, help="of an answer"),
    "prompt_tokens": Option(default=320, help="of a prompt, its end"),
    "rounds": 3,
    "save_cost": Option(default=None, kind=Path, metavar="FILE", help="keep what passes cost, for `benchmarks.replay`"),
    "seed": 0,
}
UNDER = (*ENGINE, "cache_builder/evaluation")
COLUMNS = (
    ("model", "{model}"),
    ("workload", "{workload}"),
    (">measured", "{measured:.2f}x"),
    (">predicted", "{predicted:.2f}x"),
    (">error", "{error:+.1%}"),
    (">tokens a step", "{tokens_per_step:.2f}"),
)
EACH = "{model}: median error {median_error:.1%}."
NOTE = (
    "`python -m benchmarks.evaluate`, float32, {environment[cpu]}, {environment[cores]} cores, caches empty at first, "
    "all outputs equal; {measured}. Measured: seconds of output with speculation off over those with it on. "
    "{parameters[requests]} greedy requests a workload."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differed."""
    unsaid = ("workloads", "save_cost")
    run = Run("evaluate", __doc__, argv, OPTIONS, COLUMNS, has_model=True, unsaid=unsaid, under=UNDER)
    args = run.args
    codec, _ = run.load()
    for name in args.workloads:
        stream = open_stream(name, codec, args.requests, args.seed, args.prompt_tokens)
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / f"{name}.jsonl"
            write_log(log, stream.prompts, args.max_tokens)
            rounds = [evaluate(log, str(args.model), args.max_tokens, args.save_cost) for _ in range(args.rounds)]
        ways = [found["measured"]["temperatures"][0] for found in rounds]
        replayed = [found["measured"]["replayed"] for found in rounds]
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
                "cost": rounds[0]["cost"],
                "error": round(predicted / measured - 1.0, 4),
                "mismatches": sum(way["outputs_differ"] + way["bits_differ"] for way in ways),
            }
        )
    error = median(abs(row["error"]) for row in run.rows)
    run.say(f"median error {error:.1%}")
    failed = any(row["mismatches"] for row in run.rows)
    return run.end(median_error=round(error, 4), is_wrong=failed)


def write_log(path: Path, prompts: Sequence[list[int]], max_tokens: int) -> None:
    """A record for each request, of token ids; its answer, which only says how long one may be, is not looked at."""
    with path.open("w") as file:
        for prompt in prompts:
            file.write(json.dumps({"token_ids": [*prompt, *[0] * max_tokens], "prompt_length": len(prompt)}) + "\n")


def evaluate(log: Path, model: str, max_tokens: int, save_cost: Path | None) -> dict[str, Any]:
    """``ssd-cache evaluate LOG --measure MODEL`` of all requests, greedy. Raises SystemExit where it fails."""
    arguments = [sys.executable, "-m", "cache_builder", "evaluate", str(log), "--measure", model, "--temperature", "0"]
    limits = ["--measure-requests", "1000000", "--measure-tokens", str(max_tokens), "--measure-minutes", "600"]
    limits += [] if save_cost is None else ["--save-cost", str(save_cost)]
    done = subprocess.run([*arguments, *limits, "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ssd-cache evaluate ended with status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
