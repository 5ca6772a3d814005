"""``ssd-cache push``."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import xxhash

from cache_builder.commands.options import (
    CACHE_DIRECTORY,
    add_redis_argument,
    progress_bar,
    redis_client,
    redis_url_of,
)
from cache_builder.held import open_held
from ssd.errors import ConfigError
from ssd.retrieval.cache import DEFAULT_NAMESPACE
from ssd.retrieval.files import check_namespace
from ssd.retrieval.prefixes import split_sequence
from ssd.retrieval.ring import sequences_of
from ssd.sharing.entry import LEAD_IN_TOKENS, MAX_ENTRY_TOKENS, Entry, pack_entry, stream_key
from ssd.sharing.redis_log import DEFAULT_MAX_TOKENS, max_entries_of
from ssd.sharing.stream import append

_DESCRIPTION = """\
Write the text of a cache directory into the shared log, as if a server had said it: running servers draft from it
within seconds, those that join from their start.

What the log still holds of an earlier push is not stored twice. The newest text that fits the log's bound is sent, and
ages with what servers learn; text that is to stay is given to each server with --warm DIR.
"""


def add(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    add_redis_argument(command)
    command.add_argument("--namespace", default=DEFAULT_NAMESPACE, help="whom it is for (default: %(default)s)")
    command.add_argument(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N",
        help="the log's bound: the servers' --cache-tokens if that is more than %(default)s, the default",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    with progress_bar(0, " tokens") as bar:
        result = push(
            options.directory, redis_url_of(options), options.namespace, max_tokens=options.max_tokens,
            progress=bar.update,
        )  # fmt: skip
    print(f"pushed {result.num_tokens:,} tokens in {result.num_sequences:,} sequences to namespace {options.namespace}")
    if result.num_left_out_tokens:
        print(
            f"  {result.num_left_out_tokens:,} tokens in the {result.num_left_out_sequences:,} oldest sequences were "
            f"left out: the shared log keeps {options.max_tokens:,}. Servers get all with --warm {options.directory}"
        )
    return 0


class Pushed(NamedTuple):
    """What was written, and what the log's bound left out."""

    num_sequences: int
    num_tokens: int
    num_entries: int
    num_left_out_sequences: int
    num_left_out_tokens: int


REPLICA_ID: Final = b"ssd-push"
"""Never a running replica's, which are random."""

_BATCH: Final = 64


def push(
    directory: Path,
    url: str,
    namespace: str,
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    progress: Callable[[int], object] = lambda num_tokens: None,
) -> Pushed:
    """Write the sequences of ``directory`` to the stream of ``namespace``, the newest ones if not all fit.

    ``max_tokens`` : the log's bound, the same as the replicas'. ``progress`` : called with the tokens of each batch. An
    entry's sequence id is a hash of its place and its tokens, so a replica that still knows a push stores nothing when
    it is repeated. O(tokens), in memory of a few blocks and the longest sequence.

    Raises ConfigError and CacheError, StoreUnavailable for both ends.
    """
    check_namespace(namespace)
    if max_tokens < MAX_ENTRY_TOKENS:
        raise ConfigError(f"max_tokens must be at least {MAX_ENTRY_TOKENS}, one full entry, got {max_tokens}")
    (cache,) = open_held([directory])
    fingerprint, segments = cache.fingerprint, cache.segments
    lengths = np.fromiter(map(len, sequences_of(segments)), np.int64)
    first = len(lengths) - int(np.searchsorted(np.cumsum(lengths[::-1]), max_tokens, side="right"))
    key = stream_key(fingerprint, namespace)
    num_written = 0

    def failed() -> str:
        where = f"after {num_written}" if num_written else "at the first"
        return f"did not take the push: it failed {where} entries, which are not stored twice if pushed again"

    parts = (
        part
        for sequence in itertools.islice(sequences_of(segments), first, None)
        for part in split_sequence(sequence, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS)
    )
    with redis_client(url, failed) as client:
        while batch := list(itertools.islice(parts, _BATCH)):
            entries = [
                Entry(REPLICA_ID, xxhash.xxh3_128_digest(part.tobytes(), seed=num_written + number), part)
                for number, part in enumerate(batch)
            ]
            values = [pack_entry(entry, key) for entry in entries]
            for refusal in append(client, key, values, max_entries=max_entries_of(max_tokens)):
                if refusal is not None:
                    raise refusal
            num_written += len(entries)
            progress(sum(map(len, batch)))
    return Pushed(
        num_sequences=len(lengths) - first,
        num_tokens=int(lengths[first:].sum()),
        num_entries=num_written,
        num_left_out_sequences=first,
        num_left_out_tokens=int(lengths[:first].sum()),
    )
