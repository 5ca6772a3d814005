"""The command ``ssd-cache push``, which copies a cache directory to the Redis stream that replicas share."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from cache_builder.commands.options import (
    CACHE_DIRECTORY,
    add_redis_argument,
    escape_value,
    progress_bar,
    redis_client,
    redis_url_from_options,
    token_count,
)
from cache_builder.opened_cache import open_caches
from ssd.errors import ConfigError, StoreUnavailable
from ssd.numbers import format_number
from ssd.replication.entry import LEAD_IN_TOKENS, MAX_ENTRY_TOKENS, Entry, max_entries_of, pack_entry, stream_key
from ssd.replication.redis_stream import append_entries
from ssd.replication.replication_log import DEFAULT_MAX_TOKENS
from ssd.retrieval.dedup import split_sequence
from ssd.retrieval.files import check_namespace
from ssd.retrieval.ring import iter_sequences
from ssd.retrieval.segment import Segment

_DESCRIPTION = """\
Copy the text of a cache directory to a Redis stream, as if a server had generated it. Running servers draft from it
within seconds, and new servers from their start.

Text of an earlier push that the stream still contains is not stored again. If not all text fits into the stream, the
newest text is sent. Pushed text is evicted as servers add text; to keep it permanently, start servers with --warm DIR.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    add_redis_argument(command)
    command.add_argument(
        "--sglang",
        metavar="URL",
        help="Load the text into a running SGLang server with n-gram speculation instead of Redis; set $SGLANG_API_KEY "
        "to its admin key",
    )
    command.add_argument("--namespace", help="Namespace to write to (default: the namespace of the cache in DIR)")
    command.add_argument(
        "--max-tokens",
        type=token_count,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="Maximum size of the stream in tokens; must equal the servers' --cache-tokens "
        f"(default: {format_number(DEFAULT_MAX_TOKENS)})",
    )


def run(options: argparse.Namespace) -> int:
    if options.sglang is not None:
        push_to_sglang(options.directory, options.sglang, max_tokens=options.max_tokens)
    else:
        push(options.directory, redis_url_from_options(options), options.namespace, max_tokens=options.max_tokens)
    return 0


REPLICA_ID: Final = b"ssd-push"
"""The replica id of Redis entries that ``ssd-cache push`` writes, by which ``redis-status`` recognizes them."""

_BATCH: Final = 64
_SGLANG_TIMEOUT_S: Final = 300.0


def push(directory: Path, url: str, namespace: str | None = None, *, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
    """Append the sequences of a cache directory to the Redis stream of a namespace, and print a summary.

    If not all sequences fit into ``max_tokens``, the newest ones are written. ``max_tokens`` must equal the servers'
    ``--cache-tokens``, because every writer trims the stream to its own limit. If a cache is pushed again, its entries
    have the same ids, and servers ignore entries whose ids they remember. It takes O(tokens) time, and memory for a few
    blocks and the longest sequence. Raises ConfigError for an invalid argument, CacheError if the cache cannot be read,
    and StoreUnavailable if Redis fails.
    """
    if namespace is not None:
        check_namespace(namespace)
    if max_tokens < MAX_ENTRY_TOKENS:
        raise ConfigError(
            f"max_tokens must be at least {MAX_ENTRY_TOKENS}, the maximum size of an entry, got {max_tokens}"
        )
    (cache,) = open_caches([directory])
    namespace = cache.namespace if namespace is None else namespace
    fingerprint, segments = cache.fingerprint, cache.segments
    lengths, first = _first_that_fits(segments, max_tokens)
    key = stream_key(fingerprint, namespace)
    num_written = 0

    def describe_failure() -> str:
        where = f"after {num_written} entries" if num_written else "at the first entries"
        return f"did not accept the push, which failed {where}; if you push again, no entry is stored twice"

    parts = (
        part
        for sequence in itertools.islice(iter_sequences(segments), first, None)
        for part in split_sequence(sequence, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS)
    )
    with redis_client(url, describe_failure) as client, progress_bar(0, " tokens") as bar:
        while batch := list(itertools.islice(parts, _BATCH)):
            entries = [
                Entry(REPLICA_ID, xxhash.xxh3_128_digest(part.tobytes(), seed=num_written + number), part)
                for number, part in enumerate(batch)
            ]
            values = [pack_entry(entry, key) for entry in entries]
            for refusal in append_entries(client, key, values, max_entries=max_entries_of(max_tokens)):
                if refusal is not None:
                    raise refusal
            num_written += len(entries)
            bar.update(sum(map(len, batch)))
    print(f"pushed {lengths[first:].sum():,} tokens in {len(lengths) - first:,} sequences to namespace {namespace}")
    if first:
        print(
            f"  {lengths[:first].sum():,} tokens in the {first:,} oldest sequences were skipped: the stream holds "
            f"{max_tokens:,} tokens. To draft from all text, start servers with --warm {directory}"
        )


def _first_that_fits(segments: Sequence[Segment], max_tokens: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return the lengths of all sequences (int64[n]), and the index of the oldest sequence to push.

    The newest sequences are pushed, as many as have at most ``max_tokens`` tokens together.
    """
    lengths = np.fromiter(map(len, iter_sequences(segments)), np.int64)
    return lengths, len(lengths) - int(np.searchsorted(np.cumsum(lengths[::-1]), max_tokens, side="right"))


def push_to_sglang(directory: Path, url: str, *, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
    """Load the newest sequences of a cache directory into a running SGLang server, and print a summary.

    SGLang drafts from the sequences as external corpus "ssd-ID" until the server exits; ID is the id of the cache's
    last segment. Raises CacheError if the cache cannot be read, ConfigError if no sequence fits into ``max_tokens``,
    and StoreUnavailable if SGLang does not answer or rejects the sequences.
    """
    (cache,) = open_caches([directory])
    lengths, first = _first_that_fits(cache.segments, max_tokens)
    if first == len(lengths):
        raise ConfigError(
            f"no text of {directory} fits into {max_tokens} tokens, so nothing was pushed: raise --max-tokens"
        )
    name = f"ssd-{cache.segments[-1].segment_id}"
    headers = {"content-type": "application/json"}
    if key := os.environ.get("SGLANG_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    chunks = [sequence.tolist() for sequence in itertools.islice(iter_sequences(cache.segments), first, None)]
    body = json.dumps({"corpus_id": name, "token_chunks": chunks}).encode()
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/add_external_corpus", body, headers)
        with urllib.request.urlopen(request, timeout=_SGLANG_TIMEOUT_S) as response:
            loaded = json.load(response).get("loaded_token_count")
    except urllib.error.HTTPError as error:
        reason = escape_value(error.read(500))
        raise StoreUnavailable(f"SGLang at {url} refused the corpus with status {error.code}: {reason}") from None
    except (OSError, ValueError) as error:
        raise StoreUnavailable(f"SGLang at {url} does not answer ({error}): check the address") from None
    print(
        f"pushed {lengths[first:].sum():,} tokens in {len(chunks):,} sequences as corpus {name}; SGLang loaded "
        f"{loaded} tokens"
    )
