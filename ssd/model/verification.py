"""Compare drafts with the target's own tokens."""

from __future__ import annotations

import numpy as np

from ssd.compiled.addresses import kernel
from ssd.model.kv.tree import Ints


@kernel
def agree(fed: Ints, chosen: Ints, counts: Ints, parents: Ints, is_tree: bool) -> tuple[Ints, Ints, Ints]:
    """How far the target would have produced each row's draft itself: (paths, said, sizes).

    fed : int64[B, T], the context's last token and the draft, ``counts[b]`` tokens together. chosen : int64[B, T], the
    target's token at each position, given the draft before it. parents : int64[B, T], the position that each goes on
    from, smaller than its own; looked at where ``is_tree``, else each goes on from the one before it.

    The first ``sizes[b]`` of ``paths[b]``, int64[B, T], are the positions that were right, 0 to begin with; as many of
    ``said``, int64[B, T], are the output, ``chosen`` along the path: the accepted tokens and one more, the recovered
    token at the first difference or the bonus token after full acceptance. From the first position on, the one that
    holds the target's own token is followed, the first of equal ones; it stands behind its parent, so one scan finds
    the path. O(positions).

    Each token was chosen with the very prefix that precedes it in the output, so it is the token plain decoding chooses
    there: for greedy trivially, for sampling because the noise is a function of seed and position alone. The law is
    therefore the target's (Leviathan et al. 2023, appendix A.1, is the special case of a one-point draft distribution).
    """
    paths, said, sizes = np.zeros_like(fed), np.zeros_like(fed), np.ones(len(counts), np.int64)
    for b in range(len(counts)):
        last, size = 0, 1
        said[b, 0] = chosen[b, 0]
        for node in range(1, counts[b]):
            if (parents[b, node] if is_tree else node - 1) == last and fed[b, node] == chosen[b, last]:
                last = node
                paths[b, size], said[b, size] = node, chosen[b, node]
                size += 1
        sizes[b] = size
    return paths, said, sizes
