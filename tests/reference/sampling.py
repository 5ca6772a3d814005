"""Slow twins of the sampling rules."""

from __future__ import annotations

from collections.abc import Sequence


def bad_word_ends(bad_words: Sequence[Sequence[int]], output: Sequence[int]) -> set[int]:
    """The last token of each sequence of which ``output`` ends with all the others. O(their tokens)."""
    ends = set()
    for *begin, end in bad_words:
        if len(begin) <= len(output) and list(output[len(output) - len(begin) :]) == begin:
            ends.add(end)
    return ends
