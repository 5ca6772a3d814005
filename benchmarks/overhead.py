"""Is it ever slower? Speculation on against off where there is nothing to gain, at every batch size.

``python -m benchmarks.overhead [MODEL] [--batch B...] [--pairs N] [--out FILE]``

Two kinds of traffic, sampled at temperature 1 with a seed of its own for every request, so that little comes again:

1. cold: every pair begins with an empty cache, and no prompt comes twice;
2. adversarial: the cache holds other answers to the same prompts, so that long matches lie.

A pair is the same requests with speculation and without, in turn, the order changing from pair to pair. Ratios are
tokens/s on over off, and time to the first token on over off; medians over pairs with a bootstrap interval of 95 %.
Outputs of both must be equal token by token. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.run import Option, Run, bootstrap
from benchmarks.ways import Comparison, ask, contest, open_engine, requests_of
from benchmarks.workloads import snippets
from ssd.config import CacheConfig, SamplingParams
from ssd.drafting.drafter import SuffixDrafter
from ssd.engine import Engine
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

TRAFFIC = ("cold", "adversarial")
OPTIONS: dict[str, Any] = {
    "batch": Option(default=[1, 2, 4, 8, 16, 32], metavar="B"),
    "pairs": 30,
    "max_tokens": Option(default=32, help="of each request"),
}
_SPREAD = "{%s_p50:.3f} ({%s_95[0]:.3f} ... {%s_95[1]:.3f})"
COLUMNS = (
    ("traffic", "{traffic}"),
    ("batch", "{batch:>2}"),
    ("tokens/s, 95 %", _SPREAD.replace("%s", "tokens_ratio")),
    ("first token, 95 %", _SPREAD.replace("%s", "first_token_ratio")),
    ("drafted a step", "{drafted_per_step:.2f}"),
)
_PROMPT_TOKENS = 96


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differs."""
    run = Run("overhead", __doc__, argv, OPTIONS, COLUMNS, has_model=True, has_shapes=True)
    args = run.args
    codec, model = run.load()
    for batch in args.batch:
        for row in compare(model, codec, batch, args.pairs, args.max_tokens):
            run.row(row)
    mismatches = sum(row["mismatches"] for row in run.rows)
    failed = mismatches > 0 and model.dtype == torch.float32
    return run.end(mismatches=mismatches, rows=run.rows, is_wrong=failed)


def compare(
    model: PreTrainedModel, codec: TextCodec, batch: int, num_pairs: int, max_tokens: int
) -> Iterator[dict[str, Any]]:
    """A row of the result for each kind of traffic; how many outputs differ is in it."""
    texts = [codec.encode_prompt(text)[-_PROMPT_TOKENS:] for seed in range(8) for text in snippets(seed)]
    length = _PROMPT_TOKENS + max_tokens + 8
    for traffic in TRAFFIC:
        drafter = SuffixDrafter()
        on, off = (open_engine(model, way, slots=batch, length=length, codec=codec) for way in (drafter, "none"))
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
    tokens, firsts, comparison = [], [], Comparison()
    for pair in range(num_pairs + 1):
        first = pair * batch
        prompts = [texts[(first + row) % len(texts)] for row in range(batch)]
        requests = requests_of(prompts, [_sampling(max_tokens, first + row) for row in range(batch)])
        with CacheSet(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
            on.caches = caches
            drafter.model_of(caches.get("default").learned)  # made once a namespace, not once a request
            if traffic == "adversarial":
                ask(on, requests_of(prompts, [_sampling(max_tokens, 10_000 + first + row) for row in range(batch)]))
                caches.maintain()
            tallies = contest({"on": on, "off": off}, requests, pair, comparison)
            on.caches = None
        if pair:  # the first one warms up
            tokens.append(tallies["on"].tokens_per_s / tallies["off"].tokens_per_s)
            firsts.append(fmean(tallies["on"].firsts_s) / fmean(tallies["off"].firsts_s))
    steps = max(1, on.metrics.num_verify_steps)
    return {
        "traffic": traffic,
        "batch": batch,
        "pairs": num_pairs,
        "tokens_ratio_p50": round(median(tokens), 4),
        "tokens_ratio_95": bootstrap(tokens),
        "first_token_ratio_p50": round(median(firsts), 4),
        "first_token_ratio_95": bootstrap(firsts),
        "drafted_per_step": round(on.metrics.num_draft_tokens / steps, 3),
        "accepted_per_step": round(on.metrics.num_accepted_tokens / steps, 3),
        "mismatches": comparison.num_mismatches,
    }


def _sampling(max_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)


if __name__ == "__main__":
    sys.exit(main())
