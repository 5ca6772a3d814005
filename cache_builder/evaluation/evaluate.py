"""``ssd-cache evaluate``: what a cache would bring on a log, and what it would need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cache_builder.evaluation.costs import StepCosts
from cache_builder.evaluation.log import DEFINITIONS, Int64s, Log, classes_of
from cache_builder.evaluation.oracle import oracle_steps
from cache_builder.evaluation.runs import CacheUse, Outcome, Plan, Run, execute_all
from ssd import __version__

_FEW_TOKENS: Final = 20_000


def unknown(log: Log, plan: Plan, costs: StepCosts) -> list[str]:
    """Those that hold for this evaluation, the weightiest first."""
    left_out = "" if costs.overhead is not None else "the engine's own part and the model's second choices, "
    return [
        "Traffic to come: the figures hold for requests like these, in this order.",
        "Sampling: at a temperature above 0 the model may say something else to the same prompt another time.",
        "Time to the first token: the speed-up is that of output tokens.",
        f"{left_out}draft heads and draft models: they are left out.".capitalize(),
        f"A batch of {plan.batch}: its sequences are taken to draft alike, and to learn from one another when they end."
        if plan.batch > 1
        else "Load: sequences are taken to be decoded one at a time; beside others drafts gain less, see --batch.",
        *(
            ["The time of day: each request is taken to find all earlier ones learned, by all replicas that share."]
            if plan.cache == "growing"
            else []
        ),
        *(
            ["The long run: the log is short, and its beginning, with an empty cache, weighs more than it will."]
            if log.output_lengths[log.with_prompt].sum() < _FEW_TOKENS
            else []
        ),
    ]


Key = tuple[str, int | str]
Flags = npt.NDArray[np.bool_]

LIMITS: Final = (2, 4, 8, 16, 32, 64, 128)
REPLICAS: Final = (2, 4, 16)
_CAPACITIES: Final = tuple(1 << bits for bits in range(14, 31, 2))
_WINDOWS: Final = 10
_MOST_CLASSES: Final = 20
_OTHER_CLASSES: Final = "all other classes"


def evaluate(
    log: Log,
    plan: Plan,
    costs: StepCosts,
    *,
    labels: Sequence[str] | None = None,
    inputs: Sequence[str] = (),
    tokenizer: str = "",
    progress: Callable[[int], None] = lambda num_tokens: None,
) -> dict[str, Any]:
    """The report as it stands in the JSON line and on the page.

    ``labels`` : the class of every request; None: what can be seen. ``progress`` : told how many output tokens were
    decoded, see ``num_to_decode``. Raises CacheError for a warm directory.
    """
    outcomes = execute_all(_runs(log, plan, costs), log, plan.jobs, progress)
    main, judge = outcomes["main", 0], _Judge(log, costs, plan)
    classes = list(labels) if labels is not None else classes_of(log)
    everything = judge.figures(main)
    prompts = log.prompt_lengths[main.requests]
    without = np.setdiff1d(np.arange(len(log)), main.requests)
    return {
        "report": "evaluate",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "parameters": {
            "cache": plan.cache,
            "warm": [directory.name or str(directory) for directory in plan.warm],
            "draft_limit": plan.draft.num_speculative_tokens,
            "shape": "tree" if plan.is_tree else "chain",
            "batch": plan.batch,
            "capacity_tokens": plan.index.capacity_tokens,
            "sample_tokens": plan.sample_tokens,
            "seed": plan.seed,
        },
        "inputs": list(inputs),
        "tokenizer": tokenizer,
        "requests": len(main.requests),
        "prompt_tokens": int(prompts.sum()),
        "cost": costs.as_json(),
        **everything,
        "documents": {"number": len(without), "tokens": int(np.diff(log.starts)[without].sum())},
        "classes": _classes(main, judge, classes),
        "class_definitions": dict(DEFINITIONS) if labels is None else {},
        "acceptance_by_position": _by_position(main),
        "by_source": [
            {"source": source, "drafts": drafts, "drafted": drafted, "accepted": accepted}
            for source, (drafts, drafted, accepted) in main.by_source.items()
        ],
        "growth": _growth(main, judge),
        **_curves(outcomes, plan, judge),
        "needs": _needs(main, log),
        "unknown": unknown(log, plan, costs),
    }


def num_to_decode(log: Log, plan: Plan, costs: StepCosts) -> int:
    """Output tokens that `evaluate` decodes, in all runs together."""
    return sum(run.num_decoded(log) for run in _runs(log, plan, costs).values())


def _runs(log: Log, plan: Plan, costs: StepCosts) -> dict[Key, Run]:
    """Everything that is decoded; of what is the same only one."""
    main = Run(
        curve=costs.curve, draft=plan.draft, index=plan.index, fingerprint=plan.fingerprint, is_tree=plan.is_tree,
        cache=plan.cache, warm=plan.warm, seed=plan.seed,
    )  # fmt: skip
    runs: dict[Key, Run] = {("main", 0): replace(main, counts_shared=True)}
    if not plan.sample_tokens or not main.num_decoded(log):
        return runs
    every = -(-main.num_decoded(log) // plan.sample_tokens)
    sample = replace(main, every=every)
    if every > 1:
        runs["sample", 0] = sample
    limit = plan.draft.num_speculative_tokens
    for fewer in (each for each in LIMITS if each < limit):
        runs["limit", fewer] = replace(sample, draft=replace(plan.draft, num_speculative_tokens=fewer))
    for use in _lesser_uses(plan):
        runs["cache", use] = replace(sample, cache=use)
    if plan.cache == "growing":
        for capacity in _capacities(log, plan):
            runs["capacity", capacity] = replace(sample, index=replace(plan.index, capacity_tokens=capacity))
        for replicas in (each for each in REPLICAS if each <= len(log)):
            runs["isolated", replicas] = replace(sample, replicas=replicas)
    return runs


def _lesser_uses(plan: Plan) -> list[CacheUse]:
    """Ways to use the cache that have less than the plan's."""
    if plan.cache == "none":
        return []
    return ["none", "frozen"] if plan.cache == "growing" and plan.warm else ["none"]


def _capacities(log: Log, plan: Plan) -> list[int]:
    """Capacities below that of the plan at which something would have to leave."""
    return [each for each in _CAPACITIES if each < min(plan.index.capacity_tokens, len(log.tokens))]


class _Judge:
    """What steps are worth."""

    def __init__(self, log: Log, costs: StepCosts, plan: Plan) -> None:
        """``plan.batch`` : rows of a pass, each of which waits for the proposals of all."""
        self._output_lengths, self._costs, self._batch = log.output_lengths, costs, plan.batch
        self._oracle: Int64s | None = None
        if not plan.warm:  # of warm directories the text is not at hand
            texts = [log.tokens[begin:end] for begin, end in pairwise(log.starts.tolist())]
            self._oracle = oracle_steps(texts, log.prompt_lengths, plan.draft.num_speculative_tokens)

    def figures(self, outcome: Outcome, of: Flags | None = None) -> dict[str, Any]:
        """Of all decoded requests, or those that ``of``, bool[r], says."""
        chosen = np.ones(len(outcome.requests), np.bool_) if of is None else of
        drafted = outcome.drafted[np.repeat(chosen, outcome.num_steps)]
        num_steps, num_drafted = len(drafted), int(drafted.sum(dtype=np.int64))
        num_output = int(self._output_lengths[outcome.requests[chosen]].sum())
        num_accepted = int(outcome.num_accepted[chosen].sum())
        assert num_output == num_steps + num_accepted
        propose_s = self._batch * outcome.ns / 1e9 * num_steps / max(1, len(outcome.drafted))
        speedup = self._costs.speed_up(num_output, np.bincount(drafted, minlength=1), propose_s)
        return {
            "output_tokens": num_output,
            "tokens_per_step": _rounded(num_output / num_steps if num_steps else 1.0),
            "of_oracle": None if self._oracle is None else self._of_oracle(outcome.requests[chosen], num_steps),
            "drafted_per_step": _rounded(num_drafted / max(1, num_steps)),
            "acceptance_rate": _rounded(num_accepted / max(1, num_drafted)),
            "speedup": _rounded(speedup),
        }

    def _of_oracle(self, requests: Int64s, num_steps: int) -> float:
        """Tokens a step over those of the best drafts in hindsight."""
        assert self._oracle is not None
        return _rounded(int(self._oracle[requests].sum()) / max(1, num_steps))

    def point(self, outcome: Outcome, *names: str) -> dict[str, Any]:
        """Those of the figures that a curve shows."""
        found = self.figures(outcome)
        return {name: found[name] for name in (*names, "tokens_per_step", "speedup", "output_tokens")}


def _classes(main: Outcome, judge: _Judge, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The largest first; beyond the twentieth all in one."""
    names = np.array(classes, object)[main.requests]
    found, counts = np.unique(names.astype(str), return_counts=True)
    ordered = [str(found[place]) for place in np.argsort(-counts, kind="stable")]
    groups = [(name, names == name) for name in ordered[:_MOST_CLASSES]]
    if len(ordered) > _MOST_CLASSES:
        groups.append((_OTHER_CLASSES, ~np.isin(names.astype(str), ordered[:_MOST_CLASSES])))
    return [{"name": name, "requests": int(of.sum()), **judge.figures(main, of)} for name, of in groups]


def _by_position(main: Outcome) -> list[dict[str, int]]:
    """Position 1 is the first token of a draft; of a tree all tokens that stand there."""
    drafted, accepted = main.by_depth
    last = int(np.flatnonzero(drafted).max(initial=-1))
    return [
        {"position": depth + 1, "drafted": int(drafted[depth]), "accepted": int(accepted[depth])}
        for depth in range(last + 1)
    ]


def _growth(main: Outcome, judge: _Judge) -> list[dict[str, Any]]:
    """Tenths of the requests, in their order; each says how many had come by its end."""
    places, count = np.arange(len(main.requests)), len(main.requests)
    bounds = sorted({round(count * window / _WINDOWS) for window in range(_WINDOWS + 1)})
    found = []
    for begin, end in pairwise(bounds):
        figures = judge.figures(main, (places >= begin) & (places < end))
        found.append({"requests": end, **{name: figures[name] for name in _GROWTH_FIGURES}})
    return found


_GROWTH_FIGURES: Final = ("output_tokens", "tokens_per_step", "speedup")


def _curves(outcomes: dict[Key, Outcome], plan: Plan, judge: _Judge) -> dict[str, list[dict[str, Any]]]:
    """All that needed runs of their own; the plan's own setting closes every curve that has other points."""
    here = outcomes.get(("sample", 0), outcomes["main", 0])

    def others(kind: str) -> list[tuple[Any, Outcome]]:
        return [(key[1], outcome) for key, outcome in _in_order(outcomes) if key[0] == kind]

    limits = [*others("limit"), (plan.draft.num_speculative_tokens, here)]
    capacities = [*others("capacity"), (plan.index.capacity_tokens, here)] if plan.cache == "growing" else []
    uses = [*others("cache"), (plan.cache, here)]
    sharing = []
    for replicas, outcome in others("isolated"):
        sharing.append({"replicas": replicas, "is_shared": False, **judge.point(outcome)})
        sharing.append({"replicas": replicas, "is_shared": True, **judge.point(here)})
    is_asked = plan.sample_tokens > 0
    return {
        "by_cache": [{"cache": use, **judge.point(outcome)} for use, outcome in uses] if is_asked else [],
        "by_capacity": [
            {"capacity_tokens": capacity, "bytes": outcome.index_bytes, **judge.point(outcome)}
            for capacity, outcome in (capacities if is_asked else [])
        ],
        "by_draft_limit": [
            {"limit": limit, **judge.point(outcome, "drafted_per_step")}
            for limit, outcome in (limits if is_asked else [])
        ],
        "sharing": sharing,
    }


def _in_order(outcomes: dict[Key, Outcome]) -> list[tuple[Key, Outcome]]:
    """By number; names as they were planned, the least first."""
    uses = {"none": 0, "frozen": 1, "growing": 2}
    return sorted(outcomes.items(), key=lambda item: (item[0][0], uses.get(str(item[0][1]), item[0][1])))


def _needs(main: Outcome, log: Log) -> dict[str, Any]:
    """Of one namespace: memory is that of index and ring; of Redis the entries count, without what it adds to each."""
    return {
        "memory_bytes": main.index_bytes + main.ring_bytes,
        "disk_bytes": main.index_bytes,
        "cached_tokens": main.num_cached_tokens,
        "redis_bytes": main.shared_bytes,
        "redis_bytes_per_request": round(main.shared_bytes / max(1, len(log)), 1),
        "propose_us": round(main.ns / 1e3 / len(main.drafted), 1) if len(main.drafted) else None,
    }


def _rounded(value: float) -> float:
    return round(value, 4)
