"""``ssd-cache pull``."""

from __future__ import annotations

import argparse
from pathlib import Path

from cache_builder.commands.options import add_store_arguments, fingerprint_for, progress_bar, store_of
from ssd.retrieval.cache import DEFAULT_NAMESPACE

_DESCRIPTION = """\
Write what servers published of a namespace, and what was pushed to it, into a cache directory.

The directory can be given to `ssd-serve --warm`, pushed elsewhere, or kept. Text of the last minute may be missing.
"""


def add(command: argparse.ArgumentParser) -> None:
    """Its arguments."""
    command.description = _DESCRIPTION
    add_store_arguments(command)
    command.add_argument("--namespace", default=DEFAULT_NAMESPACE, help="whose text (default: %(default)s)")
    command.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="where to write; added to what is there"
    )
    command.add_argument("--fingerprint", metavar="HEX", help="of the tokenizer, where servers of several share")


def run(options: argparse.Namespace) -> int:
    from ssd.sharing.published.commands import open_store, pull

    redis_url, store_url = store_of(options)
    fingerprint = fingerprint_for(options)
    with (
        open_store(redis_url, store_url, fingerprint, options.namespace) as store,
        progress_bar(0, " tokens") as progress,
    ):
        result = pull(
            store, options.out, fingerprint=fingerprint, namespace=options.namespace, progress=progress
        )  # fmt: skip
    print(f"{options.out}: {result.num_tokens:,} tokens in {result.num_sequences:,} sequences of {options.namespace}")
    if result.num_missing:
        print(f"  {result.num_missing:,} chunks were missing or damaged: pull again once a server has published anew")
    return 1 if result.num_missing else 0
