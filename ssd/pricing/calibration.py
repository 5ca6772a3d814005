"""Calibration of what drafts promise, by where they come from and how requests are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, TokenIds, inlined, kernel
from ssd.config import MAX_SPECULATIVE_TOKENS
from ssd.pricing.price_list import EstimatedDraft

Floats = npt.NDArray[np.float64]

_FORGETTING: Final = 0.98
"""What a tested token counts after each later one of its kind."""
_PRIOR_FIRST: Final = 0.3
_PRIOR_LATER: Final = 1.0
"""Promised tokens that a kind of which nothing is known counts as having seen: of a draft's first token none came, of
later ones all did."""

_EDGES: Final = np.array([0.1, 0.3, 0.6, 0.9])
"""Between kinds of tokens, of the chance that the drafter gives them."""
_KINDS: Final = len(_EDGES) + 1


@inlined
def _cell(first: int, chance: float) -> int:
    """Of a token that comes right after the context (1) or later (0), by what the drafter says of it."""
    kind = first * _KINDS
    for edge in _EDGES:
        kind += int(chance >= edge)
    return kind


@kernel
def _corrected(sums: Floats, chances: Floats, parents: TokenIds) -> Floats:
    """The chances of a draft's tokens, each times the share of its kind. O(tokens)."""
    corrected = np.empty(min(len(chances), len(parents)))
    for i in range(len(corrected)):
        first = int(parents[i] < 0)
        promised, came = sums[_cell(first, chances[i])]
        prior = _PRIOR_FIRST if first else _PRIOR_LATER
        corrected[i] = chances[i] * min(1.0, (came + (0.0 if first else prior)) / (promised + prior))
    return corrected


@kernel
def _learn(sums: Floats, tokens: TokenIds, chances: Floats, parents: TokenIds, said: Int64s) -> None:
    """Count what came of every token that was tested: those whose predecessors all were said. O(tokens)."""
    node, drafted = -1, min(len(tokens), len(chances), len(parents))
    for token in said:
        right = -1
        for i in range(node + 1, drafted):
            if parents[i] == node:
                came, counted = tokens[i] == token, sums[_cell(int(node < 0), chances[i])]
                counted *= _FORGETTING
                counted[0] += chances[i]
                counted[1] += 1.0 if came else 0.0
                right = i if came else right
        if right < 0:
            return
        node = right


class KeptShares:
    """The share of the tokens promised that came of late, for each temperature and kind of token.

    A kind is the draft's source, how probable the drafter says a token is, and whether it comes right after the
    context. Estimates are learned over all requests of a namespace; in a new one they are a rule of thumb, and of
    candidates the one that looks best mostly looks better than it is. Drafts that are not verified, or not as far,
    teach as well, by the tokens that come instead: so trust begins with nothing, returns without being tried, and what
    is certain does not suffer where guesses are wrong. However long a wrong draft is, it counts as the tokens that were
    tested. O(tokens) each.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[float, str], Floats] = {}  # of each kind: promised and came

    def warm_up(self) -> None:
        """Compile the kernels."""
        sums, none, chances = np.zeros((2 * _KINDS, 2)), np.zeros(1, np.int32), np.zeros(1)
        _corrected(sums, chances, none)
        _learn(sums, none, chances, none, np.zeros(1, np.int64))

    def corrected(self, temperature: float, draft: EstimatedDraft) -> Floats:
        """float64[k], of each token the chance that it is accepted once those before it are; with estimates only."""
        assert draft.probabilities is not None
        return _corrected(self._sums_of(temperature, draft), draft.probabilities, _parents(draft))

    def observe(self, temperature: float, draft: EstimatedDraft, said: Sequence[int]) -> None:
        """Learn from a draft as it was proposed, and from the tokens that came after its context."""
        if draft.probabilities is not None:
            sums = self._sums_of(temperature, draft)
            _learn(sums, draft.token_ids, draft.probabilities, _parents(draft), np.array(said, np.int64))

    def _sums_of(self, temperature: float, draft: EstimatedDraft) -> Floats:
        kind = round(4 * temperature) / 4, draft.source  # quarters, so that there are few: temperatures are at most 2
        if kind not in self._sums:
            self._sums[kind] = np.zeros((2 * _KINDS, 2))
        return self._sums[kind]


_CHAIN: Final = np.arange(-1, MAX_SPECULATIVE_TOKENS, dtype=np.int32)


def _parents(draft: EstimatedDraft) -> TokenIds:
    return _CHAIN[: len(draft.token_ids)] if draft.parents is None else draft.parents


_LEARNING_RATE = 0.02
_CLIP = 6.0
_SHIFT_RANGE = (-4.0, 4.0)
_SCALE_RANGE = (0.0, 3.0)


class PlattScaling:
    """Log odds of acceptance = shift + scale * log odds of the draft model's probability (Platt 1999, section 2).

    Fitted while serving by gradient steps on the log loss. Greedy and sampled requests need a model each: with shared
    noise an unlikely token is often the target's too.
    """

    def __init__(self, shift: float, scale: float) -> None:
        self.shift = shift
        self.scale = scale

    def estimate(self, chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Chance of acceptance of tokens of which the draft model says ``chances``: float64[n] each."""
        estimates: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(-self.shift - self.scale * _log_odds(chances)))
        return estimates

    def learn(self, chances: npt.NDArray[np.float64], accepted: npt.NDArray[np.bool_]) -> None:
        """Learn by one step. ``chances`` : float64[n], the draft model's; ``accepted`` : of each tested token."""
        log_odds = _log_odds(chances)
        error = accepted - self.estimate(chances)
        self.shift = float(np.clip(self.shift + _LEARNING_RATE * error.sum(), *_SHIFT_RANGE))
        self.scale = float(np.clip(self.scale + _LEARNING_RATE * (error * log_odds).sum(), *_SCALE_RANGE))


def _log_odds(chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    inside = np.clip(chances, 1e-9, 1 - 1e-9)
    return np.clip(np.log(inside / (1 - inside)), -_CLIP, _CLIP)
