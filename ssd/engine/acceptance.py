"""Decide which draft tokens are accepted: the decision that makes speculative decoding lossless."""

from __future__ import annotations

import numpy as np

from ssd.jit.addresses import kernel
from ssd.model.kv.tree import Ints


@kernel
def accept_drafts(
    input_ids: Ints, sampled_ids: Ints, counts: Ints, parents: Ints, is_tree: bool
) -> tuple[Ints, Ints, Ints]:
    """Accept the draft tokens of each row that the target would have produced itself. O(positions).

    Starting at the first position, the path follows the child that equals the token sampled at the current position;
    among equal children the first one. A node comes after its parent, so one scan finds the path.

    Every sampled token was sampled with exactly the prefix that precedes it in the output. So it is the token that
    decoding without drafts produces there; for sampling this holds because the noise is a function of seed and position
    alone. The output therefore follows the target's distribution.

    Args:
        input_ids: The last token of the context followed by the draft, int64[B, T]; ``counts[b]`` tokens of row b.
        sampled_ids: The token that the target sampled at each position, given the draft before it, int64[B, T].
        counts: The number of positions of each row, int64[B].
        parents: For each position the one before it, int64[B, T], smaller than its own. Used only if ``is_tree``; in a
            chain it is the preceding position.
        is_tree: Whether the drafts are trees.

    Returns:
        A tuple (paths, output_ids, sizes). The first ``sizes[b]`` of ``paths[b]``, int64[B, T], are the accepted
        positions; the first of them is 0. As many of ``output_ids[b]``, int64[B, T], are the output: the accepted draft
        tokens and one more, which is the recovered token after the first rejected draft token, or the bonus token if
        the whole draft was accepted.
    """
    paths, output_ids, sizes = np.zeros_like(input_ids), np.zeros_like(input_ids), np.ones(len(counts), np.int64)
    for b in range(len(counts)):
        last, size = 0, 1
        output_ids[b, 0] = sampled_ids[b, 0]
        for node in range(1, counts[b]):
            if (parents[b, node] if is_tree else node - 1) == last and input_ids[b, node] == sampled_ids[b, last]:
                last = node
                paths[b, size], output_ids[b, size] = node, sampled_ids[b, node]
                size += 1
        sizes[b] = size
    return paths, output_ids, sizes
