"""Whether drafts have paid of late, in output tokens: who owes is not verified for, but watched until it would pay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ssd.pricing.price_list import EstimatedDraft

_CREDIT: Final = 1.0
"""Tokens that drafts of a temperature never seen may lose."""

_MOST: Final = 4.0
"""Of a balance, either way. Where what paid ends that is lost once; a request that gains half of it is drafted for
whatever others lost."""

_MARGIN: Final = 1.25
"""What is gained must be so many times what it costs, of which not all is timed.
With 2, sampled new text that gains from drafts was left without."""


class Withheld:
    """A draft that is not verified, but compared with the tokens that come.

    ``cost`` : output tokens that verifying it would have taken. ``num_right`` : its tokens that came so far.
    """

    __slots__ = ("_parents", "_path", "_tokens", "at", "cost", "draft")

    def __init__(self, draft: EstimatedDraft, at: int, cost: float) -> None:
        """``at`` : length of the context that it goes on from."""
        self.draft, self.at, self.cost = draft, at, cost
        self._tokens, self._parents, self._path = draft.token_ids.tolist(), parents_of(draft), list[int]()

    @property
    def num_right(self) -> int:
        """Its tokens that came."""
        return len(self._path)

    @property
    def promised(self) -> float:
        """See `promise_tested`."""
        return promise_tested(self.draft, self._path)

    def follow(self, context: npt.NDArray[np.int32]) -> bool:
        """Compare it with what came since; whether it may go on: it was right so far, and is not over. O(its size)."""
        node, goes_on = self._path[-1] if self._path else -1, True
        for token in context[self.at :].tolist():
            self.at += 1
            node = next((i for i in self._after(node) if self._tokens[i] == token), -2)
            if node < 0:
                return False
            self._path.append(node)
            goes_on = any(True for _ in self._after(node))
            if not goes_on:
                break
        return goes_on

    def _after(self, node: int) -> list[int]:
        return [i for i in range(node + 1, len(self._tokens)) if self._parents[i] == node]


def parents_of(draft: EstimatedDraft) -> list[int]:
    """Of a chain too: the index of the token before each, -1 for the context. O(its size)."""
    return list(range(-1, len(draft.token_ids) - 1)) if draft.parents is None else draft.parents.tolist()


def promise_tested(draft: EstimatedDraft, path: Sequence[int]) -> float:
    """How many of a draft's tokens should have come, of those whose turn it was: ``path`` and all that were beside it.

    Of a draft that is wrong at once that is its first token's chance, however long it is. O(its size).
    """
    if draft.probabilities is None:
        return 0.0
    if draft.parents is None:
        return float(sum(draft.probabilities[: len(path) + 1].tolist()))
    reached = {-1, *path}
    return float(
        sum(
            chance
            for chance, parent in zip(draft.probabilities.tolist(), draft.parents.tolist(), strict=True)
            if parent in reached
        )
    )


class Row(Protocol):
    """A request that is drafted for."""

    balance: float
    """What its own drafts gained."""


class Account:
    """What drafts gained, accepted tokens less _MARGIN times what they cost, for each temperature and each request.

    A request's drafts are verified while both together are above nothing; else they are withheld, and what they would
    have gained counts alike. So text that nothing is known of costs a few tokens once and no more, what pays begins
    again by itself, and a request that says again what was stored needs a few tokens of proof among others that say
    nothing twice. O(1).
    """

    def __init__(self) -> None:
        self._balances: dict[float, float] = {}

    def pays(self, temperature: float, row: Row, pending: float = 0.0) -> bool:
        """Whether drafts of a row are verified. ``pending`` : what it gained and is not yet settled."""
        return self._balances.get(kind_of(temperature), _CREDIT) + row.balance + pending > 0.0

    def settle(self, temperature: float, row: Row, gained: float) -> None:
        """Count what a draft gained or would have, see `gain`; or what asking for one cost."""
        kind = kind_of(temperature)
        self._balances[kind] = _bounded(self._balances.get(kind, _CREDIT) + gained)
        row.balance = _bounded(row.balance + gained)


def gain(num_right: int, cost: float) -> float:
    """Of a draft of which ``num_right`` tokens came, for ``cost`` output tokens."""
    return num_right - _MARGIN * cost


def _bounded(balance: float) -> float:
    return min(max(balance, -_MOST), _MOST)


def kind_of(temperature: float) -> float:
    """Quarters, so that there are few: temperatures are at most 2."""
    return round(4 * temperature) / 4
