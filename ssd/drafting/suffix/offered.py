"""What costlier sources and the target's guesses offer after a context: a forest, walked beside the draft."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import Float64s, Int64s, TokenIds, inlined, kernel
from ssd.compiled.records import Int64, Record
from ssd.drafting.offers import KINDS, MAX_OFFERED
from ssd.drafting.suffix.gather import NOTHING

MAX_GUESSED: Final = 16
"""Tokens that the target guessed, offered beside what a request brings."""

ROOT: Final = 0
"""The node of the context's end."""

_MOST_NODES: Final = 1 + MAX_OFFERED + MAX_GUESSED


class Forest(Record):
    """Offered tokens, of which no two behind the same ones are equal.

    Node ROOT is the context's end, the other nodes up to ``count`` are a token each: ``tokens``; ``kinds`` : which
    source gives it the greatest chance, ``chances`` : that chance. ``first`` : its first child, ``next`` : the next
    child of its parent; NOTHING where there is none. ``numbers`` : scratch, the node of each token brought.
    """

    count: Int64
    tokens: Annotated[Int64s, np.int64, _MOST_NODES]
    kinds: Annotated[Int64s, np.int64, _MOST_NODES]
    chances: Annotated[Float64s, np.float64, _MOST_NODES]
    first: Annotated[Int64s, np.int64, _MOST_NODES]
    next: Annotated[Int64s, np.int64, _MOST_NODES]
    numbers: Annotated[Int64s, np.int64, MAX_OFFERED]


@inlined
def clear_forest(forest: Forest) -> None:
    """Nothing is offered."""
    forest.count, forest.first[ROOT] = 1, NOTHING


@inlined
def child_of(forest: Forest, node: int, token: int) -> int:
    """The child of a node that is ``token``, NOTHING where there is none, nor of NOTHING. O(children)."""
    child = forest.first[node] if node >= 0 else NOTHING
    while child >= 0 and forest.tokens[child] != token:
        child = forest.next[child]
    return int(child)


@inlined
def has_children(forest: Forest, node: int) -> bool:
    """Whether anything is offered behind a node; not behind NOTHING."""
    return bool(node >= 0 and forest.first[node] >= 0)


@inlined
def best_child(forest: Forest, node: int) -> int:
    """The child of a node with the greatest chance, of equal ones the first; the node must have one. O(children)."""
    best = forest.first[node]
    child = forest.next[best]
    while child >= 0:
        if forest.chances[child] > forest.chances[best]:
            best = child
        child = forest.next[child]
    return int(best)


@inlined
def offer(forest: Forest, parent: int, token: int, chance: float, kind: int) -> int:
    """Add a token behind a node: its node. Behind NOTHING there is nothing, and what is no token is left out.

    Where several sources offer the same token behind the same ones, the greatest chance counts, of equal ones the
    first. O(children).
    """
    if parent < 0 or token < 0 or kind < 0 or kind >= KINDS:
        return NOTHING
    chance = chance if chance > 0.0 else 0.0  # also of what is no number
    last, node = NOTHING, forest.first[parent]
    while node >= 0 and forest.tokens[node] != token:
        last, node = node, forest.next[node]
    if node < 0:
        node = forest.count
        forest.count = node + 1
        if last < 0:
            forest.first[parent] = node
        else:
            forest.next[last] = node
        forest.tokens[node], forest.first[node], forest.next[node] = token, NOTHING, NOTHING
        forest.kinds[node], forest.chances[node] = kind, chance
    elif chance > forest.chances[node]:
        forest.kinds[node], forest.chances[node] = kind, chance
    return int(node)


@kernel
def plant(forest: Forest, tokens: TokenIds, parents: TokenIds, chances: Float64s, kinds: TokenIds) -> None:
    """Make what a request brings the forest, see `Offers`.

    A token whose parent does not come before it is left out, and all that goes on from it. O(tokens * children).
    """
    clear_forest(forest)
    for i in range(min(len(tokens), MAX_OFFERED)):
        parent = parents[i]
        behind = NOTHING
        if parent == -1:
            behind = ROOT
        elif 0 <= parent < i:
            behind = forest.numbers[parent]
        forest.numbers[i] = offer(forest, behind, tokens[i], chances[i], kinds[i])
