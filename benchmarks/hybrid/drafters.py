"""The other drafter as its recordings know it, and ours beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.hybrid.costs import draft_seconds
from benchmarks.hybrid.recordings import MOST_TOKEN, Recording
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import EMPTY_DRAFT, HEAD, Draft, DraftRequest

OTHER_TOKENS = 5
"""Of the other's draft."""


class RecordedDrafter:
    """Drafts what was recorded: as many right tokens as the target accepted, and wrong ones behind them.

    What the wrong ones were is not known. Each is the recorded token plus MOST_TOKEN: no token, so that it agrees with
    nothing, and `OurDrafter` knows it again. Its time is that of the cost model.
    """

    kind = HEAD

    def __init__(self) -> None:
        self.num_asked = 0
        self._recording: Recording | None = None

    def begin(self, recording: Recording) -> None:
        """Draft for this request from now on."""
        self._recording = recording

    def seconds_per_token(self, num_rows: int) -> float:
        """Of a draft of usual length, by its tokens."""
        return num_rows * draft_seconds(OTHER_TOKENS) / OTHER_TOKENS

    def seconds_to_begin(self, _request: DraftRequest) -> float:
        """It has followed the text."""
        return 0.0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, without estimates."""
        return [self._draft(request) for request in requests]

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Nothing is learned."""

    def finish(self, request_id: str) -> None:
        """Nothing is kept."""

    def _draft(self, request: DraftRequest) -> Draft:
        recording = self._recording
        assert recording is not None
        begin = len(request.context) - request.prompt_length
        tokens = recording.output[begin : begin + min(OTHER_TOKENS, request.limit)].copy()
        if not len(tokens):
            return EMPTY_DRAFT
        self.num_asked += 1
        tokens[recording.emitted[begin - 1] - 1 :] += MOST_TOKEN
        return Draft(tokens, source="other")


class OurDrafter(SuffixDrafter):
    """Ours, which looks behind the other's wrong tokens as it would behind the right ones.

    So what it carries on costs as many positions as behind right tokens, whether or not they came, and whether a
    recorded token agrees with one of ours changes nothing.
    """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""
        for request in requests:
            last = request.context[-OTHER_TOKENS:]
            if last.max(initial=0) >= MOST_TOKEN:
                request.context = np.where(request.context >= MOST_TOKEN, request.context - MOST_TOKEN, request.context)
        return super().propose(requests)
