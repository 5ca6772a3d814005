"""What decoding requests with drafts and without came to: in all and by part of the log."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from cache_builder.evaluation.costs import StepCosts, run_program
from cache_builder.evaluation.evaluate import Plan, evaluate
from cache_builder.evaluation.log import Log

LEAST_REQUESTS: Final = 30
"""Below which no figure is put on top of a report: chance is as large as what is to be shown."""
_WINDOWS: Final = 10

Row = Mapping[str, Any]


def measured(options: argparse.Namespace, log: Log, plan: Plan, costs: StepCosts) -> dict[str, Any] | None:
    """Requests of the log decoded with ``--measure MODEL``; what a replay predicts of the very same outputs is said
    beside. Raises ModelError.
    """
    if options.measure is None or not options.measure_requests:
        return None
    numbers = log.with_prompt[: options.measure_requests].tolist()
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
    found = run_program("log", options.measure, given)
    same = log_of(found, log)
    replayed = None if same is None else evaluate(same, plan, costs)
    told = None if replayed is None else {key: replayed[key] for key in ("speedup", "tokens_per_step")}
    return {**summarised(found), "replayed": told}


def log_of(found: Mapping[str, Any], log: Log) -> Log | None:
    """The requests that were decoded greedily with what the model said to them; None where none were."""
    rows: Sequence[Row] = next((each["requests"] for each in found["temperatures"] if not each["temperature"]), [])
    if not rows:
        return None
    numbers = log.with_prompt.tolist()
    prompts = [log.row(numbers[row["request"]]).context for row in rows]
    texts = [
        np.concatenate([prompt, np.array(row["ssd"]["said"], np.int32)])
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    return Log(np.concatenate(texts), starts, np.array([len(prompt) for prompt in prompts], np.int64))


def summarised(found: Mapping[str, Any]) -> dict[str, Any]:
    """The report's part of it."""
    facts = {key: found[key] for key in ("model", "device", "dtype", "threads", "too_long")}
    return {**facts, "temperatures": [_of_one(each) for each in found["temperatures"]]}


def _of_one(found: Mapping[str, Any]) -> dict[str, Any]:
    rows: Sequence[Row] = found["requests"]
    bounds = sorted({round(len(rows) * window / _WINDOWS) for window in range(_WINDOWS + 1)})
    return {
        "temperature": found["temperature"],
        **figures_of(rows),
        "outputs_differ": sum(not row["same"] for row in rows),
        "bits_compared": found["bits_compared"],
        "bits_differ": found["bits_differ"],
        "growth": [{"up_to": end, **figures_of(rows[begin:end])} for begin, end in pairwise(bounds)],
        "slower": [row["request"] + 1 for row in rows if row["ssd"]["seconds"] > row["none"]["seconds"]],
    }


def figures_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Of some requests: tokens a second both ways with prompts, their ratio, and that of the output alone."""
    tokens = sum(row["ssd"]["tokens"] for row in rows)
    off_s, on_s = (sum(row[way]["seconds"] for row in rows) for way in ("none", "ssd"))
    output_off_s, output_on_s = (
        sum(row[way]["seconds"] - row[way]["first_s"] for row in rows) for way in ("none", "ssd")
    )
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
