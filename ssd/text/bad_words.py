"""Words that must not be generated, as token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.errors import RequestError, shown
from ssd.text.codec import TextCodec

MAX_BAD_WORDS = 1000
"""Most token sequences of one request; each is compared at each position."""


def encode_bad_words(codec: TextCodec, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as the tokenizer spells it at the beginning of a text and after a space, as in vLLM.

    Another spelling of the same text by other tokens is not found; so a common word may be kept out and a rare one come
    in pieces. Raises RequestError for a word without a token, and for too many.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone, spaced = (tuple(codec.encode_completion(text)) for text in (word.lstrip(), " " + word.lstrip()))
        if not alone:
            raise RequestError(f"bad_words has {shown(word)}, which is no token: give words", param="bad_words")
        found[alone] = None
        # Where the space is a token of its own the word alone is found behind it.
        if spaced and spaced[0] != alone[0] and len(spaced) == len(alone):
            found[spaced] = None
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words has {len(found)} spellings, at most {MAX_BAD_WORDS}", param="bad_words")
    return tuple(found)
