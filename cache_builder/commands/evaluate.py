"""The command ``ssd-cache evaluate``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cache_builder.commands.options import add_log_arguments, progress_bar, read_logs, token_count
from cache_builder.evaluation.costs import add_cost_arguments, costs_from_options
from ssd.bundled import MODEL_PATH
from ssd.config import DraftConfig, IndexConfig
from ssd.errors import ConfigError
from ssd.numbers import spelled

if TYPE_CHECKING:
    from cache_builder.evaluation.log import Log

_DESCRIPTION = """\
Decode recorded requests again with drafts, as a server with this cache would have, and say what it would have gained.

No model is needed: what the logs say is what it said. With --measure MODEL some of the requests are decoded by that
model too, with drafts and without by turns, and every output is compared. Requests are taken in the order of the files,
each before it is learned. Logs are read as `ssd-cache build` reads them; documents are learned and not decoded.
"""

_MEASURED_PROMPTS: Final = 16


def add(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    draft, index = DraftConfig(), IndexConfig()
    command.add_argument("inputs", nargs="+", metavar="LOG", help="as the inputs of build")
    command.add_argument(
        "--warm", action="append", default=[], type=Path, metavar="DIR", help="a cache directory to search; repeatable"
    )
    command.add_argument(
        "--cache", choices=("growing", "frozen"), default="growing",
        help="growing: requests are learned as they end; frozen: only --warm is searched (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--cache-tokens", type=token_count, default=index.capacity_tokens, metavar="N",
        help=f"the server's --cache-tokens (default: {spelled(index.capacity_tokens)})",
    )  # fmt: skip
    command.add_argument(
        "--draft-limit", type=int, default=draft.num_speculative_tokens, metavar="N",
        help="most tokens of a draft (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--class-by", metavar="FIELD", help="a field of the records that names their class; a.b nests")
    command.add_argument("--json", action="store_true", help="print one JSON line alone")
    command.add_argument(
        "--html", type=Path, metavar="FILE",
        help="also write one HTML file to send on: the speed-up as the cache grows, by class, and its assumptions",
    )  # fmt: skip
    add_log_arguments(command)
    add_cost_arguments(command)
    group = command.add_argument_group("decoding", "with --measure: what is decoded with the model, one at a time")
    group.add_argument(
        "--measure-requests", type=int, default=100, metavar="N",
        help="the first N requests; 0 measures costs alone (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--measure-tokens", type=int, default=128, metavar="N",
        help="most tokens of an answer, which is no longer than the recorded one either (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--measure-minutes", type=float, default=10.0, metavar="M",
        help="begin no further request after that, of all temperatures together (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 0.8], metavar="T",
        help="each with an empty cache at first (default: 0 0.8)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    from cache_builder.evaluation.evaluate import Plan, count_replayed_tokens, evaluate, measure_log
    from cache_builder.evaluation.page import require_matplotlib, write_page
    from cache_builder.evaluation.report import headline, summary

    _check(options)
    if options.html is not None:
        require_matplotlib()
    if options.measure is not None and options.tokenizer == str(MODEL_PATH):
        options.tokenizer = options.measure
    codec, log = read_logs(options, options.inputs, options.class_by)
    plan = Plan(
        fingerprint=codec.fingerprint,
        cache=options.cache,
        warm=tuple(options.warm),
        draft=DraftConfig(num_speculative_tokens=options.draft_limit),
        index=IndexConfig(capacity_tokens=options.cache_tokens),
    )
    costs = costs_from_options(options, lambda: _some_prompts(log))
    with progress_bar(count_replayed_tokens(log, plan), " tokens") as bar:
        result = evaluate(log, plan, costs, progress=bar.update)
    result["parameters"]["class_by"] = options.class_by
    result |= {"inputs": [Path(name).name for name in options.inputs], "tokenizer": Path(options.tokenizer).name}
    result["measured"] = measure_log(options, log, plan, costs)
    result["headline"] = headline(result)
    if options.html is not None:
        write_page(result, options.html)
    print(json.dumps(result) if options.json else summary(result))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Check the combinations of options that argparse cannot check. Raises ConfigError."""
    if options.cache == "frozen" and not options.warm:
        raise ConfigError("--cache frozen searches what --warm names: give --warm DIR")
    if options.html is not None and (options.html.is_dir() or not options.html.parent.is_dir()):
        raise ConfigError(f"--html {options.html}: give a file in a directory that exists")
    for name, value, least in (
        ("--draft-limit", options.draft_limit, 1),
        ("--measure-requests", options.measure_requests, 0), ("--measure-tokens", options.measure_tokens, 2),
        ("--measure-minutes", options.measure_minutes, 0), ("--temperature", min(options.temperature), 0),
    ):  # fmt: skip
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


def _some_prompts(log: Log) -> list[list[int]]:
    """Return prompts from evenly spaced places of the log."""
    numbers = log.replayable
    some = numbers[:: max(1, len(numbers) // _MEASURED_PROMPTS)].tolist()
    return [log.row(number).context.tolist() for number in some]
