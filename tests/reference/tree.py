"""Slow twins of tree verification: one path at a time, by plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Choose = Callable[[list[int]], int]
"""The target's token after some output."""


def path_of(parents: Sequence[int], token: int) -> list[int]:
    """The tokens of the draft up to and with ``token``, as indices, oldest first."""
    return [] if token < 0 else [*path_of(parents, parents[token]), token]


def leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """Every path from the root to a leaf; one of nothing where there is no draft."""
    leaves = [token for token in range(len(parents)) if token not in parents]
    return [path_of(parents, leaf) for leaf in leaves] or [[]]


def agreeing(tokens: Sequence[int], path: Sequence[int], choose: Choose) -> list[int]:
    """The part of ``path`` that plain decoding, which never sees the tree, says itself."""
    said: list[int] = []
    while len(said) < len(path) and choose(said) == tokens[path[len(said)]]:
        said.append(tokens[path[len(said)]])
    return list(path[: len(said)])


def path_of_text(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> list[int]:
    """The tokens that agree with ``text``, as indices: of equal siblings the first."""
    path: list[int] = []
    for token in text:
        last = path[-1] if path else -1
        right = [i for i in range(len(tokens)) if parents[i] == last and tokens[i] == token]
        if not right:
            break
        path.append(right[0])
    return path


def output_of(tokens: Sequence[int], parents: Sequence[int], choose: Choose) -> list[int]:
    """What a verify step of the tree puts out when it follows the best of its paths."""
    best = max((agreeing(tokens, path, choose) for path in leaf_paths(parents)), key=len)
    said = [tokens[token] for token in best]
    return [*said, choose(said)]


def visible(parents: Sequence[int]) -> list[set[int]]:
    """Of each node, the root first, the nodes it sees."""
    return [{0}, *({0, *(token + 1 for token in path_of(parents, leaf))} for leaf in range(len(parents)))]


def depths(parents: Sequence[int]) -> list[int]:
    """Draft tokens on the path to each node, the root first: how far behind it each stands."""
    return [0, *(len(path_of(parents, token)) for token in range(len(parents)))]


def node_parents(rows: Sequence[npt.NDArray[np.int32] | None], width: int) -> npt.NDArray[np.int64]:
    """The parent's node of each node of a pass, int64[B, width]; -1 of the root.

    rows : each draft's parents, None where it is a chain. Padding goes on as a chain: nobody looks at it.
    """
    nodes = np.tile(np.arange(-1, width - 1), (len(rows), 1))
    for b, parents in enumerate(rows):
        if parents is not None:
            nodes[b, 1 : len(parents) + 1] = parents + 1
    return nodes
