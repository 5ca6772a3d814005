"""Acceptance rates: how often what a drafter proposes is accepted, of each request, leaning on all others."""

from __future__ import annotations

_FIRST_GUESS = 0.7
_FIRST_WEIGHT = 20.0
_MEMORY = 2000.0
_LEANING = 8.0
_RELAXATION = 0.99


class AcceptanceRates:
    """Chance that a drafted token is accepted once those before it were.

    A request's rate is that of its own tested tokens and of ``_LEANING`` more that went as all requests' do. Traffic
    changes, so counts beyond ``_MEMORY`` tokens fade, and those of a request that is not drafted for fade with
    every step. Within one step the rates stand still.
    """

    def __init__(self) -> None:
        self._accepted = _FIRST_GUESS * _FIRST_WEIGHT
        self._tested = _FIRST_WEIGHT
        self._own: dict[str, tuple[float, float]] = {}

    def rate(self, request_id: str) -> float:
        """The rate of a request, within (0, 1)."""
        accepted, tested = self._own.get(request_id, (0.0, 0.0))
        overall = (self._accepted + 0.5) / (self._tested + 1.0)
        return (accepted + _LEANING * overall) / (tested + _LEANING)

    def learn(self, request_id: str, num_draft_tokens: int, num_accepted: int) -> None:
        """Learn from a verified draft. Tokens after the first rejected one were not tested."""
        tested = min(num_draft_tokens, num_accepted + 1)
        fading = min(1.0, _MEMORY / (self._tested + tested))
        self._accepted = fading * (self._accepted + num_accepted)
        self._tested = fading * (self._tested + tested)
        own_accepted, own_tested = self._own.get(request_id, (0.0, 0.0))
        self._own[request_id] = own_accepted + num_accepted, own_tested + tested

    def relax(self, request_id: str) -> None:
        """Fade what is known of a request by one step without a draft of this drafter's."""
        if request_id in self._own:
            accepted, tested = self._own[request_id]
            self._own[request_id] = _RELAXATION * accepted, _RELAXATION * tested

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._own.pop(request_id, None)
