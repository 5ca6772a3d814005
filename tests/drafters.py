"""Adversarial and perfect drafters: whatever is drafted, the output must stay the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest


class RandomDrafter:
    """Drafts random tokens, as many as it may."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Noise of every request's limit."""
        return [Draft(self._random.integers(0, self._vocab_size, r.limit).astype(np.int32)) for r in requests]

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Learns nothing."""

    def finish(self, request_id: str) -> None:
        """Keeps nothing."""


class OracleDrafter:
    """Knows the outputs by request id and drafts them."""

    def __init__(self, outputs: dict[str, Sequence[int]]) -> None:
        self._outputs = outputs

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """The true next tokens."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        done = len(request.context) - request.prompt_length
        truth = self._outputs.get(request.request_id, ())[done : done + request.limit]
        return Draft(np.array(truth, np.int32)) if truth else EMPTY_DRAFT

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Learns nothing."""

    def finish(self, request_id: str) -> None:
        """Keeps nothing."""
