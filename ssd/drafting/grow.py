"""Grow a draft from candidate tokens: a chain of the most probable tokens, or a tree, best first.

If all text matches have ended, the end of the draft is looked up again, because it may have occurred elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import numpy as np

from ssd.drafting.acceptance_mixing import NUM_FEATURES, AcceptanceTables
from ssd.drafting.candidates import (
    Candidates,
    Position,
    ScoredDraft,
    collect_candidates,
    error_bucket,
    record_candidate,
    score_candidates,
    set_source,
)
from ssd.drafting.draft_records import MAX_DRAFT, DraftParams, DraftRecord, cost_of_token
from ssd.drafting.lookup import (
    MATCH_SAMPLES_BYTES,
    MAX_SAMPLES,
    NO_TOKEN,
    LookupScratch,
    MatchSamples,
    SearchedTexts,
    match_samples_at,
    next_token,
    num_samples,
    sample_matches,
    token_before,
)
from ssd.drafting.noise_prediction import enter_node
from ssd.drafting.prediction import PredictionCursor, predicted_token
from ssd.drafting.proposal_tree import PROPOSAL_ROOT, child_of
from ssd.drafting.votes import MAX_CANDIDATES, MAX_RECYCLED_CANDIDATES, MAX_VOTED_CANDIDATES
from ssd.jit.addresses import Float64, Int64, Int64s, Record, TokenIds, inlined, kernel
from ssd.retrieval.snapshot import SnapshotRecord

CONTINUED_CONTEXT: Final = 4096
"""The maximum number of context tokens that are searched when the last tokens of a draft are looked up to continue it.
"""

MIN_CONTINUED_MATCH: Final = 4
"""The minimum match length when the last tokens of a draft are looked up to continue it.

After a shorter match the text mostly continues differently.
"""

_MIN_UNMATCHED: Final = 2
"""The minimum number of draft tokens after the end of all text matches before the draft's last tokens are looked up."""


@inlined
def needs_lookup(
    texts: SearchedTexts, samples: MatchSamples, matching: Int64s, num_matching: int, since_lookup: int, predicted: int
) -> bool:
    """Return whether to look up the last tokens of the draft, because all text matches that agree with it have ended.

    ``matching`` holds the indices of the matches that agree with the draft, and ``since_lookup`` is the number of draft
    tokens since the last lookup. No lookup is needed if the client's prediction continues with ``predicted``.
    """
    if since_lookup == 0 or predicted >= 0:
        return False
    for i in range(num_matching):
        if next_token(samples, matching[i], since_lookup, texts) >= 0:
            return False
    return num_matching > 0 or since_lookup >= _MIN_UNMATCHED


@inlined
def copy_context_end(context: TokenIds, text: TokenIds) -> int:
    """Copy the last CONTINUED_CONTEXT tokens of a context to the beginning of ``text``, and return their number."""
    kept = min(len(context), CONTINUED_CONTEXT)
    text[:kept] = context[len(context) - kept :]
    return int(np.int64(kept))


CHAIN_CANDIDATES: Final = 4
"""The maximum number of candidate tokens per position of a draft chain."""

CHAIN_RECYCLED: Final = 2
"""The maximum number of candidate tokens that token recycling adds at each position of a draft chain."""


class ChainScratch(Record):
    """The state at the end of a draft chain, saved so that the chain can be continued after another lookup.

    Attributes:
        matching: The indices of the text matches that agree with the draft.
        product: The probability that all tokens of the draft are accepted.
        follows: Whether the client's prediction agrees with the draft.
        proposal_node: The node of the proposal tree that the draft leads to; NO_TOKEN if it is not in the tree.
    """

    matching: Annotated[Int64s, np.int64, MAX_SAMPLES]
    product: Float64
    follows: Int64
    proposal_node: Int64


@kernel
def grow_chain(
    texts: SearchedTexts,
    samples: MatchSamples,
    begin: int,
    may_look_up: bool,
    params: DraftParams,
    prediction: PredictionCursor,
    model: AcceptanceTables,
    candidates: Candidates,
    scratch: ChainScratch,
    scored: ScoredDraft,
    out: DraftRecord,
) -> bool:
    """Append the most probable token to a draft chain while the chain's acceptance probability exceeds a token's cost.

    The draft ``out`` already has ``begin`` tokens. With ``may_look_up``, the chain also ends where its last tokens
    should be looked up again. ``scratch`` receives the state from which the chain can be continued.

    Returns:
        Whether the chain can be continued, because it ended for lack of candidates or because of a lookup.
    """
    matching, count = scratch.matching, num_samples(samples)
    for i in range(count):
        matching[i] = i
    follows = begin == 0 or scratch.follows == 1
    product = 1.0 if begin == 0 else scratch.product
    last_token, token_before_last = int(np.int64(texts.context[-1])), token_before(texts)
    proposal_node = PROPOSAL_ROOT if begin == 0 else scratch.proposal_node
    error, votes, always_matched = error_bucket(scored), candidates.votes, prediction.has_differed == 0
    for depth in range(begin, params.limit + 1):
        enter_node(candidates.cached_sample, candidates.position_noise, out, depth - 1, depth)
        predicted = predicted_token(params, prediction, depth) if follows else NO_TOKEN
        at = Position(
            depth=depth,
            since_lookup=depth - begin,
            last_token=last_token,
            token_before_last=token_before_last,
            proposal_node=proposal_node,
            temperature_bucket=params.temperature_bucket,
            predicted=predicted,
            prediction_match_length=prediction.match_length + depth,
            always_matched=always_matched,
            error_bucket=error,
            prompt_length=params.prompt_length,
        )
        looks_up = may_look_up and depth < params.limit and candidates.cached_sample.token < 0
        if looks_up and needs_lookup(texts, samples, matching, count, at.since_lookup, predicted):
            scratch.product, scratch.follows, scratch.proposal_node = product, int(follows), proposal_node
            return True
        size = collect_candidates(texts, samples, matching, count, at, CHAIN_CANDIDATES, CHAIN_RECYCLED, candidates)
        score_candidates(samples, size, at, model, candidates)
        if size == 0:
            scratch.product, scratch.follows, scratch.proposal_node = product, int(follows), proposal_node
            return True
        best = 0
        for row in range(1, size):
            if candidates.probabilities[row] > candidates.probabilities[best]:
                best = row
        token, probability = votes.tokens[best], candidates.probabilities[best]
        product *= probability
        pays = depth < params.limit and product >= cost_of_token(params, depth)
        # Learn from the first token that is left out too, because its cost may have been overestimated.
        record_candidate(scored, token, depth - 1, depth, candidates.weight_sets[best], candidates.inputs[best], pays)
        if not pays:
            return False
        if depth == 0:
            set_source(candidates, best, samples, predicted, out)
        last_token, token_before_last = token, last_token
        out.tokens[depth], out.probabilities[depth] = token, probability
        out.size = depth + 1
        follows = follows and predicted == token
        kept = 0
        for i in range(count):
            matching[kept] = matching[i]
            kept += votes.next_tokens[i] == token
        count, proposal_node = kept, child_of(candidates.proposals, proposal_node, token)
    return False


_MAX_OPEN: Final = MAX_CANDIDATES * (MAX_DRAFT + 1)
_RECORDED: Final = -1

MAX_FURTHER_LOOKUPS: Final = 2
"""The maximum number of lookups per draft tree that continue branches whose text matches have ended."""


class TreeNode(Record):
    """A token of a draft tree, with the state of the path from the root to this token.

    Attributes:
        lookup: The index of the lookup that found the text matches of this path; 0 for that of the context.
        looked_up_at: The depth at which that lookup was made.
        first: The index in ``TreeScratch.matching`` of the first match that agrees with the path.
        num_matching: The number of matches that agree with the path.
        follows: Whether the client's prediction agrees with the path.
        proposal_node: The node of the proposal tree that the path leads to; NO_TOKEN if it is not in the tree.
        best: The most probable candidate after the node; NO_TOKEN if there is none.
    """

    depth: Int64
    lookup: Int64
    looked_up_at: Int64
    first: Int64
    num_matching: Int64
    follows: Int64
    proposal_node: Int64
    best: Int64


class OpenCandidate(Record):
    """A candidate token that may be added to a draft tree.

    Attributes:
        parent: The node before the token; -1 for the end of the context.
        weight_set: The index of the acceptance model's weight vector for the token; _RECORDED once it is recorded.
        inputs: The indices of the table entries of the token's features.
        product: The probability that the token and all nodes before it are accepted.
        probability: The probability that the token is accepted, given that the nodes before it are.
    """

    parent: Int64
    token: Int64
    weight_set: Int64
    inputs: Annotated[Int64s, np.int64, NUM_FEATURES]
    product: Float64
    probability: Float64


class TreeScratch(Record):
    """Scratch memory for a draft tree.

    Attributes:
        matching: The indices of matches that agree with the path to each node, node after node.
        heap: The candidates that may be added, as a heap with the greatest ``product`` first.
        texts: The text of each further lookup (the end of the context and a path), of the length in ``lengths``.
    """

    matching: Annotated[Int64s, np.int64, (MAX_DRAFT + 2) * MAX_SAMPLES]
    nodes: Annotated[Sequence[TreeNode], TreeNode, MAX_DRAFT]
    opened: Annotated[Sequence[OpenCandidate], OpenCandidate, _MAX_OPEN]
    heap: Annotated[Int64s, np.int64, _MAX_OPEN]
    texts: Annotated[TokenIds, np.int32, (MAX_FURTHER_LOOKUPS, CONTINUED_CONTEXT + MAX_DRAFT)]
    lengths: Annotated[Int64s, np.int64, MAX_FURTHER_LOOKUPS]


class FurtherLookups(NamedTuple):
    """The arguments of the lookups that continue branches of a draft tree whose text matches have ended.

    ``samples_at`` is the address of MatchSamples[MAX_FURTHER_LOOKUPS], which receive the matches.
    """

    snapshot: SnapshotRecord
    lookups: LookupScratch
    samples_at: int
    max_length: int
    min_length: int


@inlined
def _sift_up(scratch: TreeScratch, place: int) -> None:
    heap, opened = scratch.heap, scratch.opened
    while place > 0 and opened[heap[place]].product > opened[heap[(place - 1) // 2]].product:
        above = (place - 1) // 2
        heap[place], heap[above] = heap[above], heap[place]
        place = above


@inlined
def _pop(scratch: TreeScratch, size: int) -> int:
    heap, opened = scratch.heap, scratch.opened
    first = heap[0]
    heap[0] = heap[size - 1]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and opened[heap[child + 1]].product > opened[heap[child]].product:
            child += 1
        if opened[heap[child]].product <= opened[heap[place]].product:
            break
        heap[place], heap[child] = heap[child], heap[place]
        place = child
    return int(first)


@inlined
def _record_once(scratch: TreeScratch, number: int, scored: ScoredDraft, drafted: bool) -> None:
    candidate = scratch.opened[number]
    if candidate.weight_set != _RECORDED:
        parent = candidate.parent
        depth = scratch.nodes[parent].depth + 1 if parent >= 0 else 0
        record_candidate(scored, candidate.token, parent, depth, candidate.weight_set, candidate.inputs, drafted)
        candidate.weight_set = _RECORDED


@inlined
def _searched_texts(scratch: TreeScratch, texts: SearchedTexts, lookup: int) -> SearchedTexts:
    context = texts.context if lookup == 0 else scratch.texts[lookup - 1][: scratch.lengths[lookup - 1]]
    return SearchedTexts(context, texts.ring, texts.memtable_start, texts.memtable_stop)


@inlined
def _samples_of(further: FurtherLookups, samples: MatchSamples, lookup: int) -> MatchSamples:
    if lookup == 0:
        return samples
    return match_samples_at(further.samples_at + MATCH_SAMPLES_BYTES * (lookup - 1))


@kernel
def _look_up_again(
    scratch: TreeScratch, number: int, texts: SearchedTexts, node: int, further: FurtherLookups, out: DraftRecord
) -> None:
    text, depth = scratch.texts[number], scratch.nodes[node].depth
    kept = copy_context_end(texts.context, text)
    for place in range(depth, -1, -1):
        text[kept + place] = out.tokens[node]
        node = out.parents[node]
    scratch.lengths[number] = kept + depth + 1
    sample_matches(
        further.snapshot,
        further.lookups,
        text[: kept + depth + 1],
        further.max_length,
        further.min_length,
        match_samples_at(further.samples_at + MATCH_SAMPLES_BYTES * number),
    )


@kernel
def grow_tree(
    texts: SearchedTexts,
    samples: MatchSamples,
    further: FurtherLookups,
    params: DraftParams,
    prediction: PredictionCursor,
    model: AcceptanceTables,
    candidates: Candidates,
    scratch: TreeScratch,
    scored: ScoredDraft,
    out: DraftRecord,
) -> None:
    """Add the most probable candidate to a draft tree while its acceptance probability exceeds a draft token's cost.

    The probability of a node is the product of the probabilities on its path, so it never exceeds its parent's. Nodes
    are added in order of probability, so no other tree of the same size has more expected accepted tokens. O(limit *
    samples).

    The best candidate after every node is recorded in ``scored``, however improbable, because an underestimated token
    would otherwise never be drafted and corrected. If all matches of a path have ended, the path is looked up again, up
    to MAX_FURTHER_LOOKUPS times.
    """
    matching, nodes, heap = scratch.matching, scratch.nodes, scratch.heap
    count = num_samples(samples)
    for i in range(count):
        matching[i] = i
    first, num_nodes, num_open, num_opened, parent, follows, best_of_all = 0, 0, 0, 0, -1, True, NO_TOKEN
    product, depth, proposal_node = 1.0, 0, PROPOSAL_ROOT
    last = int(np.int64(texts.context[-1]))
    last_token, token_before_last = last, token_before(texts)
    error, votes, always_matched = error_bucket(scored), candidates.votes, prediction.has_differed == 0
    lookup, looked_up_at, num_further, samples_here, texts_here = 0, 0, 0, samples, _searched_texts(scratch, texts, 0)
    while True:
        predicted = predicted_token(params, prediction, depth) if follows else NO_TOKEN
        may_look_up = num_further < MAX_FURTHER_LOOKUPS and num_nodes < params.limit and params.no_lookup == 0
        since_lookup = depth - looked_up_at
        enter_node(candidates.cached_sample, candidates.position_noise, out, parent, depth)
        may_look_up = may_look_up and candidates.cached_sample.token < 0
        if may_look_up and needs_lookup(texts_here, samples_here, matching[first:], count, since_lookup, predicted):
            _look_up_again(scratch, num_further, texts, parent, further, out)
            num_further += 1
            lookup, looked_up_at, since_lookup = num_further, depth, 0
            samples_here, texts_here = _samples_of(further, samples, lookup), _searched_texts(scratch, texts, lookup)
            count = num_samples(samples_here)
            for i in range(count):
                matching[first + i] = i
            node = nodes[parent]
            node.lookup, node.looked_up_at, node.num_matching = lookup, looked_up_at, count
        at = Position(
            depth=depth,
            since_lookup=since_lookup,
            last_token=last_token,
            token_before_last=token_before_last,
            proposal_node=proposal_node,
            temperature_bucket=params.temperature_bucket,
            predicted=predicted,
            prediction_match_length=prediction.match_length + depth,
            always_matched=always_matched,
            error_bucket=error,
            prompt_length=params.prompt_length,
        )
        size = collect_candidates(
            texts_here,
            samples_here,
            matching[first:],
            count,
            at,
            MAX_VOTED_CANDIDATES,
            MAX_RECYCLED_CANDIDATES,
            candidates,
        )
        score_candidates(samples_here, size, at, model, candidates)
        best = 0
        for row in range(1, size):
            if candidates.probabilities[row] > candidates.probabilities[best]:
                best = row
        if parent < 0 and size > 0:
            set_source(candidates, best, samples, predicted, out)
        best_here = NO_TOKEN
        for row in range(size):
            probability = candidates.probabilities[row]
            is_hopeful = product * probability >= 0.5 * cost_of_token(params, num_nodes)
            if not is_hopeful and row != best:
                continue
            entry = scratch.opened[num_opened]
            entry.parent, entry.token, entry.weight_set = parent, votes.tokens[row], candidates.weight_sets[row]
            for i in range(NUM_FEATURES):
                entry.inputs[i] = candidates.inputs[row, i]
            entry.product, entry.probability = product * probability, probability
            if row == best:
                best_here = num_opened
            if is_hopeful:
                heap[num_open] = num_opened
                _sift_up(scratch, num_open)
                num_open += 1
            num_opened += 1
        if parent >= 0:
            nodes[parent].best = best_here
        else:
            best_of_all = best_here
        if num_open == 0:
            break
        taken = _pop(scratch, num_open)
        num_open -= 1
        entry = scratch.opened[taken]
        product, parent = entry.product, entry.parent
        depth = nodes[parent].depth + 1 if parent >= 0 else 0
        pays = num_nodes < params.limit and product >= cost_of_token(params, num_nodes)
        _record_once(scratch, taken, scored, pays)
        if not pays:
            break
        last_token, token_before_last = entry.token, int(out.tokens[parent]) if parent >= 0 else last
        out.tokens[num_nodes], out.probabilities[num_nodes] = last_token, entry.probability
        out.parents[num_nodes] = parent
        out.size = num_nodes + 1
        # The samples of a node are those of its parent that are followed by its token.
        lookup = nodes[parent].lookup if parent >= 0 else 0
        looked_up_at = nodes[parent].looked_up_at if parent >= 0 else 0
        samples_here, texts_here = _samples_of(further, samples, lookup), _searched_texts(scratch, texts, lookup)
        from_first = nodes[parent].first if parent >= 0 else 0
        from_count = nodes[parent].num_matching if parent >= 0 else num_samples(samples)
        first = nodes[num_nodes - 1].first + nodes[num_nodes - 1].num_matching if num_nodes > 0 else from_count
        count = 0
        for i in range(from_count):
            matching[first + count] = matching[from_first + i]
            count += next_token(samples_here, matching[from_first + i], depth - looked_up_at, texts_here) == last_token
        follows = (parent < 0 or nodes[parent].follows == 1) and predicted_token(
            params, prediction, depth
        ) == last_token
        proposal_node = child_of(
            candidates.proposals, nodes[parent].proposal_node if parent >= 0 else PROPOSAL_ROOT, last_token
        )
        node = nodes[num_nodes]
        node.depth, node.first, node.num_matching, node.follows = depth, first, count, int(follows)
        node.proposal_node, node.lookup, node.looked_up_at = proposal_node, lookup, looked_up_at
        parent = num_nodes
        depth += 1
        num_nodes += 1
    # Record the candidates that were left out after the nodes, so that the record of a node has the node's number.
    for place in range(-1, num_nodes):
        left_out = nodes[place].best if place >= 0 else best_of_all
        if left_out != NO_TOKEN:
            _record_once(scratch, left_out, scored, False)
