"""The engine on the device: is the output what plain decoding says, and does it get faster with use?"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.decode.steps import passes_of
from benchmarks.exactness import Report, Setting, compare, covering_settings, reference_greedy, run
from benchmarks.growth import run_stream
from benchmarks.streams import made_stream
from benchmarks.workloads import MIXED, snippets
from ssd.config import SamplingParams
from ssd.model.loading.load_target import load_model, open_target
from ssd.text.codec import TextCodec


def exactness(args: argparse.Namespace) -> dict[str, Any]:
    """Every pair of drafter, draft limit and batch size, greedy and sampled; bfloat16 differences are counted only."""
    codec = TextCodec.load(str(args.model))
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
            "passes": passes_of(target),
            "settings": [str(setting) for setting in settings],
            "tokens": report.num_tokens,
            "ties": report.num_ties,
            "mismatches": len(report.mismatches),
            "first_differences_per_10k_tokens": round(1e4 * flips / max(1, report.num_tokens), 3),
            "passed": report.passed or dtype != "float32",
        }
    return found


def growth(args: argparse.Namespace) -> dict[str, Any]:
    """A stream with repeats at batch 1, greedy, float32: speculation on and off in turn."""
    codec = TextCodec.load(str(args.model))
    model = load_model(args.model, dtype="float32", device=args.device)
    on, off = (open_target(model, num_slots=1, max_length=1024) for _ in range(2))
    options = argparse.Namespace(requests=args.requests, max_tokens=96, window=8, batch=1, num_speculative_tokens=16)
    stream = made_stream(MIXED, codec, args.requests, seed=0, most_tokens=1024 - 96)
    summary = run_stream(on, off, codec, stream, "greedy", options).summary()
    print(f"growth: on/off {summary['speedup_first']} at first, {summary['speedup_last']} at last, "
          f"tokens per step {summary['acceptance_length_first']} to {summary['acceptance_length_last']}")  # fmt: skip
    return summary
