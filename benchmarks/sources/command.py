"""What does each source of drafts bring where nothing was said before, and what do all bring together?

``python -m benchmarks.sources [--model DIR] [--head DIR] [--draft-model DIR] [--requests N] [--rounds N] [--json]``

Text that never repeats: pieces of the standard library, no prompt twice, and caches that are empty when a round begins.
Speculation off, every source alone (what the index and the request's own text hold, the target's own candidates, a
draft head, a draft model) and all together answer the same requests in turn, greedy and sampled; a seed for every
request. Every output is compared with speculation off. Ratios
are of tokens/s within a round, prompts included; medians over rounds, with the least and the most. Beside them ratios
by CPU time, which other programs on the machine change less. Prints tables; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.environment import head, model_facts, model_name
from benchmarks.models import add_model
from benchmarks.sources.contenders import Contender, contenders, open_engine, own_head
from benchmarks.sources.rounds import Outcome, run_rounds, spread_text
from benchmarks.streams import made_stream
from benchmarks.workloads import NO_REPEATS
from ssd.config import DraftConfig, SamplingParams
from ssd.engine import Engine
from ssd.text.codec import TextCodec

_COLUMNS = ("source", "tokens a pass", "over off", "by CPU time", "tokens/s", "drafted", "accepted")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differs."""
    args = _parse(argv)
    codec = TextCodec.load(str(args.model))
    stream = made_stream(NO_REPEATS, codec, args.requests, args.seed, args.prompt_tokens)
    draft_head = args.head or own_head(args.model)
    chosen = contenders(draft_head, args.draft_model)
    parameters = {
        "requests": len(stream.prompts),
        "max_tokens": args.max_tokens,
        "prompt_tokens": args.prompt_tokens,
        "rounds": args.rounds,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "num_speculative_tokens": args.num_speculative_tokens,
        "draft_head": None if draft_head is None else draft_head.name,
        "draft_model": None if args.draft_model is None else model_name(args.draft_model),
        "seed": args.seed,
        "stream": stream.checksum,
    }
    print(f"sources: {model_name(args.model)}, {json.dumps(parameters)}")
    engines = {contender.name: _open(contender, codec, args) for contender in chosen}
    runs: list[dict[str, Any]] = []
    num_mismatches = 0
    for sampling in ("greedy", "sampled"):
        outcome = run_rounds(engines, codec, stream.prompts, partial(_params, args, sampling), args.rounds)
        num_mismatches += outcome.num_mismatches
        runs.append(_summary(sampling, outcome))
        _print(runs[-1])
    result = {
        **head("sources"),
        **model_facts(model_name(args.model), next(iter(engines.values())).target),
        "parameters": parameters,
        "runs": runs,
    }
    line = json.dumps(result)
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(num_mismatches > 0)


def _open(contender: Contender, codec: TextCodec, args: argparse.Namespace) -> Engine:
    return open_engine(
        contender,
        args.model,
        codec,
        max_length=args.prompt_tokens + args.max_tokens + 8,
        limit=args.num_speculative_tokens,
        dtype=args.dtype,
        device=args.device,
    )


def _params(args: argparse.Namespace, sampling: str, asked: int) -> SamplingParams:
    if sampling == "greedy":
        return SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    return SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=asked)


def _summary(sampling: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "sampling": sampling,
        "compared_tokens": outcome.num_tokens,
        "mismatches": outcome.num_mismatches,
        "rows": outcome.rows(),
        "all_over_best": outcome.all_over_best(),
    }


def _print(run: dict[str, Any]) -> None:
    print(f"\n{run['sampling']}: {run['compared_tokens']} tokens compared, "
          f"{run['mismatches']} mismatches; medians (least ... most) over rounds")  # fmt: skip
    print(" ".join(f"{title:>22}" for title in _COLUMNS))
    for row in run["rows"]:
        cells = (
            row["source"],
            spread_text(row["tokens_per_pass"]),
            spread_text(row["over_off"]),
            spread_text(row["over_off_by_cpu_time"]),
            spread_text(row["tokens_per_s"], 1),
            f"{row['drafted_per_pass'][0]:.2f}",
            f"{row['accepted_per_pass'][0]:.2f}",
        )
        print(" ".join(f"{cell:>22}" for cell in cells), flush=True)
    if (found := run["all_over_best"]) is not None:
        print(f"all together over {found['best']}, the best alone: {spread_text(found['ratio'], 3)}; by CPU time "
              f"{spread_text(found['ratio_by_cpu_time'], 3)}", flush=True)  # fmt: skip


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sources", description=(__doc__ or "").split("\n")[0])
    add_model(parser)
    add = parser.add_argument
    add("--head", type=Path, metavar="DIR", help="a draft head of the model (default: the bundled model's own)")
    add("--draft-model", metavar="DIR", help="a smaller model with the same tokenizer")
    add("--requests", type=int, default=16, help="of a round (default: %(default)s)")
    add("--max-tokens", type=int, default=64, help="of each request (default: %(default)s)")
    add("--prompt-tokens", type=int, default=320, help="prompts are cut to (default: %(default)s)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--temperature", type=float, default=0.7, help="of the sampled runs (default: %(default)s)")
    add("--top-p", type=float, default=0.9, help="of the sampled runs (default: %(default)s)")
    add("--num-speculative-tokens", type=int, default=DraftConfig().num_speculative_tokens)
    add("--seed", type=int, default=0)
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--out", type=Path, help="also write the JSON line to this file")
    add("--json", action="store_true", help="accepted for symmetry: the JSON line is always the last")
    args = parser.parse_args(argv)
    if min(args.requests, args.max_tokens, args.prompt_tokens, args.rounds) < 1:
        parser.error("--requests, --max-tokens, --prompt-tokens and --rounds take numbers from 1")
    return args
