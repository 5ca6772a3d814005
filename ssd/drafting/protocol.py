"""The seam between drafters and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ssd.config import DraftAcceptance, SamplingParams
from ssd.retrieval.learned_state import LearnedState
from ssd.retrieval.snapshot import Snapshot

TokenIds = npt.NDArray[np.int32]
Prices = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSampling:
    """How the target chooses one request's tokens, for drafters that sample too.

    ``seed`` : the request's, or one drawn for it. ``held_back_ids`` : what ``min_tokens`` forbids.
    ``acceptance`` : how the target will verify drafts that were drawn at random. "match": a drafter should draw as the
        target does, with the noise of this seed. "rejection": it must draw with noise that nothing else uses, say
        what law it drew from, and choose length and estimates without looking at what it drew, see
        ``ssd/model/sampling/rejection.py``.
    """

    params: SamplingParams
    seed: int
    choice_index: int = 0
    held_back_ids: tuple[int, ...] = ()
    acceptance: DraftAcceptance = "match"


@dataclass(slots=True)
class DraftRequest:
    """One sequence that asks for a draft.

    ``request_id`` : stays the same over the steps of one sequence; comes again after ``finish`` only where the sequence
        was preempted, with a context that goes on where it was.
    ``context`` : int32[n], prompt and output so far, oldest first. A view; read it during the call only.
    ``prompt_length`` : how many tokens of ``context`` are the prompt.
    ``snapshot`` : the namespace's index, or None when there is none. ``learned`` : where what a drafter learned about
        the namespace is left for the next one; None: it learns for itself.
    ``limit`` : most tokens this draft may have, >= 0.
    ``prices`` : float64[n], what the i-th drafted token costs, in expected accepted tokens; the last holds for all
        beyond. None: the drafter's own price.
    ``tree`` : whether the target can verify a tree; its ``limit`` counts nodes.
    ``prediction`` : int32[p], text that the client expects the output to resemble, private to this request.
    ``sampling`` : how the target chooses this request's tokens; None is not known, as in a replay of recorded text.
    """

    request_id: str
    context: TokenIds
    prompt_length: int
    snapshot: Snapshot | None
    limit: int
    prices: Prices | None = None
    tree: bool = False
    prediction: TokenIds | None = None
    sampling: RequestSampling | None = None
    learned: LearnedState | None = None


@dataclass(slots=True)
class Draft:
    """A proposed chain of tokens, or a tree of them.

    ``token_ids`` : int32[k], k <= the request's limit; empty when nothing was found.
    ``match_length`` : tokens of the context's tail that the evidence matched.
    ``source`` : where it came from: "own", "index", "model" or "none".
    ``probabilities`` : float64[k], estimated chance that each token is accepted once those before it are; None when the
        drafter has no estimate.
    ``parents`` : int32[k], of each token the index of the one before it, smaller than its own; -1 after the context.
        None: a chain.
    ``path`` : int32[n], the indices of the n accepted tokens of a tree, in order, once it was verified; else None.
    """

    token_ids: TokenIds
    match_length: int = 0
    source: str = "none"
    probabilities: npt.NDArray[np.float64] | None = None
    parents: npt.NDArray[np.int32] | None = None
    path: npt.NDArray[np.int32] | None = None

    def chances(self) -> npt.NDArray[np.float64]:
        """float64[k], of each token the estimated chance that it and all before it are accepted; with estimates only.

        O(k).
        """
        assert self.probabilities is not None
        chances = self.probabilities.copy()
        if self.parents is None:
            return np.cumprod(chances, out=chances)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                chances[node] *= chances[parent]
        return chances

    def cut(self, length: int) -> Draft:
        """The first ``length`` tokens; itself when it has no more."""
        if length >= len(self.token_ids):
            return self
        estimates = None if self.probabilities is None else self.probabilities[:length]
        parents = None if self.parents is None else self.parents[:length]
        return Draft(self.token_ids[:length], self.match_length, self.source, estimates, parents)


EMPTY_DRAFT = Draft(np.empty(0, np.int32))


class Drafter(Protocol):
    """Proposes drafts. Bad drafts cost time, never correctness: the target verifies every token."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""
        ...

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Learn how many tokens of ``draft`` the target accepted; of a tree ``draft.path`` says which."""
        ...

    def finish(self, request_id: str) -> None:
        """Forget a request: it has ended."""
        ...
