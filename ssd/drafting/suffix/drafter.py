"""The default drafter: own text, index and prediction together, each token with an estimated chance of acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest, ScoredPass, TokenIds
from ssd.drafting.suffix.acceptance_model import AcceptanceModel
from ssd.drafting.suffix.keyed_choices import warm_up as warm_up_choices
from ssd.drafting.suffix.namespace_choices import NamespaceChoices
from ssd.drafting.suffix.namespace_models import NamespaceModels
from ssd.drafting.suffix.namespace_successors import NamespaceSuccessors
from ssd.drafting.suffix.propose import end_request, propose_suffix, propose_suffix_one
from ssd.drafting.suffix.workspace import NO_SNAPSHOT, Workspace, checked_lengths, contiguous
from ssd.retrieval.segment_store import LearnedState


class SuffixDrafter:
    """Drafts what probably comes next, as far as it pays, from all that is known.

    The context's end is looked up in the request's own text, in the index's tail and its segments, at up to
    ``max_match_length`` tokens and at a few shorter lengths; a client's prediction is followed. All of them vote for
    the next token, an acceptance model says how probable each candidate is, and the draft takes the most probable and
    goes on with those who agree. It ends where the chance that all of it is accepted falls below the price of one more
    token: of all lengths the one with the greatest expected accepted tokens minus price. A tree is grown the same way,
    best first, from all candidates.

    What a request's ``offers`` say, what the target held likely when the same tokens came before and what it guessed in
    the last pass are candidates of the same chain or tree, and so is what the same noise chose before, where it is
    shared. What no place has said for a while is looked up again.

    The model is the namespace's and learns from every token that was tested, of drafts that were and were not made.
    Deterministic given its calls. Owned by one thread. Bounded work: at most 112 places are looked at per request, see
    `gather.look_up`.
    """

    def __init__(
        self,
        *,
        max_match_length: int = 32,
        min_match_length: int = 1,
        price: float = 0.1,
        recycling: bool = True,
        retrieval: bool = True,
        keyed: bool = True,
    ) -> None:
        """``price`` : of a drafted token in expected accepted tokens, for requests that bring none.

        ``recycling`` : whether what the target held likely before is drafted. ``retrieval`` : whether index, own text
        and predictions are looked up; without, what other sources offer is judged all the same.
        ``keyed`` : whether it is kept what coupled noise chose.
        Raises ConfigError when ``max_match_length`` is not within 1..256.
        """
        self._longest, self._shortest = checked_lengths(max_match_length, min_match_length)
        self._price = price
        self._workspace = Workspace()
        self._models = NamespaceModels()
        self._looks_up = retrieval
        self._successors = NamespaceSuccessors() if recycling else None
        self._choices = NamespaceChoices() if keyed else None
        self._verified: dict[str, tuple[int, int | TokenIds]] = {}  # tokens, and which were right: so many or these
        self._learned: dict[str, LearnedState | None] = {}

    @property
    def workspace_address(self) -> int:
        """Of the `Frame` that the last call left, for who says how it came about; until the next call."""
        return self._workspace.address

    def model_of(self, learned: LearnedState | None) -> AcceptanceModel:
        """What was learned about acceptance in a namespace; with None, of all requests that have none."""
        return self._models.of(learned)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; one kernel call for all with the same snapshot and ``learned``."""
        if self._choices is not None:
            self._choices.begin_pass()
        if len(requests) == 1:
            return [self._propose_one(requests[0])]
        members: dict[tuple[int, int], list[int]] = {}
        for i, request in enumerate(requests):  # what is learned is a namespace's own also where there is no snapshot
            members.setdefault((id(request.snapshot), id(request.learned)), []).append(i)
        drafts = [EMPTY_DRAFT] * len(requests)
        for indices in members.values():
            for i, draft in zip(indices, self._propose([requests[i] for i in indices]), strict=True):
                drafts[i] = draft
        return drafts

    def _propose_one(self, request: DraftRequest) -> Draft:
        workspace, snapshot = self._workspace, request.snapshot or NO_SNAPSHOT
        workspace.room_for(1, snapshot)
        model, context = self._models.of(request.learned), contiguous(request.context)
        successors, choices = self._successors_of(request), self._choices_of(request)
        held = workspace.ask(0, request, self._price, successors, self._looks_up, choices)
        state, is_new = workspace.state_of(request.request_id)
        if is_new:
            self._learned[request.request_id] = request.learned
        propose_suffix_one(
            workspace.address,
            snapshot.address,
            model.address,
            context,
            request.limit,
            state,
            is_new,
            request.prompt_length,
            self._longest,
            self._shortest,
        )
        del held
        return workspace.draft(0)

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        workspace, count, snapshot = self._workspace, len(requests), requests[0].snapshot or NO_SNAPSHOT
        workspace.room_for(count, snapshot)
        learned = requests[0].learned
        if learned is None:  # each from what it said itself
            successors = [self._successors_of(request) for request in requests]
        else:
            successors = [self._successors_of(requests[0])] * count
        choices = [self._choices_of(request) for request in requests]
        held = workspace.fill(requests, self._price, successors, self._looks_up, choices)
        model = self._models.of(learned)
        self._learned.update((request.request_id, learned) for request in requests)
        longest, shortest = self._longest, self._shortest
        propose_suffix(workspace.address, snapshot.address, model.address, count, longest, shortest)
        del held
        return workspace.drafts(count)

    def _successors_of(self, request: DraftRequest) -> int:
        """Address of the target's own candidates for a request, 0 for none."""
        return 0 if self._successors is None else self._successors.of(request.learned, request.request_id)

    def _choices_of(self, request: DraftRequest) -> int:
        """Address of what the same noise chose before, 0 for none."""
        return 0 if self._choices is None else self._choices.of(request)

    def observe_scores(self, scored: ScoredPass) -> None:
        """Learn what the target held likely at every position of a pass."""
        if self._successors is not None:
            self._successors.learn(scored)
            self._workspace.keep_guesses(scored)

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Keep how much was accepted: it is learned from when the request ends, and before that from its context."""
        if draft is EMPTY_DRAFT:  # nothing was asked at this step: the last draft is still the one before
            return
        if draft.parents is None or num_accepted == 0:
            self._verified[request_id] = len(draft.token_ids), num_accepted
        elif draft.path is None:  # of a tree, and nobody says which tokens of it
            self._verified.pop(request_id, None)
        else:
            self._verified[request_id] = len(draft.token_ids), contiguous(draft.path)

    def finish(self, request_id: str) -> None:
        """Learn from the last step and forget the request: it has ended."""
        state, verified = self._workspace.known_state(request_id), self._verified.pop(request_id, None)
        learned = self._learned.pop(request_id, None)
        if state is not None and verified is not None:
            size, right = verified
            path = np.arange(right, dtype=np.int32) if isinstance(right, int) else right
            end_request(self._workspace.address, state, size, path, self._models.of(learned).address)
        self._workspace.forget(request_id)
        self._models.ended(learned)
        if self._successors is not None:
            self._successors.ended(request_id)
        if self._choices is not None:
            self._choices.ended(request_id)

    def publish(self) -> None:
        """Leave what was learned for other threads and the next process, in every request's ``learned``."""
        self._models.publish()

    def warm_up(self) -> None:
        """Compile the kernels, so that the first request compiles nothing."""
        request = DraftRequest("", np.zeros(2, np.int32), 2, None, 1)
        draft = self.propose([request])[0]
        self.propose([request, request])
        if self._choices is not None:
            warm_up_choices()
        self.observe("", draft, 0)
        self.finish("")
