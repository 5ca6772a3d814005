"""What does each source of drafts bring where nothing was said before, and what do all bring together?

``python -m benchmarks.sources [--model DIR] [--head DIR] [--draft-model DIR] [--requests N] [--rounds N] [--out FILE]``

Text that never repeats: pieces of the standard library, no prompt twice, and caches that are empty when a round begins.
Speculation off, every source alone (what the index and the request's own text hold, the target's own candidates, a
draft head, a draft model) and all together answer the same requests in turn, greedy and sampled; a seed for every
request. Every output is compared with speculation off. Ratios are of tokens/s within a round, prompts included; medians
over rounds, with the least and the most. Beside them ratios by CPU time, which other programs on the machine change
less. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.models import model_name
from benchmarks.run import SPREAD, Option, Run, spread, spread_text
from benchmarks.ways import Comparison, Tally, contest, requests_of
from benchmarks.workloads import NO_REPEATS, made_stream
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.engine import Engine
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

OFF, ALL = "off", "all together"
RETRIEVAL, RECYCLING, HEAD, MODEL = "retrieval", "recycling", "draft head", "draft model"

OPTIONS: dict[str, Any] = {
    "head": Option(default=None, kind=Path, metavar="DIR", help="a draft head of the model (default: the bundled one)"),
    "draft_model": Option(default=None, metavar="DIR", help="a smaller model with the same tokenizer"),
    "requests": Option(default=16, help="of a round"),
    "max_tokens": Option(default=64, help="of each request"),
    "prompt_tokens": Option(default=320, help="prompts are cut to"),
    "rounds": 3,
    "temperature": Option(default=0.7, help="of the sampled runs"),
    "top_p": Option(default=0.9, help="of the sampled runs"),
    "num_speculative_tokens": DraftConfig().num_speculative_tokens,
    "seed": 0,
}
COLUMNS = tuple(
    (name, SPREAD.replace("%s", key) if key not in ("sampling", "source") else f"{{{key}}}")
    for name, key in (
        ("sampling", "sampling"),
        ("source", "source"),
        ("tokens a pass", "tokens_per_pass"),
        ("over off", "over_off"),
        ("by CPU time", "over_off_by_cpu_time"),
        ("drafted a pass", "drafted_per_pass"),
    )
)

Round = Mapping[str, Tally]
"""What each way made of the requests of one round."""


@dataclass(frozen=True, slots=True)
class Way:
    """Which sources draft."""

    name: str
    retrieval: bool = False
    recycling: bool = False
    head: Path | None = None
    draft_model: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differs."""
    run = Run("sources", __doc__, argv, OPTIONS, COLUMNS, has_model=True, unsaid=("head",))
    args = run.args
    codec = TextCodec.load(str(args.model))
    stream = made_stream(NO_REPEATS, codec, args.requests, args.seed, args.prompt_tokens)
    head = args.head or own_head(args.model)
    run.parameters |= {
        "requests": len(stream.prompts),
        "draft_head": None if head is None else head.name,
        "draft_model": None if args.draft_model is None else model_name(args.draft_model),
        "stream": stream.checksum,
    }
    engines = {way.name: _open(way, codec, args) for way in ways(head, args.draft_model)}
    runs: list[dict[str, Any]] = []
    for sampling in ("greedy", "sampled"):
        rounds, comparison = run_rounds(engines, codec, stream.prompts, _params(args, sampling), args.rounds)
        rows = [run.row({"sampling": sampling, **row}) for row in rows_of(rounds)]
        found = all_over_best(rounds)
        if found is not None:
            run.say(f"all together over {found['best']}, the best alone: {spread_text(found['ratio'], 3)}")
        run.say(f"{comparison.num_tokens} tokens compared, {comparison.num_mismatches} mismatches")
        runs.append(
            {
                "sampling": sampling,
                "compared_tokens": comparison.num_tokens,
                "mismatches": comparison.num_mismatches,
                "rows": rows,
                "all_over_best": found,
            }
        )
    run.ran_on(next(iter(engines.values())).target)
    return run.end(runs=runs, is_wrong=any(each["mismatches"] for each in runs))


def ways(head: Path | None, draft_model: str | None) -> list[Way]:
    """Speculation off, each source that there is alone, and all of them together."""
    alone = [Way(RETRIEVAL, retrieval=True), Way(RECYCLING, recycling=True)]
    alone += [Way(HEAD, head=head)] if head is not None else []
    alone += [Way(MODEL, draft_model=draft_model)] if draft_model is not None else []
    return [Way(OFF), *alone, Way(ALL, retrieval=True, recycling=True, head=head, draft_model=draft_model)]


def own_head(model: str | Path) -> Path | None:
    """The draft head that comes with the bundled model, where it is the model and one does."""
    shipped = MODEL_PATH.parent / "head"
    return shipped if Path(model) == MODEL_PATH and (shipped / "config.json").is_file() else None


def _open(way: Way, codec: TextCodec, args: argparse.Namespace) -> Engine:
    """An engine of one slot with a model of its own, as it is served."""
    limit = args.num_speculative_tokens
    length = args.prompt_tokens + args.max_tokens + 8
    engine = Engine.from_pretrained(
        args.model,
        dtype=args.dtype,
        device=args.device,
        codec=codec,
        config=EngineConfig(max_num_seqs=1, max_model_len=length, enable_prefix_caching=False),
        draft=DraftConfig(num_speculative_tokens=limit, retrieval=way.retrieval, recycling=way.recycling),
        drafter="none" if way.name == OFF else "ssd",
        draft_head=way.head,
        draft_model=way.draft_model,
    )
    engine.warm_up()
    return engine


def _params(args: argparse.Namespace, sampling: str) -> Callable[[int], SamplingParams]:
    """Of the request of a number."""
    if sampling == "greedy":
        return lambda asked: SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    return lambda asked: SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=asked
    )


def run_rounds(
    engines: Mapping[str, Engine],
    codec: TextCodec,
    prompts: Sequence[list[int]],
    params: Callable[[int], SamplingParams],
    num_rounds: int,
) -> tuple[list[Round], Comparison]:
    """Every request to every engine, one at a time, before the next request; who is first changes with each.

    A round begins with empty caches, one of each engine's own. Numbers of requests go on counting over rounds, so that
    rounds differ in their seeds.
    """
    rounds: list[Round] = []
    comparison, off_last = Comparison(), {name: engines[name] for name in [*list(engines)[1:], OFF]}
    for number in range(num_rounds):
        tallies = {name: Tally() for name in engines}
        with ExitStack() as stack:
            for engine in engines.values():
                engine.caches = stack.enter_context(CacheSet(CacheConfig(), fingerprint=codec.fingerprint))
            for asked, prompt in enumerate(prompts, number * len(prompts)):
                contest(off_last, requests_of([prompt], [params(asked)], asked), asked, comparison, tallies)
            for engine in engines.values():
                engine.caches = None
        rounds.append(tallies)
    return rounds, comparison


def _ratios(rounds: Sequence[Round], name: str, other: str, *, by_cpu_time: bool = False) -> list[float]:
    """Of tokens/s within each round."""
    rate = "tokens_per_cpu_s" if by_cpu_time else "tokens_per_s"
    return [getattr(each[name], rate) / getattr(each[other], rate) for each in rounds]


def rows_of(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """A row a way: medians over rounds, with the least and the most."""
    return [
        {
            "source": name,
            "tokens_per_pass": spread([each[name].tokens_per_pass for each in rounds]),
            "tokens_per_s": spread([each[name].tokens_per_s for each in rounds], 2),
            "over_off": spread(_ratios(rounds, name, OFF)),
            "over_off_by_cpu_time": spread(_ratios(rounds, name, OFF, by_cpu_time=True)),
            "drafted_per_pass": spread([each[name].drafted / each[name].passes for each in rounds]),
            "accepted_per_pass": spread([each[name].accepted / each[name].passes for each in rounds]),
        }
        for name in rounds[0]
    ]


def all_over_best(rounds: Sequence[Round]) -> dict[str, Any] | None:
    """Which source is the best alone, and tokens/s of all together over its; None where there is no such pair."""
    alone = [name for name in rounds[0] if name not in (OFF, ALL)]
    if not alone or ALL not in rounds[0]:
        return None
    best = max(alone, key=lambda name: median(_ratios(rounds, name, OFF)))
    return {
        "best": best,
        "ratio": spread(_ratios(rounds, ALL, best)),
        "ratio_by_cpu_time": spread(_ratios(rounds, ALL, best, by_cpu_time=True)),
    }


if __name__ == "__main__":
    sys.exit(main())
