"""Store the candidates of a request's last draft until their outcomes are known, and learn from these outcomes.

The next context shows which candidates the target produced. It tells more than the number of accepted tokens, because
it also gives the outcomes of candidates that were not drafted or were cut from the draft.
"""

from __future__ import annotations

from typing import Final

from ssd.drafting.acceptance_features import ERROR_BUCKETS, NUM_FEATURES, AcceptanceTables
from ssd.drafting.acceptance_mixing import learn_outcome
from ssd.drafting.draft_records import MAX_SCORED, ScoredCandidate, ScoredDraft
from ssd.drafting.draft_scratch import OpenCandidate
from ssd.jit.addresses import TokenIds, inlined, kernel

_ERROR_ONE: Final = 1 << 20
_ERROR_RATE: Final = 0.1
_STORED: Final = -1  # the weight set of a candidate that is stored


@inlined
def reset_scored(scored: ScoredDraft) -> None:
    scored.count, scored.start, scored.num_drafted, scored.mean_error = 0, 0, 0, 0


@inlined
def start_scored(scored: ScoredDraft, context_length: int) -> None:
    scored.count, scored.start, scored.num_drafted = 0, context_length, 0


@inlined
def error_bucket(scored: ScoredDraft) -> int:
    """Return the bucket of a request's mean estimation error: accepted (1 or 0) minus the estimated probability.

    The middle bucket means no error.
    """
    error = scored.mean_error / _ERROR_ONE
    return int(min(ERROR_BUCKETS - 1, max(0, int((error + 0.4) * 10.0))))


@inlined
def record_candidate(scored: ScoredDraft, candidate: OpenCandidate, depth: int, drafted: bool) -> None:
    """Store a candidate token and its features until its outcome can be learned.

    Do nothing if the candidate is stored already or if there is no room. ``depth`` is the number of draft tokens before
    it, and ``drafted`` is whether it is in the draft. Draft tokens must be stored first, in order, so that
    ``candidate.parent`` is the index of a stored candidate.
    """
    weight_set, count = candidate.weight_set, scored.count
    candidate.weight_set = _STORED
    if weight_set == _STORED or count == MAX_SCORED:
        return
    stored = scored.candidates[count]
    stored.token, stored.parent, stored.depth, stored.weight_set = candidate.token, candidate.parent, depth, weight_set
    for i in range(NUM_FEATURES):
        stored.inputs[i] = candidate.inputs[i]
    scored.count = count + 1
    scored.num_drafted += int(drafted)


@inlined
def _learn_one(scored: ScoredDraft, candidate: ScoredCandidate, outcome: bool, model: AcceptanceTables) -> None:
    candidate.outcome = 1 if outcome else -1
    error = learn_outcome(model, candidate.inputs, candidate.weight_set, 1.0 if outcome else 0.0)
    scored.mean_error += int(_ERROR_RATE * (error * _ERROR_ONE - scored.mean_error))


@kernel
def learn_from_context(scored: ScoredDraft, context: TokenIds, model: AcceptanceTables) -> None:
    """Update the acceptance model: compare the last draft's candidates with the tokens that the target produced.

    Candidates after a wrong token are skipped, because their outcome is unknown.
    """
    for i in range(scored.count):
        candidate = scored.candidates[i]
        place, parent = scored.start + candidate.depth, candidate.parent
        candidate.outcome = 0
        if place < len(context) and (parent < 0 or scored.candidates[parent].outcome == 1):
            _learn_one(scored, candidate, context[place] == candidate.token, model)
    scored.count = 0


@kernel
def learn_from_path(scored: ScoredDraft, num_verified: int, path: TokenIds, model: AcceptanceTables) -> None:
    """Update the acceptance model from the accepted draft tokens of a request that has ended.

    Only the first ``num_verified`` draft tokens were verified. ``path`` holds the indices of the accepted tokens, 0, 1,
    2, ... for a chain. The outcome of a draft token is known if all tokens before it were accepted.
    """
    for i in range(min(scored.num_drafted, num_verified)):
        candidate = scored.candidates[i]
        depth = candidate.depth
        if depth <= len(path) and (depth == 0 or path[depth - 1] == candidate.parent):
            _learn_one(scored, candidate, depth < len(path) and path[depth] == i, model)
    scored.count = 0
