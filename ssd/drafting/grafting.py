"""One tree of several drafts: a trunk, and trees that go on from its end or from nodes on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ssd.drafting.protocol import Draft, Prices
from ssd.pricing.rate import price_of


@dataclass(slots=True, eq=False)
class Graft:
    """A tree under construction.

    Of each node: ``token_ids``, ``parents`` (-1 after the context), ``estimates``, the chance once those before it
    came, and ``chances``, that it and all before it come. A parent comes before its children.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, draft: Draft, at: int = -1, *, rate: float = 1.0, apart: bool = False) -> list[int]:
        """Add a tree that goes on from node ``at``; returns the node that each of its tokens became. O(its tokens).

        A token that the tree has at that place is that one. ``rate`` : estimate of every token, where the draft has
        none. ``apart`` : its tokens become nodes of their own, whatever stands there.
        """
        estimates = [rate] * len(draft.token_ids) if draft.probabilities is None else draft.probabilities.tolist()
        nodes: list[int] = []
        for token, parent, estimate in zip(draft.token_ids.tolist(), draft.parents_of_all(), estimates, strict=True):
            nodes.append(self._add(token, nodes[parent] if parent >= 0 else at, estimate, apart))
        return nodes

    def find(self, draft: Draft) -> list[int]:
        """Of each token of a draft the node that it is here, -1 where there is none. O(its tokens)."""
        nodes: list[int] = []
        for token, parent in zip(draft.token_ids.tolist(), draft.parents_of_all(), strict=True):
            at = nodes[parent] if parent >= 0 else -1
            nodes.append(self._children.get((at, token), -1) if parent < 0 or at >= 0 else -1)
        return nodes

    def _add(self, token: int, parent: int, estimate: float, apart: bool) -> int:
        known = None if apart else self._children.get((parent, token))
        if known is not None:
            return known
        node = len(self.token_ids)
        self.token_ids.append(token)
        self.parents.append(parent)
        self.estimates.append(estimate)
        self.chances.append(estimate * (self.chances[parent] if parent >= 0 else 1.0))
        if not apart:
            self._children[parent, token] = node
        return node

    def best(self, limit: int, prices: Prices) -> tuple[Draft, list[int]]:
        """The likeliest nodes as a tree, likeliest first, while each is worth its price; and their numbers here.

        No other tree of as many of these nodes has a greater expected number of accepted tokens. O(n log n).
        """
        order = sorted(range(len(self.chances)), key=lambda node: -self.chances[node])[: max(0, limit)]
        kept = 0
        while kept < len(order) and self.chances[order[kept]] >= price_of(prices, kept):
            kept += 1
        order = order[:kept]
        place = {node: i for i, node in enumerate(order)}
        draft = Draft(
            np.array([self.token_ids[node] for node in order], np.int32),
            probabilities=np.array([self.estimates[node] for node in order], np.float64),
            parents=np.array([place.get(self.parents[node], -1) for node in order], np.int32),
        )
        return draft, order


def walked(draft: Draft, token_ids: Sequence[int]) -> list[int]:
    """The tokens of ``draft``, by index and in order, that say the beginning of ``token_ids``. O(tokens drafted)."""
    path: list[int] = []
    last = -1
    for node, (token, parent) in enumerate(zip(draft.token_ids.tolist(), draft.parents_of_all(), strict=True)):
        if parent == last and len(path) < len(token_ids) and token == token_ids[len(path)]:
            path.append(node)
            last = node
    return path


def depth_of(draft: Draft) -> int:
    """Tokens of its longest branch. O(tokens drafted)."""
    depths: list[int] = []
    for parent in draft.parents_of_all():
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return max(depths, default=0)
