"""Tokens that may not be sampled at a position, by what the request allows and by what stands before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

Mask = npt.NDArray[np.bool_]


def mask_of(token_ids: Collection[int] | None, vocab_size: int) -> Mask | None:
    """bool[V], True at ``token_ids`` within it (a draft model may have fewer tokens than the target); None for None."""
    if token_ids is None:
        return None
    mask = np.zeros(vocab_size, np.bool_)
    mask[[token for token in token_ids if token < vocab_size]] = True
    return mask


def bad_word_ends(bad_words: Sequence[tuple[int, ...]], output: npt.NDArray[np.int32]) -> set[int]:
    """The last token of each sequence of which ``output``, int32[n], ends with all the others. O(their tokens)."""
    ends = set()
    for *begin, end in bad_words:
        if len(begin) <= len(output) and np.array_equal(output[len(output) - len(begin) :], begin):
            ends.add(end)
    return ends


def rule_out(scores: torch.Tensor, by_grammar: Mask | None, allowed: Mask | None, forbidden: Collection[int]) -> None:
    """Set to -inf, in place, what the grammar refuses, what is not allowed and what is forbidden.

    scores : [V]. The masks, bool[V], are True where a token may be sampled; None allows all. A later rule that would
    leave no token after those before it is not applied, so the grammar always holds and something can be sampled.
    """
    rules = [mask for mask in (by_grammar, allowed) if mask is not None]
    if forbidden:
        ruled_out = mask_of(forbidden, len(scores))
        assert ruled_out is not None
        rules.append(~ruled_out)
    if not rules:
        return
    left = rules[0]
    for rule in rules[1:]:
        both = left & rule
        left = both if both.any() else left
    if left.any():
        scores.masked_fill_(torch.from_numpy(~left).to(scores.device), float("-inf"))
