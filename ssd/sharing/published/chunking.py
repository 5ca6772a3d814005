"""Where text is cut into chunks: where its content says so, so that most chunks outlive what happens around them.

A sequence ends a chunk if its hash falls below its length, as a part of `MEAN_CHUNK_TOKENS`: so chunks have about so
many tokens, whatever the sequences' lengths, and text that was evicted at the beginning, or changed in the middle,
changes the chunks it touches and no others (content-defined chunking: Muthitacharoen et al., A Low-bandwidth Network
File System, SOSP 2001, section 3.1). A least length keeps repeated text from being cut everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import xxhash

from ssd.retrieval.packed import Tokens
from ssd.retrieval.prefixes import split_sequence
from ssd.retrieval.ring import sequences_of
from ssd.retrieval.segment import SEPARATOR, Segment
from ssd.sharing.entry import LEAD_IN_TOKENS, MAX_ENTRY_TOKENS
from ssd.sharing.published.chunk import MAX_CHUNK_TOKENS

MEAN_CHUNK_TOKENS: Final = 1 << 16
LEAST_CHUNK_TOKENS: Final = 1 << 13


def parts_of(segments: Sequence[Segment]) -> Iterator[Tokens]:
    """int32[1..MAX_ENTRY_TOKENS] each: the segments' sequences as the log would have them. O(tokens)."""
    for sequence in sequences_of(segments):
        yield from split_sequence(sequence, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS)


def parts_of_tail(tail: Tokens) -> Iterator[Tokens]:
    """The same of sequences that each end with a separator."""
    for piece in np.split(tail, np.flatnonzero(tail == SEPARATOR)):
        sequence = piece[1:] if len(piece) and piece[0] == SEPARATOR else piece
        yield from split_sequence(sequence, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS)


def cut(parts: Iterable[Tokens]) -> Iterator[list[Tokens]]:
    """The chunks of ``parts``, in order: each has at most MAX_CHUNK_TOKENS tokens. O(tokens), in memory of a chunk."""
    chunk: list[Tokens] = []
    num_tokens = 0
    for part in parts:
        if num_tokens + len(part) > MAX_CHUNK_TOKENS:
            yield chunk
            chunk, num_tokens = [], 0
        chunk.append(part)
        num_tokens += len(part)
        if num_tokens >= LEAST_CHUNK_TOKENS and hash_of(part) % MEAN_CHUNK_TOKENS < len(part):
            yield chunk
            chunk, num_tokens = [], 0
    if chunk:
        yield chunk


def hash_of(part: Tokens) -> int:
    """xxh3-64 of a sequence's tokens."""
    return xxhash.xxh3_64_intdigest(part.tobytes())
