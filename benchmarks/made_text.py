"""Text to fill an index with: endless streams of completions of 200 to 2,000 tokens, the same for one seed.

All memory a stream will ever keep is taken before its first completion, so what grows later is not the benchmark's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

SHORTEST, LONGEST = 200, 2000
EDITED = 0.02
"""Share of the tokens that are replaced in a near-copy."""

_ZIPF_EXPONENT = 1.1

_PHRASES = 20_000
_LONGEST_PHRASE = 12
_NEXT_PHRASES = 12  # a phrase is followed by one of so many, the first ones mostly
_KEPT_DOCUMENTS = 512
_COPIES = 0.25
_DOCUMENTS_AT_ONCE = 128


def completions(vocabulary: int, seed: int) -> Iterator[Tokens]:
    """int32 arrays of ids below ``vocabulary``, without separators.

    20,000 phrases of 2 to 12 Zipf-distributed tokens; each is followed by one of 12 others, the first ones mostly; a
    quarter of the documents are near-copies of one of 512 earlier ones. In a million tokens a stretch of 4, 8, 16
    tokens stands in 6, 3, 1 places (median) and new text matches 11 tokens.
    """
    return _made(vocabulary, np.random.default_rng(seed))


def _edited(tokens: Tokens, vocabulary: int, random: np.random.Generator) -> Tokens:
    copy = tokens.copy()
    places = random.random(len(copy)) < EDITED
    copy[places] = random.integers(0, vocabulary, int(places.sum()))
    return copy


def _zipf_tokens(cumulative: npt.NDArray[np.float64], size: int, random: np.random.Generator) -> Tokens:
    tokens: Tokens = np.searchsorted(cumulative, random.random(size) * cumulative[-1]).astype(np.int32)
    return tokens


def _zipf_cumulative(vocabulary: int) -> npt.NDArray[np.float64]:
    return np.cumsum(1.0 / np.arange(1, vocabulary + 1) ** _ZIPF_EXPONENT)


def _new_documents(vocabulary: int, random: np.random.Generator) -> Iterator[Tokens]:
    """Walks from phrase to phrase, many at once so that numpy does the stepping."""
    drawn = _zipf_tokens(_zipf_cumulative(vocabulary), _PHRASES * _LONGEST_PHRASE, random)
    phrases = drawn.reshape(_PHRASES, _LONGEST_PHRASE)
    sizes = random.integers(2, _LONGEST_PHRASE + 1, _PHRASES)
    followers = random.integers(0, _PHRASES, (_PHRASES, _NEXT_PHRASES))
    columns = np.arange(_LONGEST_PHRASE)
    steps = LONGEST // 2  # no phrase is shorter than 2
    while True:
        lengths = random.integers(SHORTEST, LONGEST + 1, _DOCUMENTS_AT_ONCE)
        chosen = np.empty((steps, _DOCUMENTS_AT_ONCE), np.int64)
        chosen[0] = random.integers(0, _PHRASES, _DOCUMENTS_AT_ONCE)
        choices = np.minimum(random.geometric(0.35, (steps, _DOCUMENTS_AT_ONCE)) - 1, _NEXT_PHRASES - 1)
        for step in range(1, steps):
            chosen[step] = followers[chosen[step - 1], choices[step]]
        for document, length in enumerate(lengths.tolist()):
            path = chosen[: length // 2, document]
            yield phrases[path][columns < sizes[path][:, None]][:length]


def _made(vocabulary: int, random: np.random.Generator) -> Iterator[Tokens]:
    kept = np.zeros((_KEPT_DOCUMENTS, LONGEST), np.int32)
    kept.fill(1)  # touches its pages now
    lengths = np.zeros(_KEPT_DOCUMENTS, np.int64)
    new = _new_documents(vocabulary, random)
    num_kept = 0
    while True:
        if num_kept and random.random() < _COPIES:
            place = int(random.integers(min(num_kept, _KEPT_DOCUMENTS)))
            yield _edited(kept[place, : lengths[place]], vocabulary, random)
            continue
        tokens = next(new)
        place = num_kept if num_kept < _KEPT_DOCUMENTS else int(random.integers(_KEPT_DOCUMENTS))
        kept[place, : len(tokens)], lengths[place] = tokens, len(tokens)
        num_kept += 1
        yield tokens
