"""Compare drafts with the target's own tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ssd.model.kv.tree import Ints, Parents


def accepted_length(draft: npt.NDArray[np.int32], chosen: npt.NDArray[np.int64]) -> int:
    """How many draft tokens the target would have produced itself: the length of the common prefix.

    draft : int32[k]. chosen : int64[>= k + 1], the target's token at each position, given the draft before it.

    The output is ``chosen[:accepted + 1]``: the accepted tokens and one more, the recovered token at the first
    difference or the bonus token after full acceptance. Each was chosen with the very prefix that precedes it in the
    output, so it is the token plain decoding chooses there: for greedy trivially, for sampling because the noise is a
    function of seed and position alone. The law is therefore the target's (Leviathan et al. 2023, appendix A.1, is
    the special case of a one-point draft distribution).
    """
    differs = np.flatnonzero(draft != chosen[: len(draft)])
    return int(differs[0]) if len(differs) else len(draft)


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
