"""No drafts at all: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest


class NoDrafter:
    """Proposes nothing."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """An empty draft per request."""
        return [EMPTY_DRAFT] * len(requests)

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Nothing to learn."""

    def finish(self, request_id: str) -> None:
        """Nothing to forget."""
