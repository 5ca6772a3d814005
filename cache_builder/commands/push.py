"""``ssd-cache push``."""

from __future__ import annotations

import argparse
from pathlib import Path

from cache_builder.commands.options import (
    CACHE_DIRECTORY,
    add_store_arguments,
    progress_bar,
    redis_url_of,
    store_of,
)
from cache_builder.held import fingerprint_of
from ssd.retrieval.cache import DEFAULT_NAMESPACE

_DESCRIPTION = """\
Publish a cache directory, so that running servers draft from it within seconds, and new ones from their start.

It takes the place of what was pushed before and is never evicted: 7 bytes of each server's memory a token, 32M tokens
at most. What the store has already is not sent again. With --log it is written into the shared log instead, as if a
server had said it: it ages with what servers learn.
"""


def add(command: argparse.ArgumentParser) -> None:
    """Its arguments."""
    command.description = _DESCRIPTION
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    add_store_arguments(command)
    command.add_argument("--namespace", default=DEFAULT_NAMESPACE, help="whom it is for (default: %(default)s)")
    command.add_argument("--log", action="store_true", help="write into the shared log, the newest that fits its bound")
    command.add_argument(
        "--max-tokens", type=int, default=1 << 22, metavar="N", help="with --log: its bound (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    return _push_to_log(options) if options.log else _publish(options)


def _publish(options: argparse.Namespace) -> int:
    from ssd.sharing.published.commands import open_store, push

    redis_url, store_url = store_of(options)
    fingerprint = fingerprint_of(options.directory)
    with (
        open_store(redis_url, store_url, fingerprint, options.namespace) as store,
        progress_bar(0, " tokens") as progress,
    ):
        result = push(options.directory, store, fingerprint=fingerprint, progress=progress)
    print(
        f"pushed {result.num_tokens:,} tokens in {result.num_sequences:,} sequences to namespace {options.namespace}, "
        f"{result.num_sent_bytes:,} bytes were sent"
    )
    if result.num_left_out_tokens:
        print(
            f"  {result.num_left_out_tokens:,} tokens, the oldest, were left out: servers search 32M pushed tokens. "
            f"They get all with --warm {options.directory}"
        )
    return 0


def _push_to_log(options: argparse.Namespace) -> int:
    from ssd.sharing.published.commands import push_segments

    url = redis_url_of(options)
    fingerprint = fingerprint_of(options.directory)
    with progress_bar(0, " tokens") as progress:
        result = push_segments(
            options.directory, url, options.namespace, fingerprint=fingerprint, max_tokens=options.max_tokens,
            progress=progress,
        )  # fmt: skip
    print(f"pushed {result.num_tokens:,} tokens in {result.num_sequences:,} sequences to namespace {options.namespace}")
    if result.num_left_out_tokens:
        print(
            f"  {result.num_left_out_tokens:,} tokens in the {result.num_left_out_sequences:,} oldest sequences were "
            f"left out: the shared log keeps {options.max_tokens:,}. Servers get all with --warm {options.directory}"
        )
    return 0
