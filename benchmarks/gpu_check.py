"""Exactness, growth and step times on a GPU in one run of a few minutes; needs none of the web packages.

``python -m benchmarks.gpu_check [MODEL] [--device cuda] [--out DIR]``

1. Exactness in float32: greedy against ``model.generate``, sampling against the engine without speculation, every
   pair of drafter, draft limit and batch size. In bfloat16: how often a token differs (published, not asserted).
2. Growth: a stream with repeats, speculation on and off in turn.
3. Step times: one forward of T = 1, 2, 5, 9, 17 positions at batch 1, 4, 16, against T = 1.

Ends stdout with one JSON line. ``--device cpu`` runs the same for a look at the script itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.environment import head, model_name
from benchmarks.exactness import Report, Setting, compare, covering_settings, reference_greedy, run
from benchmarks.growth import run_stream
from benchmarks.workloads import MIXED, snippets
from ssd.bundled import MODEL_PATH
from ssd.config import SamplingParams
from ssd.target.loading import load_model, open_target
from ssd.target.target import Target
from ssd.text.codec import TextCodec


def main(argv: Sequence[str] | None = None) -> None:
    """All three parts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=MODEL_PATH, help="Hugging Face directory or id (default: bundled)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--requests", type=int, default=160, help="requests of the growth stream")
    parser.add_argument("--out", type=Path, default=None, help="directory for gpu_check.json")
    args = parser.parse_args(argv)
    codec = TextCodec.load(str(args.model))
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"gpu_check: {model_name(args.model)} on {name}, {args.prompts} prompts, {args.max_tokens} new tokens each")
    result: dict[str, Any] = {
        **head("gpu_check"),
        "device": name,
    }
    result["exactness"] = exactness(args, codec)
    result["growth"] = growth(args, codec)
    result["steps"] = {dtype: step_times(args, dtype) for dtype in ("float32", "bfloat16")}
    line = json.dumps(result)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "gpu_check.json").write_text(line + "\n")
    print(line)
    if not result["exactness"]["float32"]["passed"]:
        raise SystemExit("float32 outputs differ from plain decoding")


def exactness(args: argparse.Namespace, codec: TextCodec) -> dict[str, Any]:
    """Float32 must agree; bfloat16 is counted."""
    eos = codec.eos_token_ids
    prompts = [codec.encode_prompt(text)[-160:] for text in snippets(1)[: args.prompts]]
    greedy = [SamplingParams(max_tokens=args.max_tokens, temperature=0.0)] * len(prompts)
    sampled = [
        SamplingParams(max_tokens=args.max_tokens, temperature=0.8, top_p=0.95, seed=i) for i in range(len(prompts))
    ]
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        model = load_model(args.model, dtype=dtype, device=args.device)
        target = open_target(model, num_slots=16, max_length=512)
        report = Report()
        expected = reference_greedy(target, prompts, args.max_tokens, eos)
        drawn, _ = run(target, prompts, sampled, None, eos_token_ids=eos)
        if dtype == "float32":
            settings = covering_settings(["ssd", "frequency", "random", "oracle"], [1, 4, 16], [1, 4, 16])
        else:
            settings = [Setting("ssd", 16, 8)]
        for setting in settings:
            compare(target, prompts, greedy, expected, setting, eos_token_ids=eos, report=report)
            compare(target, prompts, sampled, drawn, setting, eos_token_ids=eos, report=report)
        flips = report.num_ties + len(report.mismatches)
        print(f"exactness {dtype}: {report}; settings {', '.join(map(str, settings))}")
        found[dtype] = {
            "way": target.way,
            "settings": [str(setting) for setting in settings],
            "tokens": report.num_tokens,
            "ties": report.num_ties,
            "mismatches": len(report.mismatches),
            "first_differences_per_10k_tokens": round(1e4 * flips / max(1, report.num_tokens), 3),
            "passed": report.passed,
        }
    return found


def growth(args: argparse.Namespace, codec: TextCodec) -> dict[str, Any]:
    """A short growth stream at batch 1, greedy, float32."""
    model = load_model(args.model, dtype="float32", device=args.device)
    on, off = (open_target(model, num_slots=1, max_length=1024) for _ in range(2))
    options = argparse.Namespace(
        requests=args.requests, max_tokens=96, window=8, batch=1, num_speculative_tokens=16, seed=0
    )
    summary = run_stream(on, off, codec, MIXED, "greedy", options).summary()
    print(f"growth: on/off {summary['speedup_first']} at first, {summary['speedup_last']} at last, "
          f"tokens per step {summary['acceptance_length_first']} to {summary['acceptance_length_last']}")  # fmt: skip
    return summary


def step_times(args: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """Milliseconds of one forward of T positions, context 256, and the ratio to T = 1 (medians of 30)."""
    target = open_target(load_model(args.model, dtype=dtype, device=args.device), num_slots=16, max_length=512)
    rows = []
    for batch in (1, 4, 16):
        plain = 0.0
        for width in (1, 2, 5, 9, 17):
            milliseconds = median(_timed(target, batch, width) for _ in range(30)) * 1e3
            plain = plain or milliseconds
            rows.append(
                {
                    "batch": batch,
                    "T": width,
                    "step_ms_p50": round(milliseconds, 3),
                    "ratio": round(milliseconds / plain, 3),
                }
            )
            print(
                f"step {dtype} batch {batch:>2} T {width:>2}: {milliseconds:7.2f} ms, {milliseconds / plain:5.2f} x T=1"
            )
    return rows


def _timed(target: Target, batch: int, width: int, context: int = 256) -> float:
    slots = list(range(batch))
    for slot in slots:
        if target.length(slot) < context:
            target.rollback(slot, 0)
            target.prefill([slot], np.full((1, context), 5, np.int64), [context])
    tokens = np.full((batch, width), 7, np.int64)
    _synchronize(target)
    start = time.perf_counter()
    target.forward(slots, tokens, [width] * batch)
    _synchronize(target)
    seconds = time.perf_counter() - start
    for slot in slots:
        target.rollback(slot, context)
    return seconds


def _synchronize(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
