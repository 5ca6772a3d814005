"""Draft trees: the order of nodes in a forward pass, and the nodes to which each node attends.

The input of a pass is a row's last token and then its draft, so token i of the draft is **node** i + 1, and the last
token is node 0, the root. ``Draft.parents`` are indices of draft tokens (-1 is the root); a pass uses node numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Parents = npt.NDArray[np.int32]


def is_tree(parents: Parents, num_tokens: int) -> bool:
    """Return whether ``parents`` describes a draft tree of ``num_tokens`` tokens.

    ``parents`` must contain -1 (the root) or the index of an earlier token for each token.
    """
    return parents.shape == (num_tokens,) and all(-1 <= parent < i for i, parent in enumerate(parents.tolist()))


def leading_chain(parents: Parents) -> int:
    """Return the number of tokens at the beginning of a draft tree that form a chain, each the parent of the next."""
    return next((i for i, parent in enumerate(parents.tolist()) if parent != i - 1), len(parents))


def path_to(parents: Parents, node: int) -> list[int]:
    """Return the indices of the draft tokens on the path from the root of a draft tree to ``node``. O(depth)."""
    path = []
    token = node - 1
    while token >= 0:
        path.append(token)
        token = int(parents[token])
    return path[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class TreeShape:
    """The depths of all nodes of the draft trees in one forward pass, and the nodes to which each node attends."""

    depths: Ints  # the depth of each node, int64[B, T]
    tree_mask: npt.NDArray[np.bool_]  # bool[B, T, T]: [b, i, j] is True if node j is node i or its ancestor

    @classmethod
    def build(cls, parents: Ints) -> TreeShape:
        """Build the `TreeShape` of draft trees from the parent of each node, int64[B, T], -1 for the root. O(B T^2)."""
        num_rows, width = parents.shape
        assert (parents[:, 0] == -1).all() and (parents[:, 1:] >= 0).all()
        assert (parents < np.arange(width)).all()
        found, tree_mask = np.zeros((num_rows, width), np.int64), np.zeros((num_rows, width, width), np.bool_)
        rows = np.arange(num_rows)
        tree_mask[:, 0, 0] = True
        for node in range(1, width):
            parent = parents[:, node]
            found[:, node] = found[rows, parent] + 1
            tree_mask[:, node] = tree_mask[rows, parent]
            tree_mask[:, node, node] = True
        return cls(found, tree_mask)
