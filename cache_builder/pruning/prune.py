"""``ssd-cache prune``: a cache of at most so many tokens or bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from cache_builder.caches.held import Held, open_held
from cache_builder.caches.new_cache import check_out, new_cache
from cache_builder.pruning.chosen import LEAD_IN_TOKENS, chosen, kept_pieces
from cache_builder.pruning.used import BLOCK_TOKENS, Counts, Said
from ssd.errors import ConfigError
from ssd.retrieval.packed import Tokens
from ssd.retrieval.ring import sequences_of

_UNITS: Final = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_FILE_BYTES: Final = 1 << 14
"""Of a directory beside the text, and of a segment's header and padding."""
_LEAST_TOKENS: Final = 2 * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Budget:
    """So many tokens, or bytes of files."""

    amount: int
    is_bytes: bool

    @classmethod
    def parse(cls, text: str) -> Budget:
        """ "4M" and "4000000" are tokens, "64MB" and "64MiB" bytes. Raises ConfigError."""
        found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?((?:[kMG]i?)?)(B?)", text.strip().replace("K", "k"))
        amount = 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
        if found is None or not 0 < amount < 1 << 50:
            raise ConfigError(f"--budget {text[:40]}: give tokens, as 4000000 or 4M, or bytes, as 64MB or 64MiB")
        return cls(amount, bool(found[3]))

    def tokens_of(self, cache: Held) -> int:
        """How many tokens of ``cache`` it is, separators included."""
        if not self.is_bytes:
            return self.amount
        segments = cache.segments
        num_bytes = sum(each.text.nbytes + each.order.nbytes + each.fence.nbytes for each in segments)
        room = max(0, self.amount - _FILE_BYTES * (1 + len(segments)))
        return int(room * cache.num_tokens / max(1, num_bytes))


@dataclass(frozen=True, slots=True)
class Pruned:
    """Tokens are with separators. ``num_used_blocks`` : of 64 tokens each, those that drafts came from;
    ``num_kept_used`` : of them those that are kept whole."""

    num_tokens_before: int
    num_tokens: int
    num_sequences: int
    num_used_blocks: int
    num_kept_used: int


def prune(
    directory: Path,
    out: Path,
    budget: Budget,
    *,
    find_said: Callable[[], Said] | None = None,
    force: bool = False,
) -> Pruned:
    """Write what of the cache ``directory`` is of most use to ``out``, which may be the same directory.

    ``find_said`` : what logs were seen to draft from it; None keeps the newest text. Raises ConfigError, CacheError,
    OSError; then ``out`` is as it was before. O(tokens), in memory of a block in 64 and a segment of the result.
    """
    check_out(out, force=force)
    (cache,) = open_held([directory])
    num_tokens = budget.tokens_of(cache)
    if num_tokens < _LEAST_TOKENS:
        raise ConfigError(f"--budget leaves room for {num_tokens} tokens: give at least {_LEAST_TOKENS}")
    credits = np.zeros(-(-cache.num_tokens // BLOCK_TOKENS), np.int64)
    if find_said is not None:
        credits = credits_of(cache, find_said())
    # Of what no log used, a part of everything served held-out requests better than the newest, or what stands nearby.
    kept = chosen(credits, num_tokens, spread=find_said is not None)
    num_sequences = 0
    with new_cache(out, fingerprint=cache.fingerprint, namespace=cache.namespace, force=force) as writer:
        for start, sequence in _placed(cache):
            for piece in kept_pieces(sequence, start, kept):
                writer.append(piece)
                num_sequences += 1
        num_written = writer.num_tokens
    used, kept_blocks = credits > 0, kept.reshape(-1, BLOCK_TOKENS // LEAD_IN_TOKENS).all(1)
    return Pruned(cache.num_tokens, num_written, num_sequences, int(used.sum()), int((used & kept_blocks).sum()))


def credits_of(cache: Held, said: Said) -> Counts:
    """int64[blocks]: of each 64 tokens of the cache how many that were accepted elsewhere stand there first."""
    credits = np.zeros(-(-cache.num_tokens // BLOCK_TOKENS), np.int64)
    for start, sequence in _placed(cache):
        said.place(sequence, start, credits)
    return credits


def _placed(cache: Held) -> Iterator[tuple[int, Tokens]]:
    """Its sequences, and where each begins; a separator follows each."""
    start = 0
    for sequence in sequences_of(cache.segments):
        yield start, sequence
        start += len(sequence) + 1
