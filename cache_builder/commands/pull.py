"""The command ``ssd-cache pull``, which copies the text that replicas share in Redis to a cache directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cache_builder.building.resumable import new_cache
from cache_builder.commands.options import (
    add_log_of_namespace,
    find_fingerprints,
    progress_bar,
    redis_client,
    redis_url_from_options,
)
from cache_builder.commands.redis_status import decode_any_entry
from ssd.errors import SSDError
from ssd.replication.entry import stream_key
from ssd.replication.redis_stream import BEGINNING, all_entries, entries_after
from ssd.retrieval.cache_manager import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    import redis

_DESCRIPTION = """\
Copy the Redis stream of a namespace to a cache directory: the latest text from servers and from `ssd-cache push`.

The directory can be used with `ssd-serve --warm`, merged, pushed to another Redis, or kept as a backup.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    add_log_of_namespace(command, "Namespace to read", DEFAULT_NAMESPACE)
    command.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="Cache directory to write; created if missing"
    )
    command.add_argument("--force", action="store_true", help="Replace an existing cache in --out")


def run(options: argparse.Namespace) -> int:
    with redis_client(redis_url_from_options(options)) as client:
        found = find_fingerprints(client, options)
        if len(found) > 1:
            raise SSDError(
                f"namespace {options.namespace} has text of several tokenizers: give the fingerprint of one of them "
                f"with --fingerprint ({found})"
            )
        if not found or not entries_after(client, stream_key(found[0], options.namespace), BEGINNING, 1).entries:
            raise SSDError(
                f"Redis contains no text of namespace {options.namespace}: give the namespace of the servers with "
                "--namespace"
            )
        pull(client, found[0], options.namespace, options.out, force=options.force)
    return 0


def pull(client: redis.Redis, fingerprint: str, namespace: str, directory: Path, *, force: bool = False) -> None:
    """Write the entries of a namespace's Redis stream to a cache directory, each entry once, and print a summary.

    The directory is unchanged after an error. It takes O(n log n) time, and memory for one segment and the ids of the
    entries. Raises ConfigError if the directory cannot be used, CacheError or OSError if the cache cannot be written,
    and RedisError if Redis fails.
    """
    key = stream_key(fingerprint, namespace)
    seen: set[bytes] = set()
    num_tokens = num_invalid = 0
    with (
        progress_bar(0, " tokens") as bar,
        new_cache(directory, fingerprint=fingerprint, namespace=namespace, force=force) as writer,
    ):
        for raw in all_entries(client, key):
            entry = decode_any_entry(raw, key)
            if entry is None:
                num_invalid += 1
            elif entry.sequence_id not in seen:
                seen.add(entry.sequence_id)
                writer.append(entry.tokens)
                num_tokens += len(entry.tokens)
                bar.update(len(entry.tokens))
    print(f"{directory}: {num_tokens:,} tokens in {len(seen):,} sequences of {namespace}")
    if num_invalid:
        print(f"  {num_invalid:,} entries of the stream were not written by SSD and were skipped")
