"""``ssd-cache evaluate``."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cache_builder.commands.options import add_log_arguments, progress_bar, read_logs
from cache_builder.evaluation.costs import add_cost_arguments, costs_of
from ssd.config import DRAFT_SHAPES, DraftConfig, IndexConfig
from ssd.errors import ConfigError

if TYPE_CHECKING:
    from cache_builder.evaluation.log import Log

_DESCRIPTION = """\
Decode recorded requests again with drafts, as a server with this cache would have, and say what it would have gained.

No model is needed: what the logs say is what it said. Requests are decoded in the order of the files, or of
--time-field, each before it is learned. Logs are read as `ssd-cache build` reads them; what has no prompt is learned
and not decoded.
Classes, where no --class-by names a field, are what can be seen. A request is of the first one that is true of it:
"""

_SAMPLE_TOKENS: Final = 150_000
_MANY_TOKENS: Final = 20_000
"""Of output, below which a second process costs more than it saves."""
_MEASURED_PROMPTS: Final = 16


def add(command: argparse.ArgumentParser) -> None:
    """Its arguments."""
    from cache_builder.evaluation.log import DEFINITIONS

    known = "\n".join(f"  {name}: {sentence}" for name, sentence in DEFINITIONS.items())
    command.description = _DESCRIPTION + known
    draft, index = DraftConfig(), IndexConfig()
    command.add_argument("inputs", nargs="+", metavar="LOG", help="as the inputs of build")
    command.add_argument(
        "--warm", action="append", default=[], type=Path, metavar="DIR", help="a cache directory to search; repeatable"
    )
    command.add_argument(
        "--cache", choices=("growing", "frozen", "none"), default="growing",
        help="growing: requests are learned as they end; frozen: only --warm is searched; none: no more than each "
        "request's own text (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--cache-tokens", type=int, default=index.capacity_tokens, metavar="N",
        help="the server's --cache-tokens (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--draft-limit", type=int, default=draft.num_speculative_tokens, metavar="N",
        help="most tokens of a draft (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--draft-shape", choices=DRAFT_SHAPES, default=draft.draft_shape,
        help="auto: trees for one sequence alone, chains in a batch (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences decoded together (default: %(default)s)"
    )
    command.add_argument("--class-by", metavar="FIELD", help="a field of the records that names their class; a.b nests")
    command.add_argument(
        "--sample-tokens", type=int, default=_SAMPLE_TOKENS, metavar="N",
        help="output tokens that each point of a curve decodes at most, of requests spread over the log; 0: no curves "
        "(default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--jobs", type=int, metavar="N", help="processes (default: one for each processor)")
    command.add_argument("--seed", type=int, default=0, help="of what is dealt at random (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="print one JSON line alone")
    command.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page of its tables, and of plots where matplotlib is installed",
    )
    add_log_arguments(command)
    add_cost_arguments(command)


def run(options: argparse.Namespace) -> int:
    from cache_builder.evaluation.evaluate import evaluate, num_to_decode
    from cache_builder.evaluation.report import page, summary
    from cache_builder.evaluation.runs import Plan, in_batch

    _check(options)
    plan = Plan(
        fingerprint="",
        cache=options.cache,
        warm=tuple(options.warm),
        draft=DraftConfig(num_speculative_tokens=options.draft_limit, draft_shape=options.draft_shape),
        index=IndexConfig(capacity_tokens=options.cache_tokens),
        batch=options.batch,
        sample_tokens=options.sample_tokens,
        seed=options.seed,
    )
    codec, read = read_logs(options, options.inputs, options.class_by)
    log = read.log
    costs = costs_of(options, lambda: _some_prompts(log), options.batch)
    if options.gpu is None:
        costs = in_batch(costs, options.batch)
    jobs = options.jobs or (os.cpu_count() or 1)
    plan = replace(plan, fingerprint=codec.fingerprint, jobs=jobs if log.output_lengths.sum() >= _MANY_TOKENS else 1)
    with progress_bar(num_to_decode(log, plan, costs), " tokens") as progress:
        result = evaluate(
            log, plan, costs, labels=read.labels, inputs=[Path(name).name for name in options.inputs],
            tokenizer=Path(options.tokenizer).name, progress=progress,
        )  # fmt: skip
    result["parameters"] |= {
        "class_by": options.class_by, "time_field": options.time_field, "jobs": plan.jobs,
        "records": read.num_records, "invalid_records": read.num_invalid,
    }  # fmt: skip
    if options.html is not None:
        options.html.write_text(page(result), "utf-8")
    print(json.dumps(result) if options.json else summary(result))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError for what argparse cannot know."""
    if options.cache == "frozen" and not options.warm:
        raise ConfigError("--cache frozen searches what --warm names: give --warm DIR, or --cache none")
    if options.cache == "none" and options.warm:
        raise ConfigError("--cache none searches no directory: leave out --warm, or take --cache frozen")
    for name, value, least in (
        ("--batch", options.batch, 1), ("--sample-tokens", options.sample_tokens, 0), ("--seed", options.seed, 0),
        ("--jobs", options.jobs or 1, 1), ("--draft-limit", options.draft_limit, 1),
    ):  # fmt: skip
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    if options.batch > 4096:
        raise ConfigError(f"--batch must be at most 4096, got {options.batch}")


def _some_prompts(log: Log) -> list[list[int]]:
    """Prompts spread over the log."""
    numbers = log.with_prompt
    some = numbers[:: max(1, len(numbers) // _MEASURED_PROMPTS)].tolist()
    return [log.row(number).context.tolist() for number in some]
