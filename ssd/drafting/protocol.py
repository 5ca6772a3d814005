"""The seam between drafters and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ssd.config import SamplingParams
from ssd.drafting.noise import SequenceNoise, UInt64
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.snapshot import Snapshot

if TYPE_CHECKING:  # it brings a tokenizer library with it
    from ssd.text.grammar import GrammarState

HEAD: Final = 0
"""A draft head, reading the target's hidden states."""

MODEL: Final = 1
"""A draft model."""

GUESS: Final = 2
"""The target itself, at positions behind a token that was wrong."""

KINDS: Final = 3

MAX_OFFERED: Final = 64
"""Tokens offered for one draft; what is more is left out."""


@dataclass(frozen=True, slots=True, eq=False)
class Offers:
    """A forest of proposed tokens.

    ``token_ids`` : int32[n], n <= MAX_OFFERED. ``parents`` : int32[n], of each the index of the one it goes on from,
    smaller than its own; -1 after the context. ``chances`` : float64[n], the chance that its source gives each once
    those before it came; the acceptance model learns what that is worth. ``kinds`` : int32[n], who says so.
    """

    token_ids: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    chances: npt.NDArray[np.float64]
    kinds: npt.NDArray[np.int32]


TokenIds = npt.NDArray[np.int32]
Prices = npt.NDArray[np.float64]


@dataclass(slots=True)
class DraftRequest:
    """One sequence that asks for a draft; the same object may come again, changed: it is read during the call only.

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
    ``sampling`` : how the target chooses this request's tokens, without a text; None where that is not known, as in a
        replay of recorded text.
    ``slot`` : the target's, which holds the context but for its last token; None where there is no target.
    ``offers`` : what other sources propose after the context, to be judged with all else; None for nothing.
    ``may_teach`` : whether what it says may reach other requests of its namespace.
    """

    request_id: str
    context: TokenIds
    prompt_length: int
    snapshot: Snapshot | None
    limit: int
    prices: Prices | None = None
    tree: bool = False
    prediction: TokenIds | None = None
    sampling: SamplingRow | None = None
    learned: LearnedState | None = None
    slot: int | None = None
    offers: Offers | None = None
    may_teach: bool = False


@dataclass(slots=True)
class Draft:
    """A proposed chain of tokens, or a tree of them.

    ``token_ids`` : int32[k], k <= the request's limit; empty when nothing was found.
    ``match_length`` : tokens of the context's tail that the evidence matched.
    ``source`` : where its first token came from: "own" text, a "prediction", of the index its "tail", a "segment" or
        one that is static and hence "warm", a "model", a draft "head", of the target itself what is "recycled" or a
        "guess", "coupled" where the same noise chose it before, or "none".
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
        # Drafts are short: a loop over Python's numbers takes less than two calls of numpy.
        assert self.probabilities is not None
        chances: list[float] = self.probabilities.tolist()
        for node, parent in enumerate(self.parents_of_all()):
            if parent >= 0:
                chances[node] *= chances[parent]
        return np.array(chances)

    def parents_of_all(self) -> list[int]:
        """``parents``, of a chain too: the index of the token before each, -1 for the context. O(k)."""
        return list(range(-1, len(self.token_ids) - 1)) if self.parents is None else self.parents.tolist()

    def cut(self, length: int) -> Draft:
        """The first ``length`` tokens; itself when it has no more."""
        if length >= len(self.token_ids):
            return self
        estimates = None if self.probabilities is None else self.probabilities[:length]
        parents = None if self.parents is None else self.parents[:length]
        return Draft(self.token_ids[:length], self.match_length, self.source, estimates, parents)


EMPTY_DRAFT = Draft(np.empty(0, np.int32))


@dataclass(slots=True, kw_only=True, eq=False)  # not frozen: one is made for a row at every step
class SamplingRow:
    """What choosing the tokens of one row uses: a request's sampling, settled once, and the text that it is at.

    ``params`` : what the client asked for. ``noise`` : what its tokens are drawn with, and what a drafter should draw
        with; one object for all rows of a request. ``held_back_ids`` : what ``min_tokens`` forbids.
    ``context`` : int32[n], prompt and output so far, the first ``prompt_length`` are the prompt. ``draft`` : the tokens
        fed after it. ``grammar`` : at the end of ``context``; None where there is none, and of a tree.
    """

    params: SamplingParams
    noise: SequenceNoise
    held_back_ids: tuple[int, ...] = ()
    context: TokenIds = field(default_factory=lambda: EMPTY_DRAFT.token_ids)
    prompt_length: int = 0
    draft: Draft = field(default_factory=lambda: EMPTY_DRAFT)
    grammar: GrammarState | None = None

    @property
    def prompt(self) -> TokenIds:
        """The prompt: a view."""
        return self.context[: self.prompt_length]

    @property
    def output(self) -> TokenIds:
        """The output so far: a view."""
        return self.context[self.prompt_length :]

    @property
    def width(self) -> int:
        """Positions whose tokens are to be chosen: one after the context, one after each token of the draft."""
        return 1 + len(self.draft.token_ids)

    def keys(self) -> UInt64:
        """Of the noise of each token to choose: uint64[width]."""
        return self.noise.keys(self.context, self.draft.token_ids, self.draft.parents)

    def at(
        self, context: TokenIds, prompt_length: int, draft: Draft = EMPTY_DRAFT, grammar: GrammarState | None = None
    ) -> SamplingRow:
        """The same sampling at another text."""
        return SamplingRow(
            params=self.params,
            noise=self.noise,
            held_back_ids=self.held_back_ids,
            context=context,
            prompt_length=prompt_length,
            draft=draft,
            grammar=grammar,
        )


@dataclass(slots=True, eq=False)
class ScoredPass:
    """What the target said at every position of a pass, behind wrong tokens too; valid until it is learned from.

    B rows of T positions, all arrays contiguous. ``request_ids``, ``learned`` : of each row's request, as
    ``DraftRequest`` had them. ``may_keep`` : bool[B], whether what is said to it may reach other requests. ``before`` :
    int32[B], the token before the first one fed, -1 where there is none. ``fed`` : int64[B, T], the context's last
    token and the draft. ``counts`` : int64[B], positions of each row, the rest is padding; 0 of a row that failed.
    ``parents`` : int64[B, T], of each token fed the index of the one it goes on from, -1 of the first; None: chains.
    ``chosen`` : int64[B, T], the target's token after each.
    ``ends`` : int64[B], the last position that was right, all on the way to it were too; -1 of a row that failed.
    ``top_ids`` : int32[B, T, SUCCESSORS], the most probable tokens after each, the most probable first, -1 where no
    more are possible. ``top_logits`` : float32, theirs, before any rule of the request and any temperature.
    """

    request_ids: Sequence[str]
    learned: Sequence[LearnedState | None]
    may_keep: npt.NDArray[np.bool_]
    before: TokenIds
    fed: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int64] | None
    chosen: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    top_ids: TokenIds
    top_logits: npt.NDArray[np.float32]


@runtime_checkable
class ScoreObserver(Protocol):
    """A drafter that learns from all that the target says, not from accepted tokens alone."""

    def observe_scores(self, scored: ScoredPass) -> None:
        """Take from a pass what the very next drafts need; called before ``observe`` of its rows."""
        ...

    def learn_scores(self, scored: ScoredPass) -> None:
        """Learn from the same pass; after ``observe_scores``, where a device computes beside the host while it does."""
        ...


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


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """An empty draft per request."""
        return [EMPTY_DRAFT] * len(requests)

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Nothing to learn."""

    def finish(self, request_id: str) -> None:
        """Nothing to forget."""
