"""How long is a step, and how much of it is the model?

``python -m benchmarks.decode [MODEL] [--batch B...] [--context L...] [--draft K...] [--shape tiny|1b|8b] [--json]``

For every (batch, context, T = 1 + K): engine steps whose drafts are what the model will say, so that every token is
accepted; by turns with them bare forwards of the same shape, as transformers runs it. K = 0 is plain decoding. Outputs
of every K must be those of K = 0. Beside them ``model.generate`` on one of the prompts, and a copy of memory, which
tells what the device can move. ``--shape`` takes random weights of that shape: for the time of steps only. Prints a
table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.decode.baselines import time_generate
from benchmarks.decode.shapes import SHAPES, random_model
from benchmarks.decode.steps import (
    Shape,
    Tokens,
    cache_bytes,
    copy_bytes_per_second,
    passes_of,
    time_steps,
    tokens_said,
    weight_bytes,
)
from benchmarks.environment import head, model_facts, model_name
from benchmarks.models import add_model
from benchmarks.workloads import snippets
from ssd.model.loading.load_target import load_model, open_target
from ssd.text.codec import TextCodec

_HEAD = ("batch", "context", "T", "step ms", "target ms", "forward ms", "forward/step", "tokens/s", "GB/s")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where a verify step changed a token in float32."""
    args = _parse(argv)
    parameters = {
        "batch": args.batch,
        "context": args.context,
        "draft": args.draft,
        "rounds": args.rounds,
        "shape": args.shape,
    }
    name = f"random weights, shape {args.shape}" if args.shape else model_name(args.model)
    print(f"decode: {name}, {json.dumps(parameters)}")
    gc.collect()  # the model of an earlier run may refer to itself
    model = (
        random_model(args.shape, dtype=args.dtype, device=args.device)
        if args.shape
        else load_model(args.model, dtype=args.dtype, device=args.device)
    )
    # A target replaces layers of its model; what it is compared with stays as the library loads it.
    library = deepcopy(model)
    target = open_target(
        model,
        num_slots=max(args.batch),
        max_length=max(args.context) + max(args.baseline_tokens, tokens_said(args.rounds, max(args.draft) + 1)) + 8,
        max_draft_tokens=max(args.draft),
        enforce_eager=args.enforce_eager,
        fuse_linears=args.fuse_linears,
    )
    copied = copy_bytes_per_second(target.device, args.copy_mb << 20)
    rows, num_changed = [], 0
    print(" ".join(f"{title:>12}" for title in _HEAD))
    for batch in args.batch:
        for context in args.context:
            known: list[list[int]] = [[] for _ in range(batch)]
            for draft in sorted({0, *args.draft}):
                shape = Shape(batch, context, draft)
                num_tokens = tokens_said(args.rounds, shape.width)
                prompts = _prompts(args, batch, max(8, context - num_tokens // 2), target.vocab_size)
                if draft:  # the text the drafts are taken from begins where this prompt ends
                    known = time_steps(target, prompts, Shape(batch, context, 0), num_tokens, [], library).outputs
                timing = time_steps(target, prompts, shape, args.rounds, known, library)
                num_changed += (
                    sum(
                        said[: len(text)] != text[: len(said)] for said, text in zip(timing.outputs, known, strict=True)
                    )
                    if draft
                    else 0
                )
                row = _row(shape, timing, weight_bytes(library) + cache_bytes(target, shape), copied)
                if draft or 0 in args.draft:
                    rows.append(row)
                    print(_line(row), flush=True)
    prompt = _prompts(args, 1, args.context[0], target.vocab_size)[0]
    baselines = {}
    if not args.no_baselines:
        baselines = time_generate(library, target, prompt, args.baseline_tokens, args.baseline_rounds)
    for way, found in baselines.items():
        print(f"{way}: {found.get('error') or '{tokens_per_s} tokens/s, engine {engine_over_it}x'.format(**found)}")
    result = {
        **head("decode"),
        **model_facts(name, target),
        "way": target.way,
        "passes": passes_of(target),
        "parameters": parameters,
        "changed_outputs": num_changed,
        "rows": rows,
        "baselines": baselines,
    }
    line = json.dumps(result)
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(num_changed > 0 and target.dtype == torch.float32)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add_model(parser)
    add("--shape", choices=tuple(SHAPES), help="random weights of a Llama of this shape in place of a model")
    add("--batch", type=int, nargs="+", default=[1, 8], metavar="B", help="rows (default: 1 8)")
    add("--context", type=int, nargs="+", default=[256], metavar="L", help="tokens a row holds (default: 256)")
    add("--draft", type=int, nargs="+", default=[0, 1, 3, 7, 15], metavar="K", help="drafted tokens; 0 is plain")
    add("--rounds", type=int, default=24, help="timed steps of each shape (default: %(default)s)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--device", default="auto")
    add("--copy-mb", type=int, default=256, help="size of the copy that tells the memory's speed")
    add("--baseline-tokens", type=int, default=128)
    add("--baseline-rounds", type=int, default=7)
    add("--enforce-eager", action="store_true", help="record no CUDA graphs")
    add("--fuse-linears", action="store_true", help="on a GPU too, one product for layers that read the same input")
    add("--no-baselines", action="store_true", help="leave model.generate out")
    add("--out", type=Path, help="also write the JSON line to this file")
    add("--json", action="store_true", help="accepted for symmetry: the JSON line is always the last")
    args = parser.parse_args(argv)
    if min(*args.batch, *args.context, args.rounds) < 1 or min(args.draft) < 0:
        parser.error("--batch, --context and --rounds take numbers from 1, --draft from 0")
    return args


def _prompts(args: argparse.Namespace, num: int, length: int, vocab_size: int) -> list[Tokens]:
    """Different text for every row: the bundled library's, or random tokens where weights are random."""
    if args.shape:
        random = np.random.default_rng(0)
        return [random.integers(3, vocab_size, length).astype(np.int32) for _ in range(num)]
    codec = TextCodec.load(str(args.model))
    text = np.array([token for snippet in snippets(0) for token in codec.encode_prompt(snippet)], np.int32)
    text = np.tile(text, -(-(num + 1) * length // len(text)))
    return [text[row * length : (row + 1) * length] for row in range(num)]


def _row(shape: Shape, timing: Any, num_bytes: int, copied: float) -> dict[str, Any]:
    step = median(timing.steps)
    per_step = timing.num_tokens / len(timing.steps)
    return {
        "batch": shape.batch,
        "context": shape.context,
        "T": shape.width,
        "step_ms_p50": round(step * 1e3, 4),
        "step_ms_p10_p90": [round(float(x) * 1e3, 4) for x in np.percentile(timing.steps, [10, 90])],
        "target_ms_p50": round(median(timing.targets) * 1e3, 4),
        "forward_ms_p50": round(median(timing.forwards) * 1e3, 4),
        "step_over_forward_p50": round(median(a / b for a, b in zip(timing.steps, timing.forwards, strict=True)), 4),
        "outside_target_ms_p50": round(median(timing.outside) * 1e3, 4),
        "tokens_per_s": round(per_step / step, 2),
        "bytes_per_s": round(num_bytes / step),
        "copy_bytes_per_s": round(copied),
    }


def _line(row: dict[str, Any]) -> str:
    cells = (
        row["batch"],
        row["context"],
        row["T"],
        f"{row['step_ms_p50']:.3f}",
        f"{row['target_ms_p50']:.3f}",
        f"{row['forward_ms_p50']:.3f}",
        f"{1 / row['step_over_forward_p50']:.3f}",
        f"{row['tokens_per_s']:.1f}",
        f"{row['bytes_per_s'] / 1e9:.1f}",
    )
    return " ".join(f"{cell:>12}" for cell in cells)
