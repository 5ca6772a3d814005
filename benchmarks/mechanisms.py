"""What is each mechanism worth: all of them, and all but one, on the same requests in turn.

``python -m benchmarks.mechanisms [MODEL] [--requests N] [--rounds N] [--out FILE]``

Requests of which some recur and requests that never do, pieces of the standard library, each greedy and sampled with a
seed of its own, one at a time; caches are empty when a round begins. Every output is compared with speculation off.
"worth" is the rate of all mechanisms over that without the one named, so above 1 it pays, by CPU time, which other
programs on the machine change less; medians over rounds, with the least and the most. Prints a table; the last line of
stdout is one JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.run import SPREAD, Option, Run, spread
from benchmarks.sources import OFF, Round, run_rounds
from benchmarks.ways import open_engine
from benchmarks.workloads import MIXED, NO_REPEATS, made_stream
from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting.drafter import SuffixDrafter
from ssd.engine import Engine

ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """What is left out of an engine: by its settings, or by ``take_out`` of one that was opened."""

    name: str
    draft: DraftConfig = field(default_factory=DraftConfig)
    keeps_prompts: bool = True
    take_out: Callable[[Engine, SuffixDrafter], None] | None = None


def _no_guesses(_: Engine, drafter: SuffixDrafter) -> None:
    drafter.observe_scores = lambda scored: None  # type: ignore[method-assign]


def _no_distrust(engine: Engine, _: SuffixDrafter) -> None:
    engine._proposals._kept_shares.share = lambda temperature: 1.0  # type: ignore[method-assign]


def _no_rest(engine: Engine, _: SuffixDrafter) -> None:
    throttle = engine._proposals._throttle
    throttle.due = lambda rows: [True] * len(rows)  # type: ignore[method-assign]
    throttle.tells = lambda *, has_drafts: True  # type: ignore[method-assign]


def _no_cut(engine: Engine, _: SuffixDrafter) -> None:
    prices = engine._proposals._price_list
    prices.paying_width = lambda drafts, shares: max(len(draft.token_ids) for draft in drafts)  # type: ignore[method-assign]


MECHANISMS: Final = (
    Mechanism(name="index, own text", draft=DraftConfig(retrieval=False)),
    Mechanism(name="recycling", draft=DraftConfig(recycling=False)),
    Mechanism(name="guesses", take_out=_no_guesses),
    Mechanism(name="trees", draft=DraftConfig(draft_shape="chain")),
    Mechanism(name="trust by temperature", take_out=_no_distrust),
    Mechanism(name="rest of fruitless rows", take_out=_no_rest),
    Mechanism(name="cut to what pays", take_out=_no_cut),
    Mechanism(name="kept prompts", keeps_prompts=False),
)
OPTIONS = {
    "requests": Option(default=16, help="of a round"),
    "max_tokens": Option(default=64, help="of each request"),
    "prompt_tokens": Option(default=192, help="prompts are cut to"),
    "rounds": 3,
    "temperature": Option(default=0.7, help="of the sampled runs"),
    "seed": 0,
}
COLUMNS = tuple(
    (name, SPREAD.replace("%s", key) if key in ("worth", "tokens_per_pass") else f"{{{key}}}")
    for name, key in (
        ("workload", "workload"),
        ("without", "without"),
        ("tokens a pass", "tokens_per_pass"),
        ("worth", "worth"),
        ("passes", "worth_in_passes"),
    )
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differs."""
    run = Run("mechanisms", __doc__, argv, OPTIONS, COLUMNS, has_model=True)
    args = run.args
    codec, model = run.load()
    length = args.prompt_tokens + args.max_tokens + 8

    def opened(mechanism: Mechanism, drafter: str | SuffixDrafter) -> Engine:
        config = EngineConfig(max_num_seqs=1, enable_prefix_caching=mechanism.keeps_prompts)
        engine = open_engine(model, drafter, slots=1, length=length, draft=mechanism.draft, config=config, codec=codec)
        if mechanism.take_out is not None and isinstance(drafter, SuffixDrafter):
            mechanism.take_out(engine, drafter)
        return engine

    engines = {OFF: opened(Mechanism(name=OFF), "none"), ALL: opened(Mechanism(name=ALL), SuffixDrafter())}
    for each in MECHANISMS:
        engines[each.name] = opened(each, SuffixDrafter(retrieval=each.draft.retrieval, recycling=each.draft.recycling))
    num_different = 0
    for mix in (MIXED, NO_REPEATS):
        prompts = made_stream(mix, codec, args.requests, args.seed, args.prompt_tokens).prompts
        for temperature in (0.0, args.temperature):
            rounds, comparison = run_rounds(engines, codec, prompts, _params(args.max_tokens, temperature), args.rounds)
            num_different += comparison.num_mismatches
            workload = f"{mix.name}, {'sampled' if temperature else 'greedy'}"
            for name in engines:
                run.row({"workload": workload, **_row(rounds, name)})
    return run.end(mismatches=num_different, rows=run.rows, is_wrong=num_different > 0)


def _params(max_tokens: int, temperature: float) -> Callable[[int], SamplingParams]:
    """Of the request of a number."""
    return lambda asked: SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=asked)


def _row(rounds: Sequence[Round], name: str) -> dict[str, Any]:
    rates = [each[ALL].tokens_per_cpu_s / each[name].tokens_per_cpu_s for each in rounds]
    passes = sum(each[name].passes for each in rounds) / sum(each[ALL].passes for each in rounds)
    return {
        "without": name if name in (OFF, ALL) else f"without {name}",
        "tokens_per_pass": spread([each[name].tokens_per_pass for each in rounds]),
        "drafted_per_pass": spread([each[name].drafted / each[name].passes for each in rounds]),
        "worth": spread(rates),
        "worth_in_passes": round(passes, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
