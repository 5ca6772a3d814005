"""What a cache holds already, so that a file that is added again is not stored again."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import xxhash

from ssd.retrieval.packed import Tokens
from ssd.retrieval.sequences import sequences_of
from ssd.retrieval.static import load_static_directory

_TAIL_TOKENS = 32


class Stored:
    """The sequences of a directory, each good for one that is equal: how often a text occurs ranks drafts.

    Some 200 bytes a sequence; 64 bits of hash, so that a collision is not expected below 10^9 sequences.
    """

    def __init__(self) -> None:
        self._by_tail: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    @classmethod
    def of(cls, directory: Path, *, fingerprint: str) -> Stored:
        """Raises CacheError. O(tokens)."""
        stored = cls()
        for sequence in sequences_of(load_static_directory(directory, fingerprint=fingerprint)):
            stored._by_tail[_digest(sequence[-_TAIL_TOKENS:])].append((len(sequence), _digest(sequence)))
        return stored

    def take(self, tokens: Tokens) -> bool:
        """Whether ``tokens`` are stored, or their end is where their beginning was stored once for many.

        What was found is not found a second time.
        """
        found = self._by_tail.get(_digest(tokens[-_TAIL_TOKENS:]), [])
        for place, (length, digest) in enumerate(found):
            if length <= len(tokens) and _digest(tokens[-length:]) == digest:
                del found[place]
                return True
        return False


def _digest(tokens: Tokens) -> int:
    return xxhash.xxh3_64_intdigest(tokens.tobytes())
