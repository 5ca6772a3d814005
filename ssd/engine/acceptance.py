"""Acceptance of draft tokens: the decision that makes speculative decoding lossless."""

from __future__ import annotations

import numpy as np

from ssd.drafting.accepted_path import accepted_path
from ssd.jit.addresses import kernel
from ssd.model.kv.tree import Ints


@kernel
def accept_drafts(
    input_ids: Ints, sampled_ids: Ints, counts: Ints, parents: Ints, is_tree: bool
) -> tuple[Ints, Ints, Ints]:
    """Accept each draft token that equals the token which the target sampled in its place. O(tokens).

    Draft tokens after the first one that differs are rejected. The output is the same as without drafts, because the
    target samples every accepted token after the same prefix as without drafts, and its random noise does not depend on
    drafts.

    Args:
        input_ids: int64[B, T], the last token of each sequence and its draft; the rest is padding, see ``counts``.
        sampled_ids: int64[B, T], the token that the target sampled after each input token.
        counts: int64[B], the number of input tokens of each sequence.
        parents: int64[B, T], the index in ``input_ids[b]`` of each token's parent, which is smaller than the index of
            the token. Used only if ``is_tree``; in a chain the parent is the token to the left.
        is_tree: Whether the drafts are trees.

    Returns:
        A tuple (paths, output_ids, sizes). For sequence b, the first ``sizes[b]`` entries are valid: ``paths[b]`` are
        the indices in ``input_ids[b]`` of the last token (0) and of the accepted draft tokens; ``output_ids[b]`` are
        the accepted draft tokens and one more, which is the recovered token after a rejection or the bonus token if the
        whole draft was accepted.
    """
    paths, output_ids, sizes = np.zeros_like(input_ids), np.zeros_like(input_ids), np.ones(len(counts), np.int64)
    for b in range(len(counts)):
        draft, path = input_ids[b, 1 : max(1, counts[b])], paths[b, 1:]
        sizes[b] += accepted_path(draft, parents[b, 1:], 0, is_tree, sampled_ids[b], True, path)
        for i in range(sizes[b]):
            output_ids[b, i] = sampled_ids[b, paths[b, i]]
    return paths, output_ids, sizes
