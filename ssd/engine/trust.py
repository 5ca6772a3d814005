"""How far to trust what drafts promise, by how requests are sampled."""

from __future__ import annotations

from ssd.drafting.protocol import Draft

_FORGETTING = 0.97
_FORGETTING_UNTRIED = 0.999
_PRIOR_TOKENS = 1.0
_SURE = 0.9


class Trust:
    """The share of the promised tokens that was accepted of late, for each temperature; 1 where that is not known.

    Estimates are learned over all requests of a namespace; in a new one they are a rule of thumb. A token drawn at a
    high temperature is accepted less often than a greedy one after the same text, and until the model has found out,
    its drafts would cost more than they give. What is distrusted is drafted rarely, so old observations fade, though
    slowly, with the passes without a draft too, and drafts are tried again. O(1) each.
    """

    def __init__(self) -> None:
        self._sums: dict[float, tuple[float, float]] = {}

    def share(self, temperature: float) -> float:
        """0 to 1."""
        promised, accepted = self._sums.get(_kind(temperature), (0.0, 0.0))
        return min(1.0, (accepted + _PRIOR_TOKENS) / (promised + _PRIOR_TOKENS))

    def observe(self, temperature: float, promised: float, accepted: int) -> None:
        """One row of a pass: the tokens that its draft was expected to bring, and those that it brought."""
        kind = _kind(temperature)
        before = self._sums.get(kind, (0.0, 0.0))
        kept = _FORGETTING if promised else _FORGETTING_UNTRIED
        self._sums[kind] = before[0] * kept + promised, before[1] * kept + accepted


def is_sure(draft: Draft, share: float) -> bool:
    """Whether a draft may be verified in the pass that a client waits for to see the first token.

    That pass takes longer with a draft, and the first token is the target's own in any case. A text that comes again
    is worth it: its first token is almost certain.
    """
    if draft.probabilities is None:
        return True
    return len(draft.token_ids) > 0 and share * float(draft.probabilities[0]) >= _SURE


def _kind(temperature: float) -> float:
    """Quarters, so that there are few: temperatures are at most 2."""
    return round(4 * temperature) / 4
