"""The command ``ssd-cache evaluate``, which estimates from logs what a cache would save."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cache_builder.commands.follow import add_follow_arguments, follow
from cache_builder.commands.options import add_log_arguments, progress_bar, read_logs, token_count
from cache_builder.evaluation.costs import add_cost_arguments, costs_from_options
from ssd.bundled import MODEL_PATH
from ssd.config import DraftConfig, IndexConfig
from ssd.errors import ConfigError
from ssd.numbers import format_number

if TYPE_CHECKING:
    from cache_builder.evaluation.log import Log
    from ssd.text.codec import TextCodec

_DESCRIPTION = """\
Replay recorded requests with drafts, as a server with this cache would decode them, and report the speed-up.

No model is needed, because the logs contain the outputs. With --measure MODEL, the model also answers some of the
requests, each once with and once without drafts, and both outputs are compared. Requests are replayed in the order of
the files, and each is added to the cache after its replay. Logs are read as `ssd-cache build` reads them. Documents
are added to the cache but not replayed.
"""

_MEASURED_PROMPTS: Final = 16


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    draft, index = DraftConfig(), IndexConfig()
    command.add_argument("inputs", nargs="*", metavar="LOG", help="File of requests that `ssd-cache build` can read")
    command.add_argument(
        "--kv-events",
        nargs="+",
        metavar="tcp://HOST:PORT",
        help="Instead of logs, evaluate the live traffic of vLLM or SGLang engines that publish KV events (see "
        "ssd-cache follow); its text is kept in memory only, and only during the evaluation",
    )
    command.add_argument(
        "--warm",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="Cache directory, built by `ssd-cache build`, from which to draft; can be repeated",
    )
    command.add_argument(
        "--cache",
        choices=("growing", "frozen"),
        default="growing",
        help="growing: add each replayed request to the cache; frozen: draft only from the --warm directories "
        "(default: %(default)s)",
    )
    command.add_argument(
        "--cache-tokens",
        type=token_count,
        default=index.capacity_tokens,
        metavar="N",
        help="Capacity of the cache in tokens, like the option of ssd-serve (default: "
        f"{format_number(index.capacity_tokens)})",
    )
    command.add_argument(
        "--draft-limit",
        type=int,
        default=draft.num_speculative_tokens,
        metavar="N",
        help="Maximum number of tokens of a draft (default: %(default)s)",
    )
    command.add_argument(
        "--class-by", metavar="FIELD", help="Report also by class of requests: each value of this field, e.g. a.b"
    )
    command.add_argument(
        "--against",
        nargs="+",
        default=[],
        choices=("suffix", "ngram", "lookup"),
        help="Also replay the log with other draft methods: vLLM's suffix decoding (package arctic-inference), vLLM's "
        "ngram (package vllm) or transformers' prompt lookup",
    )
    command.add_argument("--json", action="store_true", help="Print the report as one JSON line")
    command.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="Also write the report as one HTML file, with a figure of the speed-up as the cache grows",
    )
    add_log_arguments(command)
    add_follow_arguments(command.add_argument_group("KV events"), minutes=10.0)
    add_cost_arguments(command)
    group = command.add_argument_group("decoding", "Requests that the model of --measure answers, one at a time")
    group.add_argument(
        "--measure-requests",
        type=int,
        default=100,
        metavar="N",
        help="Number of requests to answer, from the start of the log; with 0, only forward passes are timed "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--measure-tokens",
        type=int,
        default=128,
        metavar="N",
        help="Maximum number of output tokens per request; no output becomes longer than the recorded one (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--measure-minutes",
        type=float,
        default=10.0,
        metavar="M",
        help="Start no further request after this many minutes, for all temperatures together (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0, 0.8],
        metavar="T",
        help="Sampling temperatures; each is measured with an empty cache at first (default: 0 0.8)",
    )


def run(options: argparse.Namespace) -> int:
    from cache_builder.evaluation.evaluate import Plan, count_replayed_tokens, evaluate, measure_log
    from cache_builder.evaluation.page import require_matplotlib, write_page
    from cache_builder.evaluation.peers import compare, count_compared_tokens, require_peers
    from cache_builder.evaluation.report import headline, summary

    _check(options)
    require_peers(options.against)
    if options.html is not None:
        require_matplotlib()
    if options.measure is not None and options.tokenizer == str(MODEL_PATH):
        options.tokenizer = options.measure
    codec, log = _listen(options) if options.kv_events else read_logs(options, options.inputs, options.class_by)
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
    if options.against:
        with progress_bar(count_compared_tokens(log, options.against), " tokens") as bar:
            result["against"] = compare(log, plan, costs, result, options.against, progress=bar.update)
    result["parameters"]["class_by"] = options.class_by
    result |= {
        "inputs": options.kv_events or [Path(name).name for name in options.inputs],
        "tokenizer": Path(options.tokenizer).name,
    }
    result["measured"] = measure_log(options, log, plan, costs)
    result["headline"] = headline(result)
    if options.html is not None:
        write_page(result, options.html)
    print(json.dumps(result) if options.json else summary(result))
    return 0


def _listen(options: argparse.Namespace) -> tuple[TextCodec, Log]:
    """Receive KV events from engines and return the received texts as a log, with the tokenizer.

    Requests with a LoRA adapter or a ``cache_salt`` are left out. Their text belongs to other namespaces, from which
    requests to the base model never draft.
    """
    from cache_builder.evaluation.log import log_of_texts
    from cache_builder.following.block_chains import FollowedText
    from ssd.text.codec import TextCodec

    codec, texts = TextCodec.load(options.tokenizer), list[FollowedText]()

    def collect_text(text: FollowedText) -> None:
        if text.lora is None and text.cache_salt is None:
            texts.append(text)

    follow(options, codec, collect_text, options.kv_events, lead_in_tokens=1 << 30)
    return codec, log_of_texts(texts)


def _check(options: argparse.Namespace) -> None:
    if bool(options.inputs) == bool(options.kv_events):
        raise ConfigError("give log files or --kv-events, but not both")
    if options.cache == "frozen" and not options.warm:
        raise ConfigError("--cache frozen searches only the directories of --warm: give --warm DIR")
    if options.html is not None and (options.html.is_dir() or not options.html.parent.is_dir()):
        raise ConfigError(f"--html {options.html}: the directory does not exist. Create it, or give another FILE")
    for name, value, least in (
        ("--draft-limit", options.draft_limit, 1),
        ("--measure-requests", options.measure_requests, 0),
        ("--measure-tokens", options.measure_tokens, 2),
        ("--measure-minutes", options.measure_minutes, 0),
        ("--temperature", min(options.temperature), 0),
    ):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


def _some_prompts(log: Log) -> list[list[int]]:
    """Return a few prompts of the log, evenly spaced, with which the costs of forward passes are measured."""
    numbers = log.replayable
    some = numbers[:: max(1, len(numbers) // _MEASURED_PROMPTS)].tolist()
    return [log.row(number).context.tolist() for number in some]
