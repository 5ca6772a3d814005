"""Do trees pay? Chains and trees at equal settings, through real engines that learn from the same requests.

``python -m benchmarks.draft_shape [MODEL] [--requests N] [--max-tokens N] [--batch N] [--sampling S] [--json]``

Two engines, each with its own cache, complete a stream of requests of which some recur, some are near-variants and some
are new (or none recurs), window by window in turn, so that a machine that slows down slows both. Every output of one is
compared with the other's, token by token. Prints a table and, at the end, one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from benchmarks.environment import head, model_facts, model_name
from benchmarks.exactness import differs
from benchmarks.growth import complete
from benchmarks.workloads import MIXED, NO_REPEATS, Mix, checksum, stream
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, DraftShape, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine import Engine
from ssd.model.loading.load_target import load_model, open_target
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

SHAPES: tuple[DraftShape, ...] = ("chain", "tree")


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print."""
    args = _parse(argv)
    codec = TextCodec.load(str(args.model))
    model = load_model(args.model, dtype=args.dtype, device=args.device)
    print(f"draft_shape: {model_name(args.model)}, {model.device}, {model.dtype}, {args.requests} requests of at most "
          f"{args.max_tokens} new tokens, windows of {args.window}, batch {args.batch}, {args.sampling}, "
          f"draft limit {args.num_speculative_tokens}, seed {args.seed}")  # fmt: skip
    print(
        f"{'stream':>12} {'shape':>6} {'tok/s':>7} {'tokens/step':>12} {'drafted/step':>13} {'tree/chain, median':>19}"
    )
    runs = [compare_shapes(model, codec, mix, args) for mix in (MIXED, NO_REPEATS)]
    print(json.dumps({
        **head("draft_shape"),
        **model_facts(model_name(args.model), model),
        "parameters": {k: v for k, v in vars(args).items() if k != "model"},
        "runs": runs,
    }))  # fmt: skip
    if any(run["mismatches"] for run in runs):
        raise SystemExit("outputs differ: the shape of drafts changed a token")


def compare_shapes(model: PreTrainedModel, codec: TextCodec, mix: Mix, args: argparse.Namespace) -> dict[str, Any]:
    """One stream through an engine of each shape; figures of both."""
    requests = stream(mix, args.requests, args.seed)
    limit = args.max_model_len - args.max_tokens
    prompts = [codec.encode_prompt(request.text)[-limit:] for request in requests]
    temperature, top_p = (0.0, 1.0) if args.sampling == "greedy" else (0.7, 0.9)
    params = [
        SamplingParams(max_tokens=args.max_tokens, temperature=temperature, top_p=top_p, seed=index)
        for index in range(len(prompts))
    ]
    tokens_per_s: dict[str, list[float]] = {shape: [] for shape in SHAPES}
    num_tokens = num_mismatches = 0
    with ExitStack() as stack:
        engines = {shape: _engine(model, codec, shape, stack, args) for shape in SHAPES}
        for number, first in enumerate(range(0, len(prompts), args.window)):
            span = range(first, min(first + args.window, len(prompts)))
            outputs = {}
            for shape in SHAPES if number % 2 == 0 else SHAPES[::-1]:
                outputs[shape], seconds = complete(engines[shape], prompts, params, span)
                tokens_per_s[shape].append(sum(map(len, outputs[shape])) / seconds)
            num_tokens += sum(map(len, outputs["chain"]))
            for index, one, other in zip(span, outputs["chain"], outputs["tree"], strict=True):
                num_mismatches += differs(engines["chain"].target, prompts[index], params[index], other, one)
        ratios = [tree / chain for tree, chain in zip(tokens_per_s["tree"], tokens_per_s["chain"], strict=True)]
        found: dict[str, Any] = {}
        for shape, engine in engines.items():
            metrics = engine.metrics
            found[shape] = {
                "tokens_per_s": round(median(tokens_per_s[shape]), 1),
                "tokens_per_step": round(metrics.mean_acceptance_length, 3),
                "drafted_per_step": round(metrics.num_draft_tokens / metrics.num_verify_steps, 3),
                "drafter_failures": metrics.drafter_failures,
            }
            ratio = f"{median(ratios):.3f}" if shape == "tree" else ""
            print(f"{mix.name:>12} {shape:>6} {found[shape]['tokens_per_s']:>7.0f} "
                  f"{found[shape]['tokens_per_step']:>12.2f} {found[shape]['drafted_per_step']:>13.2f} "
                  f"{ratio:>11}")  # fmt: skip
    ranked = sorted(ratios)
    return {
        "stream": mix.name,
        "checksum": checksum(requests),
        "output_tokens": num_tokens,
        "mismatches": num_mismatches,
        **found,
        "tree_by_chain": round(median(ratios), 3),
        "tree_by_chain_quartiles": [round(ranked[len(ranked) // 4], 3), round(ranked[3 * len(ranked) // 4], 3)],
    }


def _engine(
    model: PreTrainedModel, codec: TextCodec, shape: DraftShape, stack: ExitStack, args: argparse.Namespace
) -> Engine:
    draft = DraftConfig(num_speculative_tokens=args.num_speculative_tokens, draft_shape=shape)
    target = open_target(
        model, num_slots=args.batch, max_length=args.max_model_len, max_draft_tokens=args.num_speculative_tokens
    )
    caches = stack.enter_context(CacheSet(CacheConfig(), fingerprint=codec.fingerprint))
    engine = Engine(
        target,
        drafter=make_drafter("ssd", draft),
        codec=codec,
        caches=caches,
        config=EngineConfig(max_num_seqs=args.batch),
        draft=draft,
    )
    engine.warm_up()
    return engine


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft_shape", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", nargs="?", type=Path, default=MODEL_PATH)
    add("--requests", type=int, default=120)
    add("--max-tokens", type=int, default=64)
    add("--window", type=int, default=6)
    add("--batch", type=int, default=1)
    add("--sampling", choices=("greedy", "sampled"), default="greedy")
    add("--num-speculative-tokens", type=int, default=DraftConfig().num_speculative_tokens)
    add("--max-model-len", type=int, default=512)
    add("--seed", type=int, default=0)
    add("--dtype", default="float32")
    add("--device", default="auto")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
