"""Calibration of what drafts promise, by how requests are sampled."""

from __future__ import annotations

_FORGETTING = 0.97
_FORGETTING_UNTRIED = 0.999
_PRIOR_TOKENS = 1.0


class KeptShares:
    """The share of the promised tokens that was accepted of late, for each temperature; 1 where that is not known.

    Estimates are learned over all requests of a namespace; in a new one they are a rule of thumb. A token drawn at a
    high temperature is accepted less often than a greedy one after the same text, and until the model has found out,
    its drafts would cost more than they give. What is distrusted is drafted rarely, so old observations fade, though
    slowly, with the passes without a draft too, and drafts are tried again. O(1) each.
    """

    def __init__(self) -> None:
        self._sums: dict[float, tuple[float, float]] = {}  # promised and accepted tokens, the older the less

    def share(self, temperature: float) -> float:
        """The share for a temperature, 0 to 1."""
        promised, accepted = self._sums.get(_kind(temperature), (0.0, 0.0))
        return min(1.0, (accepted + _PRIOR_TOKENS) / (promised + _PRIOR_TOKENS))

    def observe(self, temperature: float, promised: float, accepted: int) -> None:
        """Learn from one row of a pass: the tokens that its draft was expected to bring, and those that it brought."""
        kind = _kind(temperature)
        before = self._sums.get(kind, (0.0, 0.0))
        kept = _FORGETTING if promised else _FORGETTING_UNTRIED
        self._sums[kind] = before[0] * kept + promised, before[1] * kept + accepted


def _kind(temperature: float) -> float:
    """Quarters, so that there are few: temperatures are at most 2."""
    return round(4 * temperature) / 4
