"""A warm-up directory into the log, so that running replicas have it within seconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.errors import ConfigError, StoreUnavailable
from ssd.retrieval.names import check_namespace
from ssd.retrieval.packed import Tokens
from ssd.retrieval.prefixes import split_sequence
from ssd.retrieval.ring import sequence_lengths, sequences_of
from ssd.retrieval.static import load_static_directory
from ssd.sharing.connection import address_of, connect, hide_password
from ssd.sharing.entry import LEAD_IN_TOKENS, MAX_ENTRY_TOKENS, Entry, pack_entry, stream_key
from ssd.sharing.redis_log import DEFAULT_MAX_TOKENS, max_entries_of
from ssd.sharing.stream import append

if TYPE_CHECKING:
    import redis


_BATCH = 64
_REPLICA_ID = b"ssd-push"  # never a running replica's, which are random


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """What was written, and what the log's bound left out."""

    num_sequences: int
    num_tokens: int
    num_entries: int
    num_left_out_sequences: int
    num_left_out_tokens: int


def push_segments(
    directory: Path,
    url: str,
    namespace: str,
    *,
    fingerprint: str,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> PushResult:
    """Write the sequences of ``directory`` to the stream of ``namespace``, the newest ones if not all fit.

    ``fingerprint`` : the tokenizer's, as the directory's manifest has it. ``max_tokens`` : the log's bound, the same as
    the replicas'. ``progress`` : called with the tokens of each batch. An entry's sequence id is a hash of its place
    and its tokens, so a replica that still knows a push stores nothing when it is repeated. O(tokens), in memory of a
    few blocks and the longest sequence.

    Raises CacheError: SegmentCorrupt, FormatVersion, TokenizerMismatch, and StoreUnavailable for both ends.
    """
    check_namespace(namespace)
    if max_tokens < MAX_ENTRY_TOKENS:
        raise ConfigError(f"max_tokens must be at least {MAX_ENTRY_TOKENS}, one full entry, got {max_tokens}")
    segments = load_static_directory(directory, fingerprint=fingerprint)
    lengths = sequence_lengths(segments)
    first = _first_that_fits(lengths, max_tokens)
    client = connect(url)
    key = stream_key(fingerprint, namespace)
    num_entries = num_written = 0
    try:
        batch: list[bytes] = []
        num_batch_tokens = 0
        for sequence in itertools.islice(sequences_of(segments), first, None):
            for part in split_sequence(sequence, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS):
                batch.append(pack_entry(Entry(_REPLICA_ID, _sequence_id(num_entries, part), part), key))
                num_batch_tokens += len(part)
                num_entries += 1
                if len(batch) == _BATCH:
                    _write(client, key, batch, max_tokens)
                    num_written = num_entries
                    if progress is not None:
                        progress(num_batch_tokens)
                    batch, num_batch_tokens = [], 0
        _write(client, key, batch, max_tokens)
        if progress is not None:
            progress(num_batch_tokens)
    except Exception as error:
        from redis.exceptions import RedisError

        if not isinstance(error, RedisError | OSError):
            raise
        reason = hide_password(f"{type(error).__name__}: {error}", url)
        raise StoreUnavailable(
            f"{address_of(url)} did not take the push: {_extent(num_written)} ({reason}). Check the address, the "
            "user's rights (+xadd +watch +multi +exec +del) and maxmemory, then push again: what is there already "
            "is not stored twice"
        ) from None
    finally:
        client.close()
    return PushResult(
        num_sequences=len(lengths) - first,
        num_tokens=int(lengths[first:].sum()),
        num_entries=num_entries,
        num_left_out_sequences=first,
        num_left_out_tokens=int(lengths[:first].sum()),
    )


def _first_that_fits(lengths: npt.NDArray[np.int64], max_tokens: int) -> int:
    """Index of the first sequence so that it and all later ones hold at most ``max_tokens`` tokens."""
    return len(lengths) - int(np.searchsorted(np.cumsum(lengths[::-1]), max_tokens, side="right"))


def _extent(num_written: int) -> str:
    """What is known to be there; of the entries that were on their way when it failed any may be."""
    return f"it failed after {num_written} entries" if num_written else "it failed at the first entries"


def _sequence_id(number: int, tokens: Tokens) -> bytes:
    return xxhash.xxh3_128_digest(tokens.tobytes(), seed=number)


def _write(client: redis.Redis, key: str, batch: list[bytes], max_tokens: int) -> None:
    if batch:
        for refusal in append(client, key, batch, max_entries=max_entries_of(max_tokens)):
            if refusal is not None:
                raise refusal
