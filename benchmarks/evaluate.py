"""Is what ``ssd-cache evaluate`` predicts what the engine then does? On the same requests, one at a time, greedy.

``python -m benchmarks.evaluate [MODEL] [--workloads NAME...] [--requests N] [--rounds N] [--out FILE] [--json]``

A workload's requests are answered with speculation off and on, all by default, the cache empty at first, in several
rounds. What was answered becomes a log, of which ``ssd-cache evaluate --measure MODEL`` says the speed-up: it measures
what steps cost by itself, and sees nothing of the rounds. Compared is the time of the output: what a replay speaks of.
Workloads: "mixed", "new", "often" and "variants", made of the standard library, and recorded requests by their trace.
Every output is compared token by token. The mark is a median error of 10 %. Prints a table, ends stdout with one JSON
line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from benchmarks.environment import model_facts, model_name
from benchmarks.run import Option, Run, in_turn
from benchmarks.streams import Stream, made_stream, recorded_stream
from benchmarks.ways import Comparison, Tally, ask, open_engine, requests_of
from benchmarks.workloads import MIXED, NO_REPEATS, Mix
from ssd.config import CacheConfig, EngineConfig, SamplingParams
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.loading.threads import settle_threads
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

MADE = {
    "mixed": MIXED,
    "new": NO_REPEATS,
    "often": Mix(name="often", recurring=0.9, variant=0.05, pool_size=8),
    "variants": Mix(name="variants", recurring=0.0, variant=0.9, pool_size=6),
}
"""Made of the standard library, by their names."""

OPTIONS: dict[str, Any] = {
    "workloads": Option(default=list(MADE), metavar="NAME"),
    "requests": Option(default=32, help="of each workload"),
    "max_tokens": Option(default=64, help="of an answer"),
    "prompt_tokens": Option(default=320, help="of a prompt, its end"),
    "rounds": 3,
    "seed": 0,
    "dtype": "auto",
    "device": "auto",
}
COLUMNS = (
    ("workload", "{workload}: {shares}"),
    (">measured", "{measured:.2f}x"),
    (">predicted", "{predicted:.2f}x"),
    (">error", "{error:+.1%}"),
    (">tokens a step, measured / replayed", "{tokens_per_step:.2f} / {predicted_tokens_per_step:.2f}"),
)


@dataclass(frozen=True, slots=True)
class Round:
    """What one round came to. ``speedup`` : of the output, the computing of prompts left out; ``whole`` : with it."""

    outputs: list[list[int]]
    speedup: float
    whole: float
    tokens_per_step: float
    num_mismatches: int


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differed."""
    run = Run("evaluate", __doc__, argv, OPTIONS, COLUMNS, has_model=True, unsaid=("workloads", "dtype", "device"))
    args = run.args
    codec = TextCodec.load(str(args.model))
    model = load_model(args.model, dtype=args.dtype, device=args.device)
    settle_threads(open_target(model, num_slots=1, max_length=64, max_draft_tokens=1))
    for name in args.workloads:
        stream = open_workload(name, codec, args.requests, args.seed, args.prompt_tokens)
        rounds = [run_round(model, codec, stream.prompts, args.max_tokens) for _ in range(args.rounds)]
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / f"{name}.jsonl"
            write_log(log, stream.prompts, rounds[0].outputs)
            predicted = evaluate(log, str(args.model))
        measured = median(one.speedup for one in rounds)
        run.row(
            {
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
        )
    error = median(abs(row["error"]) for row in run.rows)
    run.say(f"median error {error:.1%}")
    facts = model_facts(model_name(args.model), model)
    failed = any(row["mismatches"] for row in run.rows)
    return run.end(**facts, workloads=run.rows, median_error=round(error, 4), is_wrong=failed)


def open_workload(name: str, codec: TextCodec, num_requests: int, seed: int, most_tokens: int) -> Stream:
    """A made stream, or that of a recorded trace. Raises ConfigError where there is none of this name."""
    if name in MADE:
        return made_stream(MADE[name], codec, num_requests, seed, most_tokens)
    return recorded_stream(name, codec, num_requests, most_tokens)


def run_round(model: PreTrainedModel, codec: TextCodec, prompts: Sequence[list[int]], max_tokens: int) -> Round:
    """Answer ``prompts`` in their order on fresh engines, the cache empty at first; which goes first alternates.

    What computing a prompt takes is what the first step of the engine without speculation takes more than its others;
    the other one computes as much, or as little where a slot still holds it.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    length, config = max(map(len, prompts)) + max_tokens + 1, EngineConfig(max_num_seqs=1)
    said: dict[str, list[list[int]]] = {"ssd": [], "none": []}
    steps: dict[str, list[list[float]]] = {"ssd": [], "none": []}
    with CacheSet(CacheConfig(), fingerprint=codec.fingerprint) as caches:
        engines = {
            name: open_engine(model, name, slots=1, length=length, config=config, codec=codec, caches=known)
            for name, known in (("ssd", caches), ("none", None))
        }
        for number, prompt in enumerate(prompts):
            for name in in_turn(("ssd", "none"), number):
                tally = Tally()
                said[name] += ask(engines[name], requests_of([prompt], [params]), tally)
                steps[name].append(tally.steps_s)
            caches.flush()
        num_steps = engines["ssd"].metrics.num_verify_steps
        comparison, off = Comparison(), engines["none"].target
        for prompt, got, want in zip(prompts, said["ssd"], said["none"], strict=True):
            comparison.add(off, prompt, params, got, want)
    plain_s = median(seconds for each in steps["none"] for seconds in each[1:])
    prompt_s = sum(max(0.0, each[0] - plain_s) for each in steps["none"])
    on_s, off_s = (sum(map(sum, steps[name])) for name in ("ssd", "none"))
    speedup = (off_s - prompt_s) / (on_s - prompt_s)
    return Round(said["none"], speedup, off_s / on_s, comparison.num_tokens / num_steps, comparison.num_mismatches)


def write_log(path: Path, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> None:
    """A record for each request, of token ids: what was asked and answered is what the engine saw."""
    with path.open("w") as file:
        for prompt, output in zip(prompts, outputs, strict=True):
            file.write(json.dumps({"token_ids": [*prompt, *output], "prompt_length": len(prompt)}) + "\n")


def evaluate(log: Path, model: str) -> dict[str, Any]:
    """``ssd-cache evaluate LOG --measure MODEL``, everything else by default. Raises SystemExit where it fails."""
    arguments = [sys.executable, "-m", "cache_builder", "evaluate", str(log), "--tokenizer", model, "--measure", model]
    done = subprocess.run(
        [*arguments, "--sample-tokens", "0", "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"ssd-cache evaluate ended with status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
