"""Find how far a draft agrees with the target's tokens: the accepted path of a draft chain or tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ssd.jit.addresses import TokenIds, inlined, kernel

Integers = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@inlined
def accepted_path(
    tokens: Integers, parents: Integers, root: int, is_tree: bool, next_ids: Integers, is_by_node: bool, path: Any
) -> int:
    """Find the draft tokens that the target accepts: write their nodes to ``path``, and return their number. O(tokens).

    The path starts at the root, the end of the context. From each node the path continues with the first child that
    equals the next token, and it ends if no child does. A token comes after its parent, so one scan finds the path.

    Args:
        tokens: The draft tokens.
        parents: The node before each draft token, which is smaller than the token's node. Used only if ``is_tree``; in
            a chain it is the node of the preceding token.
        root: The node of the context's end; the nodes of the draft tokens are ``root + 1``, ``root + 2``, ...
        is_tree: Whether the draft is a tree.
        next_ids: The next tokens: those that the target sampled after the root and after each draft token, or a text
            that follows the context.
        is_by_node: Whether ``next_ids`` has a token for each node; else it is a text.
        path: Output, the nodes of the accepted draft tokens in order.
    """
    last, size = root, 0
    for i in range(len(tokens)):
        at = last - root if is_by_node else size
        if at < len(next_ids) and (parents[i] if is_tree else root + i) == last and tokens[i] == next_ids[at]:
            last = root + 1 + i
            path[size] = last
            size += 1
    return size


@kernel
def path_of_text(tokens: TokenIds, parents: TokenIds, is_tree: bool, text: TokenIds) -> TokenIds:
    """Return the indices of the draft tokens that would be accepted if the context continued with this text."""
    path = np.empty(len(tokens), np.int32)
    return path[: accepted_path(tokens, parents, -1, is_tree, text, False, path)]
