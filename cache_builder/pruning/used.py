"""Which stored text is drafted from: logs are decoded over it, and what was accepted is looked for in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from cache_builder.evaluation.classes import runs
from cache_builder.evaluation.log import Log
from cache_builder.replay.cost import flat
from cache_builder.replay.decoding import Decoded, OutputDecoder
from cache_builder.replay.rows import Row
from ssd.config import CacheConfig, DraftConfig
from ssd.drafting.ask import SOURCES
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.packed import Tokens

BLOCK_TOKENS: Final = 64
"""Of stored text, which is used or not as one."""

RUN_TOKENS: Final = 8
"""So many tokens in a row are hardly ever a coincidence."""

_WARM: Final = SOURCES.index("warm")
_SIEVE_BITS: Final = 20
_WIDTH: Final = 32
"""Tokens up to which a pass is taken to cost nothing more: drafts are long, so that what helps any device is seen."""

Keys = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]


class Said:
    """Runs of tokens that drafts from stored text brought and that were accepted, and how often.

    ``keys`` : uint64[n], their hashes, rising; ``counts`` : int64[n].
    """

    def __init__(self, found: Iterable[Keys]) -> None:
        self.keys, self.counts = np.unique(np.concatenate([np.empty(0, np.uint64), *found]), return_counts=True)
        self._sieve = np.zeros(1 << _SIEVE_BITS, np.bool_)
        self._sieve[_sieved(self.keys)] = True
        self._is_placed = np.zeros(len(self.keys), np.bool_)

    def place(self, tokens: Tokens, start: int, credits: Counts) -> None:
        """Credit the blocks of ``credits`` with the runs that stand in ``tokens`` first, which begin at ``start``.

        Called with all stored text in order: what stands in several places counts where it stands first, so that what
        is popular is kept once. O(n).
        """
        keys = runs(tokens, RUN_TOKENS)
        begins = np.flatnonzero(self._sieve[_sieved(keys)])
        at = np.searchsorted(self.keys, keys[begins])
        is_said = at < len(self.keys)
        is_said[is_said] = self.keys[at[is_said]] == keys[begins[is_said]]
        at, begins = at[is_said], begins[is_said]
        at, first = np.unique(at, return_index=True)
        begins = begins[first][~self._is_placed[at]]
        at = at[~self._is_placed[at]]
        self._is_placed[at] = True
        np.add.at(credits, (start + begins + RUN_TOKENS - 1) // BLOCK_TOKENS, self.counts[at])


def said_from(
    directory: Path, log: Log, fingerprint: str, progress: Callable[[int], None] = lambda num_tokens: None
) -> Said:
    """Decode ``log`` with the cache ``directory`` as it is. ``progress`` : told of output tokens.

    Raises CacheError. Some 30 us a token that is accepted nowhere, less where drafts are.
    """
    decoder = OutputDecoder(flat(_WIDTH), draft=DraftConfig())
    found: list[Keys] = []
    with CacheSet(CacheConfig(memory_bytes=0), fingerprint, inline=True) as caches:
        caches.add_static_directory(directory)
        snapshot = caches.get().snapshot()
        for number in log.with_prompt.tolist():
            row = log.row(number)
            found += _accepted(row, decoder.decode(row, snapshot))
            progress(len(row.output))
    return Said(found)


def _accepted(row: Row, steps: Decoded) -> Sequence[Keys]:
    """The runs that end in a token that a draft from stored text brought."""
    text, positions = row.text(), len(row.context) + np.cumsum(steps.accepted + 1) - steps.accepted - 1
    of_warm = np.flatnonzero((steps.accepted > 0) & (steps.sources == _WARM))
    return [
        runs(text[max(0, positions[step] - RUN_TOKENS + 1) : positions[step] + steps.accepted[step]], RUN_TOKENS)
        for step in of_warm.tolist()
    ]


def _sieved(keys: Keys) -> Keys:
    return keys >> np.uint64(64 - _SIEVE_BITS)
