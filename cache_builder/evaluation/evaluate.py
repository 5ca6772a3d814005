"""``ssd-cache evaluate``: replay a log, and report the speed-up from a cache and the memory that it needs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cache_builder.evaluation.costs import CostCurve, StepCosts, run_measurement
from cache_builder.evaluation.decoding import OutputDecoder, warm_up
from cache_builder.evaluation.hindsight import hindsight_steps
from cache_builder.evaluation.log import Int64s, Log
from ssd import __version__
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.retrieval.cache_manager import CacheManager

CacheUse = Literal["growing", "frozen", "none"]
Flags = npt.NDArray[np.bool_]

_FEW_TOKENS: Final = 20_000
_MAX_CLASSES: Final = 20
_OTHER_CLASSES: Final = "all other classes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The setup of an evaluation: the caches and the drafting options with which a log is replayed.

    Attributes:
        cache: "growing" if outputs are added to the cache during the replay, "frozen" if only ``warm`` is searched.
        warm: Prebuilt cache directories that are searched.
        tree: Whether drafts may be trees; otherwise they are chains.
    """

    fingerprint: str
    cache: CacheUse = "growing"
    warm: tuple[Path, ...] = ()
    draft: DraftConfig = field(default_factory=DraftConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    tree: bool = True

    @property
    def baseline_uses(self) -> tuple[CacheUse, ...]:
        """The uses of the cache that are also replayed, so that the report shows how much the cache contributes.

        "none" searches no cache and drafts only from a request's own context; "frozen" searches only prebuilt
        directories.
        """
        return ("none", "frozen") if self.cache == "growing" and self.warm else ("none",)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The result of replaying a log, in arrays over the replayed requests.

    Attributes:
        requests: int64[r], the indices of the replayed requests in the log.
        drafted: int16[steps], the number of draft tokens of each step, for all requests one after the other.
        ns: The processor time of drafting in nanoseconds, in total.
        by_source: Drafts by source, see `OutputDecoder.by_source`.
    """

    requests: Int64s
    num_tokens: Int64s
    num_steps: Int64s
    num_accepted: Int64s
    drafted: npt.NDArray[np.int16]
    ns: int
    by_source: dict[str, tuple[int, int, int]]
    num_cached_tokens: int
    index_bytes: int
    ring_bytes: int


def replay(
    log: Log, plan: Plan, curve: CostCurve, use: CacheUse, on_output: Callable[[int], object] = lambda num_tokens: None
) -> Outcome:
    """Replay a log with the server's drafter and count the decoding steps.

    ``use`` selects the caches that are searched, see `Plan.baseline_uses`. After each request, ``on_output`` is called
    with the request's number of output tokens. Raises CacheError if a cache directory cannot be read.
    """
    warm_up()
    decoder = OutputDecoder(curve, draft=plan.draft, tree=plan.tree)
    steps, drafted, ns = list[tuple[int, int, int]](), [np.empty(0, np.int16)], 0
    can_be_decoded, waiting = set(log.replayable.tolist()), list[int]()
    with CacheManager(CacheConfig(index=plan.index), plan.fingerprint, inline=True) as caches:
        cache = caches.get()
        for directory in plan.warm if use != "none" else ():
            caches.add_prebuilt_directory(directory)

        def learn() -> None:
            for number in waiting:
                row = log.row(number)
                cache.append(row.text(), prompt_length=len(row.context))
                cache.maintain()
            waiting.clear()

        for number in range(len(log)):
            row = log.row(number)
            if waiting and not log.is_sibling(number, waiting[-1]):
                learn()
            if number in can_be_decoded:
                found = decoder.decode(row, None if use == "none" else cache.snapshot())
                steps.append((number, len(found.drafted), int(found.accepted.sum())))
                drafted.append(found.drafted.astype(np.int16))
                ns += found.ns
                on_output(len(row.output))
            if use == "growing":
                waiting.append(number)
        learn()
        snapshot = cache.snapshot()
        requests, num_steps, num_accepted = np.array(steps, np.int64).reshape(-1, 3).T.copy()
        of_segments = sum(each.text.nbytes + each.order.nbytes + each.sparse_index.nbytes for each in snapshot.segments)
        return Outcome(
            requests,
            log.output_lengths[requests],
            num_steps,
            num_accepted,
            np.concatenate(drafted),
            ns,
            decoder.by_source(),
            snapshot.num_tokens,
            of_segments + 8 * (snapshot.memtable_stop - snapshot.memtable_start),  # the memtable like a segment
            snapshot.ring.nbytes,
        )


def limitations(log: Log, plan: Plan) -> list[str]:
    """Return the limitations of an evaluation as sentences for the report, the most important first."""
    return [
        "Future traffic: the results apply to requests like these, in this order.",
        "Sampling: at a temperature above 0, the model may give another answer if a prompt is repeated.",
        "Time to first token: the speed-up covers output tokens only.",
        "Load: sequences are decoded one at a time here; in larger batches, drafts gain less.",
        *(
            ["Concurrency: each request is assumed to find all earlier requests in the cache."]
            * (plan.cache == "growing")
        ),
        *(
            ["Short log: its beginning, with an empty cache, has more weight than in long use."]
            * bool(log.output_lengths[log.replayable].sum() < _FEW_TOKENS)
        ),
    ]


def count_replayed_tokens(log: Log, plan: Plan) -> int:
    """Return how many output tokens `evaluate` replays in total, over all uses of the cache, for its progress bar."""
    return int(log.output_lengths[log.replayable].sum()) * (1 + len(plan.baseline_uses))


def evaluate(
    log: Log, plan: Plan, costs: StepCosts, *, progress: Callable[[int], object] = lambda num_tokens: None
) -> dict[str, Any]:
    """Replay a log with and without the cache, and return the report that ``ssd-cache evaluate`` prints as JSON.

    ``progress`` is called with the number of output tokens replayed since its last call, see `count_replayed_tokens`.
    Raises CacheError if a cache directory cannot be read.
    """
    main, best = replay(log, plan, costs.curve, plan.cache, progress), None
    if not plan.warm:  # the text of prebuilt directories is not available
        texts = np.split(log.tokens, log.starts[1:-1])
        best = hindsight_steps(texts, log.prompt_lengths, plan.draft.num_speculative_tokens)
    figures = partial(figures_of, costs, best)
    uses = [*((use, replay(log, plan, costs.curve, use, progress)) for use in plan.baseline_uses), (plan.cache, main)]
    numbers, without = np.arange(len(main.requests)), np.setdiff1d(np.arange(len(log)), main.requests)

    def compute_growth(selected: Flags) -> list[dict[str, Any]]:
        """Return the figures of the selected requests for each tenth of the log: the effect of the growing cache."""
        parts = [(end, selected & (numbers >= begin) & (numbers < end)) for begin, end in _tenths(len(numbers))]
        return [{"requests": end, **figures(main, part)} for end, part in parts if part.any()]

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
        **figures(main),
        "documents": {"number": len(without), "tokens": int(np.diff(log.starts)[without].sum())},
        "classes": [
            {
                "name": name,
                "requests": int(selected.sum()),
                **figures(main, selected),
                "growth": compute_growth(selected),
            }
            for name, selected in _classes(main, log.labels)
        ],
        "by_source": [
            {"source": source, "drafts": drafts, "drafted": drafted, "accepted": accepted}
            for source, (drafts, drafted, accepted) in main.by_source.items()
        ],
        "growth": compute_growth(np.ones(len(numbers), np.bool_)),
        "by_cache": [{"cache": use, **figures(outcome)} for use, outcome in uses],
        "needs": {
            "memory_bytes": main.index_bytes + main.ring_bytes,
            "disk_bytes": main.index_bytes,
            "cached_tokens": main.num_cached_tokens,
            "propose_us": round(main.ns / 1e3 / len(main.drafted), 1) if len(main.drafted) else None,
        },
        "unknown": limitations(log, plan),
    }


def figures_of(
    costs: StepCosts, best: Int64s | None, outcome: Outcome, selected: Flags | None = None
) -> dict[str, Any]:
    """Return the figures of a replay for the report: speed-up, tokens per step, acceptance rate and others.

    ``best``, the result of `hindsight_steps`, is the number of steps that each request needs with the best drafts.
    ``selected`` (bool[r]) selects the requests; None selects all.
    """
    chosen = np.ones(len(outcome.requests), np.bool_) if selected is None else selected
    drafted = outcome.drafted[np.repeat(chosen, outcome.num_steps)]
    num_steps, num_drafted = len(drafted), int(drafted.sum(dtype=np.int64))
    num_output, num_accepted = int(outcome.num_tokens[chosen].sum()), int(outcome.num_accepted[chosen].sum())
    assert num_output == num_steps + num_accepted
    propose_s = outcome.ns / 1e9 * num_steps / max(1, len(outcome.drafted))
    speedup = costs.speed_up(num_output, np.bincount(drafted, minlength=1), propose_s)
    least = None if best is None else int(best[outcome.requests[chosen]].sum())
    return {
        "output_tokens": num_output,
        "tokens_per_step": round(num_output / num_steps if num_steps else 1.0, 4),
        "of_oracle": None if least is None else round(least / max(1, num_steps), 4),
        "drafted_per_step": round(num_drafted / max(1, num_steps), 4),
        "acceptance_rate": round(num_accepted / max(1, num_drafted), 4),
        "speedup": round(speedup, 4),
    }


def _classes(main: Outcome, labels: Sequence[str] | None) -> Iterator[tuple[str, Flags]]:
    """Yield each class of requests (see ``--class-by``), the largest first; classes after the 20th are combined."""
    if labels is None:
        return
    names = np.array(labels, object)[main.requests].astype(str)
    found, counts = np.unique(names, return_counts=True)
    ordered = [str(found[place]) for place in np.argsort(-counts, kind="stable")]
    for name in ordered[:_MAX_CLASSES]:
        yield name, names == name
    if len(ordered) > _MAX_CLASSES:
        yield _OTHER_CLASSES, ~np.isin(names, ordered[:_MAX_CLASSES])


def _tenths(count: int) -> Iterator[tuple[int, int]]:
    return pairwise(sorted({round(count * tenth / 10) for tenth in range(11)}))


LEAST_REQUESTS: Final = 30
"""The minimum number of requests for which the report's first line shows a speed-up; fewer would give only noise."""
MeasuredRequest = Mapping[str, Any]
"""The measurements of one request that was decoded twice: with drafts (key "ssd") and without (key "none")."""


def measure_log(options: argparse.Namespace, log: Log, plan: Plan, costs: StepCosts) -> dict[str, Any] | None:
    """Measure the speed-up with a real model: decode requests of the log with and without drafts.

    The same outputs are also replayed, to compare the prediction with the measurement. Returns None without
    ``--measure``. Raises ModelError if the measurement fails.
    """
    if options.measure is None or not options.measure_requests:
        return None
    numbers = log.replayable[: options.measure_requests].tolist()
    given = {
        "prompts": [log.row(number).context.tolist() for number in numbers],
        "lengths": [int(min(options.measure_tokens, log.output_lengths[number])) for number in numbers],
        "temperatures": options.temperature,
        "minutes": options.measure_minutes,
        "fingerprint": plan.fingerprint,
        "draft_limit": plan.draft.num_speculative_tokens,
        "warm": list(map(str, plan.warm)),
        "learns": plan.cache == "growing",
    }
    found = run_measurement("log", options.measure, given)
    same = log_of_measurement(found, log)
    replayed = None if same is None else evaluate(same, plan, costs)
    told = None if replayed is None else {key: replayed[key] for key in ("speedup", "tokens_per_step")}
    return {**summarize_measurement(found), "replayed": told}


def log_of_measurement(found: Mapping[str, Any], log: Log) -> Log | None:
    """Return the greedy outputs of the measured model as a log, for a replay.

    The speed-up of this replay can be compared with the measured speed-up. Returns None if no output is greedy.
    """
    rows: Sequence[MeasuredRequest] = next(
        (each["requests"] for each in found["temperatures"] if not each["temperature"]), []
    )
    if not rows:
        return None
    numbers = log.replayable.tolist()
    prompts = [log.row(numbers[row["request"]]).context for row in rows]
    texts = [
        np.concatenate([prompt, np.array(row["ssd"]["said"], np.int32)])
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    return Log(np.concatenate(texts), starts, np.array([len(prompt) for prompt in prompts], np.int64))


def summarize_measurement(found: Mapping[str, Any]) -> dict[str, Any]:
    facts = {key: found[key] for key in ("model", "device", "dtype", "threads", "too_long")}
    return {**facts, "temperatures": [_summarize_requests(each) for each in found["temperatures"]]}


def _summarize_requests(found: Mapping[str, Any]) -> dict[str, Any]:
    rows: Sequence[MeasuredRequest] = found["requests"]
    return {
        "temperature": found["temperature"],
        **compute_figures(rows),
        "outputs_differ": sum(not row["same"] for row in rows),
        "bits_compared": found["bits_compared"],
        "bits_differ": found["bits_differ"],
        "growth": [{"up_to": end, **compute_figures(rows[begin:end])} for begin, end in _tenths(len(rows))],
        "slower": [row["request"] + 1 for row in rows if row["ssd"]["seconds"] > row["none"]["seconds"]],
    }


def compute_figures(rows: Sequence[MeasuredRequest]) -> dict[str, Any]:
    """Return throughput and speed-up of measured requests, with prefill ("speedup") and without ("output_speedup").

    Only "output_speedup" is comparable with the speed-up of a replay. The pass over the prompt also yields the first
    output token, so the prefill time is the time of this pass minus the time of one step without drafts.
    """
    tokens = sum(row["ssd"]["tokens"] for row in rows)
    off_s, on_s = (sum(row[way]["seconds"] for row in rows) for way in ("none", "ssd"))
    first_s, num_steps = (sum(row["none"][key] for row in rows) for key in ("first_s", "tokens"))
    step_s = (off_s - first_s) / max(1, num_steps - len(rows))  # the prompt's pass yields each first token
    prompts_s = first_s - len(rows) * step_s
    output_off_s, output_on_s = off_s - prompts_s, on_s - prompts_s
    drafted, accepted = (sum(row["ssd"][key] for row in rows) for key in ("drafted", "accepted"))
    passes = {way: sum(row[way]["passes"] for row in rows) for way in ("none", "ssd")}
    return {
        "requests": len(rows),
        "output_tokens": tokens,
        "without_per_s": round(tokens / off_s, 2) if off_s else 0.0,
        "with_per_s": round(tokens / on_s, 2) if on_s else 0.0,
        "speedup": round(off_s / on_s, 4) if on_s else 1.0,
        "output_speedup": round(output_off_s / output_on_s, 4) if output_on_s > 0 and output_off_s > 0 else 1.0,
        "passes_without": passes["none"],
        "passes_with": passes["ssd"],
        "drafted": drafted,
        "accepted": accepted,
    }
