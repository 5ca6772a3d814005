"""``ssd-cache push``."""

from __future__ import annotations

import argparse
from pathlib import Path

from cache_builder.caches.inspect import fingerprint_of
from cache_builder.command.parsers import Commands, add_command, add_redis_argument, redis_url_of
from cache_builder.command.progress import progress_bar
from ssd.retrieval.cache import DEFAULT_NAMESPACE

_DESCRIPTION = "Write a cache directory into the shared log, so that running servers use it within seconds."


def add(commands: Commands) -> None:
    """Its arguments."""
    command = add_command(
        commands, "push", _run, help="send a cache directory to running servers", description=_DESCRIPTION
    )
    command.add_argument("directory", type=Path, metavar="DIR")
    add_redis_argument(command)
    command.add_argument("--namespace", default=DEFAULT_NAMESPACE, help="whom it is for (default: %(default)s)")
    command.add_argument(
        "--max-tokens", type=int, default=1 << 22, metavar="N", help="bound of the shared log (default: %(default)s)"
    )


def _run(options: argparse.Namespace) -> int:
    from ssd.sharing.push import push_segments

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
