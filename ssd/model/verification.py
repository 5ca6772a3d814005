"""Compare drafts with the target's own tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import kernel
from ssd.model.kv.tree import Ints, Parents


@kernel
def accepted_lengths(fed: Ints, chosen: Ints, counts: Ints) -> npt.NDArray[np.int64]:
    """How many tokens of each row's draft the target would have produced itself, int64[B]: of two texts the length of
    the common prefix.

    fed : int64[B, T], the context's last token and the draft, ``counts[b]`` tokens together. chosen : int64[B, T], the
    target's token at each position, given the draft before it. O(positions).

    The output of a row is ``chosen[:accepted + 1]``: the accepted tokens and one more, the recovered token at the first
    difference or the bonus token after full acceptance. Each was chosen with the very prefix that precedes it in the
    output, so it is the token plain decoding chooses there: for greedy trivially, for sampling because the noise is a
    function of seed and position alone. The law is therefore the target's (Leviathan et al. 2023, appendix A.1, is
    the special case of a one-point draft distribution).
    """
    lengths = np.zeros(len(counts), np.int64)
    for b in range(len(counts)):
        while lengths[b] + 1 < counts[b] and fed[b, lengths[b] + 1] == chosen[b, lengths[b]]:
            lengths[b] += 1
    return lengths


def accepted_path(token_ids: npt.NDArray[np.int32], parents: Parents, chosen: Ints) -> Ints:
    """The nodes whose tokens the target would have produced itself, the root first: int64[accepted + 1].

    token_ids, parents : int32[k], as ``Draft`` has them. chosen : int64[>= k + 1], the target's token at each node,
    given the path to it.

    From the root on, the child that holds the target's own token is followed, the first of equal ones. The output is
    ``chosen[path]``: the accepted tokens and one more, each chosen after the very prefix that it follows in the output,
    as in a chain. A child stands behind its parent, so one scan finds the path: O(k).
    """
    path = [0]
    wanted = int(chosen[0])
    for node, (token, parent) in enumerate(zip(token_ids.tolist(), parents.tolist(), strict=True), start=1):
        if parent + 1 == path[-1] and token == wanted:
            path.append(node)
            wanted = int(chosen[node])
    return np.array(path)
