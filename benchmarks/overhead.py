"""Is it ever slower? Speculation on against off where there is nothing to gain, at every batch size.

``python -m benchmarks.overhead [MODEL] [--batch B...] [--pairs N] [--json]``

Two kinds of traffic, sampled at temperature 1 with a seed of its own for every request, so that little comes again:

1. cold: every pair begins with an empty cache, and no prompt comes twice;
2. adversarial: the cache holds other answers to the same prompts, so that long matches lie.

A pair is the same requests with speculation and without, in turn, the order changing from pair to pair. Ratios are
tokens/s on over off, and time to the first token on over off; medians over pairs with a bootstrap interval of 95 %.
Outputs of both must be equal token by token. Prints a table; the last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.environment import head, model_facts, model_name
from benchmarks.exactness import differs
from benchmarks.models import add_model
from benchmarks.workloads import snippets
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.drafter import SuffixDrafter
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import load_model, open_target
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

TRAFFIC = ("cold", "adversarial")
_PROMPT_TOKENS = 96
_RESAMPLES = 2000


@dataclass(slots=True)
class Half:
    """One side of a pair: seconds for all requests, mean seconds to the first token, what was said."""

    seconds: float
    first_token_s: float
    outputs: list[list[int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add_model(parser)
    add("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="B")
    add("--pairs", type=int, default=30, help="(default: %(default)s)")
    add("--max-tokens", type=int, default=32, help="of each request (default: %(default)s)")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--out", type=Path, help="also write the JSON line to this file")
    add("--json", action="store_true", help="accepted for symmetry: the JSON line is always the last")
    args = parser.parse_args(argv)
    parameters = {"batch": args.batch, "pairs": args.pairs, "max_tokens": args.max_tokens}
    print(f"overhead: {model_name(args.model)}, {json.dumps(parameters)}")
    model = load_model(args.model, dtype=args.dtype, device=args.device)
    codec = TextCodec.load(str(args.model))
    print(f"{'traffic':>12} {'batch':>6} {'tokens/s':>9} {'95 %':>15} {'first token':>12} {'95 %':>15} {'drafted':>8}")
    rows, num_mismatches = [], 0
    for batch in args.batch:
        for row in compare(model, codec, batch, args.pairs, args.max_tokens):
            num_mismatches += row["mismatches"]
            rows.append(row)
            print(
                f"{row['traffic']:>12} {batch:>6} "
                f"{row['tokens_ratio_p50']:>9.3f} {_interval(row['tokens_ratio_95']):>15} "
                f"{row['first_token_ratio_p50']:>12.3f} {_interval(row['first_token_ratio_95']):>15} "
                f"{row['drafted_per_step']:>8.2f}",
                flush=True,
            )
    result = {
        **head("overhead"),
        **model_facts(model_name(args.model), model),
        "parameters": parameters,
        "mismatches": num_mismatches,
        "rows": rows,
    }
    line = json.dumps(result)
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(num_mismatches > 0 and model.dtype == torch.float32)


def compare(
    model: PreTrainedModel,
    codec: TextCodec,
    batch: int,
    num_pairs: int,
    max_tokens: int,
    *,
    most_id: int | None = None,
) -> Iterator[dict[str, Any]]:
    """A row of the result for each kind of traffic; how many outputs differ is in it.

    most_id : prompts are ids modulo this, for a model of another vocabulary.
    """
    # Keys and values kept from the other answers would be the one side's alone.
    draft, config = DraftConfig(), EngineConfig(max_num_seqs=batch, enable_prefix_caching=False)
    targets = [
        open_target(
            model,
            num_slots=batch,
            max_length=_PROMPT_TOKENS + max_tokens + 8,
            max_draft_tokens=draft.num_speculative_tokens,
            keeps_top=is_on and draft.recycling,
        )
        for is_on in (True, False)
    ]
    encoded = (codec.encode_prompt(text)[-_PROMPT_TOKENS:] for seed in range(8) for text in snippets(seed))
    texts = [[token % most_id for token in text] if most_id else text for text in encoded]
    for traffic in TRAFFIC:
        drafter = SuffixDrafter()
        on = Engine(targets[0], drafter=drafter, codec=codec, config=config, draft=draft)
        off = Engine(targets[1], drafter=make_drafter("none", draft), codec=codec, config=config, draft=draft)
        on.warm_up()
        off.warm_up()
        yield _row(on, off, drafter, texts, traffic, num_pairs, max_tokens)


def _row(
    on: Engine,
    off: Engine,
    drafter: SuffixDrafter,
    texts: Sequence[list[int]],
    traffic: str,
    num_pairs: int,
    max_tokens: int,
) -> dict[str, Any]:
    batch = on.target.num_slots
    tokens, firsts = [], []
    num_mismatches = 0
    for pair in range(num_pairs + 1):
        prompts = [texts[(pair * batch + row) % len(texts)] for row in range(batch)]
        with CacheSet(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
            on.caches = caches
            drafter.model_of(caches.get("default").learned)  # made once a namespace, not once a request
            if traffic == "adversarial":
                _run(on, prompts, max_tokens, seed=10_000 + pair * batch)
                caches.maintain()
            order = (on, off) if pair % 2 else (off, on)
            halves = {id(engine): _run(engine, prompts, max_tokens, seed=pair * batch) for engine in order}
            on.caches = None
        ours, theirs = halves[id(on)], halves[id(off)]
        for row, (prompt, got, want) in enumerate(zip(prompts, ours.outputs, theirs.outputs, strict=True)):
            num_mismatches += differs(off.target, prompt, _sampling(max_tokens, pair * batch + row), got, want)
        if pair:  # the first one warms up
            num_tokens = [sum(map(len, half.outputs)) for half in (ours, theirs)]
            tokens.append((num_tokens[0] / ours.seconds) / (num_tokens[1] / theirs.seconds))
            firsts.append(ours.first_token_s / theirs.first_token_s)
    return {
        "traffic": traffic,
        "batch": batch,
        "pairs": num_pairs,
        "tokens_ratio_p50": round(float(np.median(tokens)), 4),
        "tokens_ratio_95": bootstrap(tokens),
        "first_token_ratio_p50": round(float(np.median(firsts)), 4),
        "first_token_ratio_95": bootstrap(firsts),
        "drafted_per_step": round(on.metrics.num_draft_tokens / max(1, on.metrics.num_verify_steps), 3),
        "accepted_per_step": round(on.metrics.num_accepted_tokens / max(1, on.metrics.num_verify_steps), 3),
        "mismatches": num_mismatches,
    }


def bootstrap(values: Sequence[float], seed: int = 0) -> list[float]:
    """The interval that holds 95 % of the medians of samples drawn with replacement (Efron 1979)."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (_RESAMPLES, len(values)))
    return [round(float(bound), 4) for bound in np.percentile(np.median(drawn, axis=1), [2.5, 97.5])]


def _run(engine: Engine, prompts: Sequence[list[int]], max_tokens: int, *, seed: int) -> Half:
    """All prompts at once, row i with the seed ``seed + i``."""
    outputs: dict[str, list[int]] = {}
    first: dict[str, float] = {}
    began = time.perf_counter()
    for row, prompt in enumerate(prompts):
        name = f"{seed}-{row}"
        outputs[name] = []
        sampling = _sampling(max_tokens, seed + row)
        engine.submit(Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
            if output.token_ids:
                first.setdefault(output.request_id, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    return Half(seconds, float(np.mean(list(first.values()))), list(outputs.values()))


def _sampling(max_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)


def _interval(bounds: Sequence[float]) -> str:
    return f"{bounds[0]:.3f} ... {bounds[1]:.3f}"


if __name__ == "__main__":
    sys.exit(main())
