"""``ssd-cache evaluate``: a whole log decoded again, what a cache would bring on it, and what it would need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cache_builder.evaluation.costs import CostCurve, StepCosts
from cache_builder.evaluation.decoding import OutputDecoder, warm_up
from cache_builder.evaluation.log import Int64s, Log
from cache_builder.evaluation.oracle import oracle_steps
from ssd import __version__
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.retrieval.cache import CacheSet

CacheUse = Literal["growing", "frozen", "none"]
Flags = npt.NDArray[np.bool_]

_FEW_TOKENS: Final = 20_000
_WINDOWS: Final = 10
_MOST_CLASSES: Final = 20
_OTHER_CLASSES: Final = "all other classes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to find out.

    ``fingerprint`` : the tokenizer's. ``cache`` : "growing": what was said is learned; "frozen": only ``warm`` is
    searched. ``warm`` : directories searched beside what is learned.
    """

    fingerprint: str
    cache: CacheUse = "growing"
    warm: tuple[Path, ...] = ()
    draft: DraftConfig = field(default_factory=DraftConfig)
    index: IndexConfig = field(default_factory=IndexConfig)

    @property
    def lesser_uses(self) -> tuple[CacheUse, ...]:
        """Ways to use the cache that have less than the plan's, the least first: "none" is own text alone."""
        return ("none", "frozen") if self.cache == "growing" and self.warm else ("none",)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What decoding a log came to.

    ``requests`` : int64[r], the numbers of those decoded. Of each ``num_steps``, ``num_accepted`` : int64[r].
    ``drafted`` : int16, tokens drafted in each step of all, one request after another. ``ns`` : of a processor, for all
    proposals. ``by_source`` : see `OutputDecoder`. ``num_cached_tokens``, ``index_bytes`` : of what the
    cache holds at the end.
    """

    requests: Int64s
    num_steps: Int64s
    num_accepted: Int64s
    drafted: npt.NDArray[np.int16]
    ns: int
    by_source: dict[str, tuple[int, int, int]]
    num_cached_tokens: int
    index_bytes: int
    ring_bytes: int


def replay(
    log: Log, plan: Plan, curve: CostCurve, use: CacheUse, tell: Callable[[int], object] = lambda num_tokens: None
) -> Outcome:
    """Decode the log, the cache used as ``use`` says. ``tell`` : called with the output tokens of each request.

    Raises CacheError for a warm directory that cannot be used.
    """
    warm_up()
    decoder = OutputDecoder(curve, draft=plan.draft)
    steps, drafted, ns = list[tuple[int, int, int]](), [np.empty(0, np.int16)], 0
    can_be_decoded = set(log.with_prompt.tolist())
    with CacheSet(CacheConfig(index=plan.index), plan.fingerprint, inline=True) as caches:
        cache = caches.get()
        for directory in plan.warm if use != "none" else ():
            caches.add_static_directory(directory)
        for number in range(len(log)):
            row = log.row(number)
            if number in can_be_decoded:
                found = decoder.decode(row, None if use == "none" else cache.snapshot())
                steps.append((number, len(found.drafted), int(found.accepted.sum())))
                drafted.append(found.drafted.astype(np.int16))
                ns += found.ns
                tell(len(row.output))
            if use == "growing":
                cache.append(row.text(), prompt_length=len(row.context))
                cache.maintain()
        snapshot = cache.snapshot()
        requests, num_steps, num_accepted = np.array(steps, np.int64).reshape(-1, 3).T.copy()
        of_segments = sum(each.text.nbytes + each.order.nbytes + each.fence.nbytes for each in snapshot.segments)
        return Outcome(
            requests,
            num_steps,
            num_accepted,
            np.concatenate(drafted),
            ns,
            decoder.by_source(),
            snapshot.num_tokens,
            of_segments + 8 * (snapshot.tail_stop - snapshot.tail_start),  # the tail as if it were in a segment
            snapshot.ring.nbytes,
        )


def unknown(log: Log, plan: Plan) -> list[str]:
    """What holds for this evaluation, the weightiest first."""
    return [
        "Traffic to come: the figures hold for requests like these, in this order.",
        "Sampling: at a temperature above 0 the model may say something else to the same prompt another time.",
        "Time to the first token: the speed-up is that of output tokens.",
        "Load: sequences are taken to be decoded one at a time; beside others drafts gain less.",
        *(["The time of day: each request is taken to find all earlier ones learned."] * (plan.cache == "growing")),
        *(
            ["The long run: the log is short, and its beginning, with an empty cache, weighs more than it will."]
            * bool(log.output_lengths[log.with_prompt].sum() < _FEW_TOKENS)
        ),
    ]


def num_to_decode(log: Log, plan: Plan) -> int:
    """Output tokens that `evaluate` decodes, in all its replays together."""
    return int(log.output_lengths[log.with_prompt].sum()) * (1 + len(plan.lesser_uses))


def evaluate(
    log: Log, plan: Plan, costs: StepCosts, *, progress: Callable[[int], object] = lambda num_tokens: None
) -> dict[str, Any]:
    """The report as it stands in the JSON line.

    ``progress`` : told how many output tokens were decoded, see ``num_to_decode``. Raises CacheError for a warm
    directory.
    """
    main, judge = replay(log, plan, costs.curve, plan.cache, progress), _Judge(log, costs, plan)
    uses = [*((use, replay(log, plan, costs.curve, use, progress)) for use in plan.lesser_uses), (plan.cache, main)]
    without = np.setdiff1d(np.arange(len(log)), main.requests)
    return {
        "report": "evaluate",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "parameters": {
            "cache": plan.cache,
            "warm": [directory.name or str(directory) for directory in plan.warm],
            "draft_limit": plan.draft.num_speculative_tokens,
            "capacity_tokens": plan.index.capacity_tokens,
            "records": log.num_records,
            "invalid_records": log.num_invalid,
        },
        "without_prompt_records": log.num_without_prompt,
        "without_answer_records": log.num_without_answer,
        "requests": len(main.requests),
        "prompt_tokens": int(log.prompt_lengths[main.requests].sum()),
        "cost": costs.as_json(),
        **judge.figures(main),
        "documents": {"number": len(without), "tokens": int(np.diff(log.starts)[without].sum())},
        "classes": [] if log.labels is None else _classes(main, judge, log.labels),
        "by_source": [
            {"source": source, "drafts": drafts, "drafted": drafted, "accepted": accepted}
            for source, (drafts, drafted, accepted) in main.by_source.items()
        ],
        "growth": _growth(main, judge),
        "by_cache": [{"cache": use, **judge.point(outcome)} for use, outcome in uses],
        "needs": {
            "memory_bytes": main.index_bytes + main.ring_bytes,
            "disk_bytes": main.index_bytes,
            "cached_tokens": main.num_cached_tokens,
            "propose_us": round(main.ns / 1e3 / len(main.drafted), 1) if len(main.drafted) else None,
        },
        "unknown": unknown(log, plan),
    }


class _Judge:
    """What steps are worth."""

    def __init__(self, log: Log, costs: StepCosts, plan: Plan) -> None:
        self._output_lengths, self._costs = log.output_lengths, costs
        self._oracle: Int64s | None = None
        if not plan.warm:  # of warm directories the text is not at hand
            texts = np.split(log.tokens, log.starts[1:-1])
            self._oracle = oracle_steps(texts, log.prompt_lengths, plan.draft.num_speculative_tokens)

    def figures(self, outcome: Outcome, of: Flags | None = None) -> dict[str, Any]:
        """Of all decoded requests, or those that ``of``, bool[r], says."""
        chosen = np.ones(len(outcome.requests), np.bool_) if of is None else of
        requests, drafted = outcome.requests[chosen], outcome.drafted[np.repeat(chosen, outcome.num_steps)]
        num_steps, num_drafted = len(drafted), int(drafted.sum(dtype=np.int64))
        num_output = int(self._output_lengths[requests].sum())
        num_accepted = int(outcome.num_accepted[chosen].sum())
        assert num_output == num_steps + num_accepted
        propose_s = outcome.ns / 1e9 * num_steps / max(1, len(outcome.drafted))
        speedup = self._costs.speed_up(num_output, np.bincount(drafted, minlength=1), propose_s)
        best = None if self._oracle is None else int(self._oracle[requests].sum())
        return {
            "output_tokens": num_output,
            "tokens_per_step": _rounded(num_output / num_steps if num_steps else 1.0),
            "of_oracle": None if best is None else _rounded(best / max(1, num_steps)),
            "drafted_per_step": _rounded(num_drafted / max(1, num_steps)),
            "acceptance_rate": _rounded(num_accepted / max(1, num_drafted)),
            "speedup": _rounded(speedup),
        }

    def point(self, outcome: Outcome, of: Flags | None = None) -> dict[str, Any]:
        """Those of the figures that a curve shows."""
        found = self.figures(outcome, of)
        return {name: found[name] for name in ("tokens_per_step", "of_oracle", "speedup", "output_tokens")}


def _classes(main: Outcome, judge: _Judge, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The largest first; beyond the twentieth all in one."""
    names = np.array(classes, object)[main.requests]
    found, counts = np.unique(names.astype(str), return_counts=True)
    ordered = [str(found[place]) for place in np.argsort(-counts, kind="stable")]
    groups = [(name, names == name) for name in ordered[:_MOST_CLASSES]]
    if len(ordered) > _MOST_CLASSES:
        groups.append((_OTHER_CLASSES, ~np.isin(names.astype(str), ordered[:_MOST_CLASSES])))
    return [{"name": name, "requests": int(of.sum()), **judge.figures(main, of)} for name, of in groups]


def _growth(main: Outcome, judge: _Judge) -> list[dict[str, Any]]:
    """Tenths of the requests, in their order; each says how many had come by its end."""
    places, count = np.arange(len(main.requests)), len(main.requests)
    bounds = sorted({round(count * window / _WINDOWS) for window in range(_WINDOWS + 1)})
    found = []
    for begin, end in pairwise(bounds):
        found.append({"requests": end, **judge.point(main, (places >= begin) & (places < end))})
    return found


def _rounded(value: float) -> float:
    return round(value, 4)
