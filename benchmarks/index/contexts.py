"""What is asked for: contexts that occur, and contexts of which only the last few tokens do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ssd.retrieval.packed import unpack
from ssd.retrieval.search import longest_match
from ssd.retrieval.segment import Segment
from ssd.retrieval.snapshot import Snapshot

Tokens = npt.NDArray[np.int32]

CONTEXT_TOKENS = 64
DRAFT_TOKENS = 10
MOST_KNOWN = 10
"""Of a broken context so many of the last tokens occur, or fewer."""

_ATTEMPTS = 50


@dataclass(frozen=True, slots=True)
class Context:
    """A context and what is known of it.

    ``tokens`` : int32[CONTEXT_TOKENS]. ``known`` : how many of the last ones occur, one after the other; no longer tail
    does. ``following`` : int32[DRAFT_TOKENS], what stands next at the place it was taken from.
    """

    tokens: Tokens
    known: int
    following: Tokens

    @property
    def is_present(self) -> bool:
        """All of it occurs."""
        return self.known == CONTEXT_TOKENS


def window(segment: Segment, start: int, stop: int) -> Tokens:
    """int32: tokens [start, stop) of a segment, without unpacking the others."""
    return unpack(segment.text[segment.width * start :], stop - start, segment.width)


def sample_contexts(snapshot: Snapshot, count: int, random: np.random.Generator) -> list[Context]:
    """``count`` contexts from random places of the segments, in turn present and broken.

    A broken one has the token before its last 1 to MOST_KNOWN replaced, so that no longer tail occurs anywhere. Raises
    AssertionError when the text offers none.
    """
    bounds = np.cumsum([len(segment) for segment in snapshot.segments])
    largest = _largest_id(snapshot, random)
    contexts: list[Context] = []
    for _ in range(1000 + 100 * count):
        if len(contexts) == count:
            return contexts
        place = int(random.integers(bounds[-1]))
        segment = snapshot.segments[int(np.searchsorted(bounds, place, side="right"))]
        text = _stretch(segment, CONTEXT_TOKENS + DRAFT_TOKENS, random)
        if text is None:
            continue
        tokens, following = text[:CONTEXT_TOKENS].copy(), text[CONTEXT_TOKENS:].copy()
        known = CONTEXT_TOKENS
        if len(contexts) % 2:
            known = int(random.integers(1, MOST_KNOWN + 1))
            if not _break(tokens, known, largest, snapshot, random):
                continue
        contexts.append(Context(tokens, known, following))
    if len(contexts) < count:
        raise AssertionError(f"only {len(contexts)} of {count} contexts were found in {bounds[-1]} tokens")
    return contexts


def sample_sequences(snapshot: Snapshot, count: int, length: int, random: np.random.Generator) -> list[Tokens]:
    """Up to ``count`` stretches of ``length`` tokens of the segments, each inside one sequence."""
    found: list[Tokens] = []
    for _ in range(100 * count):
        if len(found) == count:
            break
        text = _stretch(snapshot.segments[int(random.integers(len(snapshot.segments)))], length, random)
        if text is not None:
            found.append(text)
    return found


def _stretch(segment: Segment, length: int, random: np.random.Generator) -> Tokens | None:
    """``length`` tokens from a random place; None when a separator is among them."""
    if len(segment) <= length:
        return None
    start = int(random.integers(0, len(segment) - length))
    text = window(segment, start, start + length)
    return None if text.min() < 0 else text


def _largest_id(snapshot: Snapshot, random: np.random.Generator) -> int:
    """About the largest token id there is: of a few thousand tokens of each segment."""
    found = 0
    for segment in snapshot.segments:
        start = int(random.integers(max(1, len(segment) - 4096)))
        found = max(found, int(window(segment, start, min(len(segment), start + 4096)).max()))
    return found


def _break(tokens: Tokens, known: int, largest: int, snapshot: Snapshot, random: np.random.Generator) -> bool:
    for _ in range(_ATTEMPTS):
        tokens[-known - 1] = random.integers(0, largest + 1)
        if longest_match(snapshot, tokens[-known - 1 :], known + 1).length == known:
            return True
    return False  # anything precedes these tokens somewhere
