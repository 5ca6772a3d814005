"""Define the interface between drafters and the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ssd.config import SamplingParams
from ssd.drafting.accepted_path import path_of_text
from ssd.drafting.noise import SequenceNoise, UInt64
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.snapshot import Snapshot

if TYPE_CHECKING:  # because it imports a tokenizer library
    from ssd.text.grammar import GrammarState

HEAD: Final = 0
"""The kind of proposals that a draft head makes; a draft head reads the target's hidden states."""

MODEL: Final = 1
"""The kind of proposals that a draft model makes."""

LOOKAHEAD: Final = 2
"""The kind of proposals that the target itself makes: tokens that it sampled after a rejected draft token (lookahead).
"""

NUM_PROPOSER_KINDS: Final = 3

MAX_PROPOSED_TOKENS: Final = 64
"""The maximum number of tokens that other drafters may propose for one draft. Further tokens are ignored."""


@dataclass(frozen=True, slots=True, eq=False)
class ExternalProposals:
    """A forest of tokens that other drafters propose for one request; the suffix drafter also scores these tokens.

    Attributes:
        token_ids: The proposed tokens, int32[n] with n <= MAX_PROPOSED_TOKENS.
        parents: For each token, the index of the token before it; -1 if it follows the context. int32[n]. A parent's
            index is smaller than its child's.
        probabilities: The drafter's own estimate that each token is accepted, given that the tokens before it are.
            float64[n]. The acceptance model learns how reliable these estimates are.
        kinds: For each token, the kind of drafter that proposes it: HEAD, MODEL or LOOKAHEAD. int32[n].
    """

    token_ids: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    probabilities: npt.NDArray[np.float64]
    kinds: npt.NDArray[np.int32]


TokenIds = npt.NDArray[np.int32]
TokenCosts = npt.NDArray[np.float64]


@dataclass(slots=True)
class DraftRequest:
    """A request for a draft for one sequence.

    The same object may be reused, with other values, for the next step; drafters read it only during the call.

    Attributes:
        request_id: The identifier of the sequence, the same in all steps. After ``finish`` it is used again only if the
            sequence was preempted; the context then continues where it ended.
        context: The prompt and the output so far, oldest token first. int32[n]. A view that is valid only during the
            call.
        prompt_length: The number of prompt tokens in ``context``.
        snapshot: The snapshot of the namespace's index; None if there is no index.
        limit: The maximum number of draft tokens, >= 0. For a tree it limits the number of nodes.
        token_costs: The cost of verifying the i-th draft token, in expected accepted tokens. float64[n]. The last value
            holds for all further tokens. None selects the drafter's default cost.
        allow_tree: Whether the target can verify a draft tree.
        prediction: Text that the client expects the output to resemble (``prediction`` in the OpenAI API). int32[p]. It
            is used for this request only.
        sampling: The sampling parameters of the request, without its text. None if they are not known, as in a replay
            of recorded outputs.
        learned: The namespace's learned models, which the drafter reads and updates. If None, the drafter uses models
            that it shares with no namespace.
        slot: The target's KV cache slot, which holds the context without its last token. None if there is no target.
        proposals: Tokens that other drafters propose after the context. None if there are none.
        allow_caching: Whether other requests of the namespace may learn from the output of this one.
    """

    request_id: str
    context: TokenIds
    prompt_length: int
    snapshot: Snapshot | None
    limit: int
    token_costs: TokenCosts | None = None
    allow_tree: bool = False
    prediction: TokenIds | None = None
    sampling: SamplingContext | None = None
    learned: LearnedState | None = None
    slot: int | None = None
    proposals: ExternalProposals | None = None
    allow_caching: bool = False


@dataclass(slots=True)
class Draft:
    """A draft chain or a draft tree.

    Attributes:
        token_ids: The draft tokens, int32[k] with k <= the request's limit. Empty if nothing was found.
        match_length: The length of the longest match between the end of the context and the searched text.
        source: Where the first token was found: "context" (the request's context), "prediction" (the client's
            prediction), "recent" (the memtable), "cache" (a segment), "prebuilt" (a prebuilt cache), "model" or "head"
            (a draft model or head), "recycling" (the target's earlier top-k tokens), "lookahead" (tokens sampled after
            a rejected draft token), "coupled" (sampled before with the same Gumbel noise) or "none".
        probabilities: The estimated probability that each token is accepted, given that the tokens before it are.
            float64[k]. None if the drafter makes no estimates.
        parents: For each token of a tree, the index of the token before it; -1 if it follows the context. int32[k]. A
            parent's index is smaller than its child's. None for a chain.
        path: After verification of a tree, the indices of its accepted tokens, in order. int32[n]. None before, and for
            a chain.
    """

    token_ids: TokenIds
    match_length: int = 0
    source: str = "none"
    probabilities: npt.NDArray[np.float64] | None = None
    parents: npt.NDArray[np.int32] | None = None
    path: npt.NDArray[np.int32] | None = None

    def path_probabilities(self) -> npt.NDArray[np.float64]:
        """Return for each draft token the probability that it and all tokens before it are accepted: float64[k].

        The draft must have estimates.
        """
        # A loop, because drafts are short: it takes less time than two calls of numpy.
        assert self.probabilities is not None
        products: list[float] = self.probabilities.tolist()
        for node, parent in enumerate(self.parents_of_all()):
            if parent >= 0:
                products[node] *= products[parent]
        return np.array(products)

    def parents_of_all(self) -> list[int]:
        """Return for each token of a draft tree or chain the index of the token before it; -1 if there is none."""
        return list(range(-1, len(self.token_ids) - 1)) if self.parents is None else self.parents.tolist()

    def path_of(self, text: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """Return the indices of the draft tokens that agree with the text after the context, int32[n], in order."""
        # Copies, because numba compiles a kernel again for another dtype and for a read-only array.
        tokens, following = np.array(self.token_ids, np.int32), np.array(text[: len(self.token_ids)], np.int32)
        if self.parents is None:
            return path_of_text(tokens, tokens, False, following)
        return path_of_text(tokens, np.array(self.parents, np.int32), True, following)

    def cut(self, length: int) -> Draft:
        if length >= len(self.token_ids):
            return self
        estimates = None if self.probabilities is None else self.probabilities[:length]
        parents = None if self.parents is None else self.parents[:length]
        return Draft(self.token_ids[:length], self.match_length, self.source, estimates, parents)


EMPTY_DRAFT = Draft(np.empty(0, np.int32))


@dataclass(slots=True, kw_only=True, eq=False)  # not frozen, because one is created per row and step
class SamplingContext:
    """The sampling parameters of a request, together with the text after which its next tokens are sampled.

    Attributes:
        noise: The Gumbel noise that the target samples with, and that drafters should sample with. All rows of a
            request share this object.
        forbidden_ids: The tokens that ``min_tokens`` forbids.
        context: The prompt and the output so far, int32[n].
        draft: The draft tokens that the forward pass verifies after the context.
        grammar: The state of the grammar at the end of ``context``. None without a grammar, and for a tree.
    """

    params: SamplingParams
    noise: SequenceNoise
    forbidden_ids: tuple[int, ...] = ()
    context: TokenIds = field(default_factory=lambda: EMPTY_DRAFT.token_ids)
    prompt_length: int = 0
    draft: Draft = field(default_factory=lambda: EMPTY_DRAFT)
    grammar: GrammarState | None = None

    @property
    def prompt(self) -> TokenIds:
        return self.context[: self.prompt_length]

    @property
    def output(self) -> TokenIds:
        return self.context[self.prompt_length :]

    @property
    def width(self) -> int:
        """Return the number of positions to sample at: one after the context, and one after each draft token."""
        return 1 + len(self.draft.token_ids)

    def noise_keys(self) -> UInt64:
        """Return the Gumbel noise key of each token to sample: uint64[width]."""
        return self.noise.keys(self.context, self.draft.token_ids, self.draft.parents)

    def with_text(
        self, context: TokenIds, prompt_length: int, draft: Draft = EMPTY_DRAFT, grammar: GrammarState | None = None
    ) -> SamplingContext:
        return SamplingContext(
            params=self.params,
            noise=self.noise,
            forbidden_ids=self.forbidden_ids,
            context=context,
            prompt_length=prompt_length,
            draft=draft,
            grammar=grammar,
        )


@dataclass(slots=True, eq=False)
class ScoredPass:
    """The target's logits and sampled tokens at every position of a verification pass, rejected positions included.

    It has B rows of T positions. All arrays are contiguous. It is valid until a drafter has learned from it.

    Attributes:
        request_ids: The request of each row.
        learned: The learned models of each row's namespace, as in ``DraftRequest.learned``.
        allow_caching: Whether other requests may learn from the row, bool[B].
        previous_ids: The token before the first input token of each row, int32[B]; -1 if there is none.
        input_ids: The last token of the context and the draft, int64[B, T].
        num_positions: The number of positions of each row, int64[B]; the rest is padding. 0 for a row that failed.
        parents: For each input token, the position of the token before it, int64[B, T]; -1 for the first. None if all
            drafts are chains.
        sampled_ids: The token that the target sampled at each position, int64[B, T].
        last_accepted: The position of the last accepted input token, int64[B]; -1 for a row that failed.
        top_ids: The most probable next tokens at each position, most probable first, int32[B, T, TOP_K]; padded with
            -1.
        top_logits: The logits of ``top_ids``, float32[B, T, TOP_K], before sampling rules and temperature are applied.
    """

    request_ids: Sequence[str]
    learned: Sequence[LearnedState | None]
    allow_caching: npt.NDArray[np.bool_]
    previous_ids: TokenIds
    input_ids: npt.NDArray[np.int64]
    num_positions: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int64] | None
    sampled_ids: npt.NDArray[np.int64]
    last_accepted: npt.NDArray[np.int64]
    top_ids: TokenIds
    top_logits: npt.NDArray[np.float32]


class DraftOutcome:
    """The outcome of one request's draft in a verification pass.

    Attributes:
        request_id: The request.
        num_accepted: The number of draft tokens that the target accepted and that are in the output.
        has_ended: Whether the request ended with this pass, so that no draft for it will follow.
    """

    __slots__ = ("_draft", "has_ended", "num_accepted", "request_id")

    def __init__(
        self, request_id: str, draft: Draft | Callable[[], Draft], num_accepted: int, *, has_ended: bool = False
    ) -> None:
        """Create an outcome; ``draft`` may be a function, which is called when the draft is read."""
        self.request_id, self.num_accepted, self.has_ended = request_id, num_accepted, has_ended
        self._draft = draft

    @property
    def draft(self) -> Draft:
        """Return the verified draft, with the accepted path if it is a tree; EMPTY_DRAFT if no draft was made."""
        if not isinstance(self._draft, Draft):
            self._draft = self._draft()
        return self._draft


class Drafter(Protocol):
    """The interface of drafters, which propose draft tokens for requests and are called by an engine.

    The target verifies every token, so a bad draft costs time but never changes the output.
    """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in the order of ``requests``."""
        ...

    def observe(self, outcomes: Sequence[DraftOutcome], scored: ScoredPass | None = None) -> None:
        """Learn the outcome of a verification pass. The engine calls this method before the next drafts are made.

        Args:
            outcomes: How many tokens of each draft the target accepted.
            scored: The target's logits in the pass, for a `ScoreLearner`; None if they are not available.
        """
        ...

    def finish(self, request_id: str) -> None:
        """Drop the drafter's state of a request that has ended."""
        ...


@runtime_checkable
class ScoreLearner(Protocol):
    """A drafter that learns from the target's logits, not only from the accepted tokens."""

    def learn_scores(self, scored: ScoredPass) -> None:
        """Learn from the logits of a forward pass that was passed to ``observe``.

        The engine calls this method after ``observe``, while a GPU computes the next pass.
        """
        ...


class NoDrafter:
    """A drafter that proposes no tokens, for decoding without speculation."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [EMPTY_DRAFT] * len(requests)

    def observe(self, outcomes: Sequence[DraftOutcome], scored: ScoredPass | None = None) -> None: ...

    def finish(self, request_id: str) -> None: ...
