"""What a cache holds already, so that a file that is added again is not stored again."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.retrieval.packed import Tokens
from ssd.retrieval.ring import sequences_of
from ssd.retrieval.static import load_static_directory

_TAIL_TOKENS = 32
_ROW = np.dtype([("tail", "<u8"), ("whole", "<u8"), ("length", "<i8")])


class Stored:
    """The sequences of a directory, 24 bytes each, in a file that workers map.

    64 bits of hash, so that a collision is not expected below 10^9 sequences.
    """

    def __init__(self, rows: npt.NDArray[np.void]) -> None:
        """``rows`` : sorted by ``tail``."""
        self._rows = rows
        self._tails = rows["tail"]

    @classmethod
    def of(cls, directory: Path, *, fingerprint: str) -> Self:
        """Raises CacheError. O(tokens)."""
        found = [
            (_digest(sequence[-_TAIL_TOKENS:]), _digest(sequence), len(sequence))
            for sequence in sequences_of(load_static_directory(directory, fingerprint=fingerprint))
        ]
        return cls(np.sort(np.array(found, _ROW), order="tail"))

    @classmethod
    def open(cls, path: Path) -> Self:
        """What ``save`` wrote; raises OSError."""
        return cls(np.load(path, mmap_mode="r", allow_pickle=False))

    def save(self, path: Path) -> None:
        """To be opened by others; raises OSError."""
        np.save(path, self._rows, allow_pickle=False)

    def taken(self) -> Taken:
        """None yet."""
        return Taken(self._rows, self._tails)


class Taken:
    """Which stored sequences were found: each is good for one that is equal. How often a text occurs ranks drafts."""

    def __init__(self, rows: npt.NDArray[np.void], tails: npt.NDArray[np.uint64]) -> None:
        self._rows = rows
        self._tails = tails
        self._places: set[int] = set()

    def take(self, tokens: Tokens) -> bool:
        """Whether ``tokens`` are stored, or their end is where their beginning was stored once for many.

        What was found is not found a second time.
        """
        if not len(self._rows):
            return False
        tail = np.uint64(_digest(tokens[-_TAIL_TOKENS:]))
        place = int(np.searchsorted(self._tails, tail))
        while place < len(self._rows) and self._tails[place] == tail:
            length = int(self._rows[place]["length"])
            is_free = place not in self._places and length <= len(tokens)
            if is_free and _digest(tokens[-length:]) == int(self._rows[place]["whole"]):
                self._places.add(place)
                return True
            place += 1
        return False


def _digest(tokens: Tokens) -> int:
    return xxhash.xxh3_64_intdigest(tokens.tobytes())
