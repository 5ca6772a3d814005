"""Grow a draft from candidates: a chain of the most probable tokens, or a tree, best first.

If all matches have ended, the end of the draft is looked up again, because it may have occurred elsewhere.
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
"""The number of context tokens that a further lookup uses."""

MIN_CONTINUED_MATCH: Final = 4
"""The minimum match length of a further lookup. Shorter matches mostly begin something else."""

_MIN_UNMATCHED: Final = 2
"""The number of draft tokens without any match before a further lookup is worthwhile."""


@inlined
def needs_lookup(
    texts: SearchedTexts, samples: MatchSamples, matching: Int64s, num_matching: int, since_lookup: int, predicted: int
) -> bool:
    """Return whether the end of the draft should be looked up, because no match goes on. O(samples).

    Args:
        texts: The texts that samples lie in.
        samples: The samples.
        matching: The indices of samples that agree with the draft.
        num_matching: The number of these.
        since_lookup: The number of draft tokens since the samples were looked up.
        predicted: The token of the client's prediction, which needs no lookup; NO_TOKEN for none.
    """
    if since_lookup == 0 or predicted >= 0:
        return False
    for i in range(num_matching):
        if next_token(samples, matching[i], since_lookup, texts) >= 0:
            return False
    return num_matching > 0 or since_lookup >= _MIN_UNMATCHED


@inlined
def copy_context_end(context: TokenIds, text: TokenIds) -> int:
    """Copy the end of a context into ``text``, int32[CONTINUED_CONTEXT + n], and return the number of tokens."""
    kept = min(len(context), CONTINUED_CONTEXT)
    text[:kept] = context[len(context) - kept :]
    return int(np.int64(kept))


CHAIN_CANDIDATES: Final = 4
"""The maximum number of candidates per position of a chain. The best candidate rarely has fewer votes than these."""

CHAIN_RECYCLED: Final = 2
"""The maximum number of further candidates per position that come from token recycling alone."""


class ChainScratch(Record):
    """The state of a chain that ended because nothing was found, so that it can be continued.

    Attributes:
        matching: The indices of samples that agree with the draft.
        product: The probability that all of the draft is accepted.
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
    """Append the most probable token while the draft's acceptance probability exceeds the cost of the next token.

    Args:
        texts: The texts that samples lie in.
        samples: The samples.
        begin: The number of tokens already in ``out``; they are the last tokens of ``texts.context``.
        may_look_up: Whether to stop early when a new lookup from the draft's end is worthwhile.
        params: The parameters of the draft.
        prediction: The position in the client's prediction.
        model: The acceptance model.
        candidates: Scratch for the candidates of a position.
        scratch: The state to continue from, and to continue from later.
        scored: Receives the candidates, to learn from them.
        out: The draft.

    Returns:
        Whether the chain ended because nothing was found, or because of a lookup.
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
"""The maximum number of lookups for paths of a tree whose matches have ended."""


class TreeNode(Record):
    """A draft token of a tree.

    Attributes:
        depth: The number of draft tokens before it.
        lookup: The lookup that its samples come from; 0 for that of the context.
        looked_up_at: The depth at which that lookup was made.
        first: The index in ``matching`` of the first sample that agrees with the path to the node.
        num_matching: The number of these samples.
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
    """A candidate that may be added to the tree.

    Attributes:
        parent: The node before it; -1 for the end of the context.
        token: The token.
        weight_set: The weight set that it was scored with; _RECORDED once it has been recorded.
        inputs: The table entries that it was scored with.
        product: The probability that it and all nodes before it are accepted.
        probability: The probability that it is accepted, given that the nodes before it are.
    """

    parent: Int64
    token: Int64
    weight_set: Int64
    inputs: Annotated[Int64s, np.int64, NUM_FEATURES]
    product: Float64
    probability: Float64


class TreeScratch(Record):
    """Scratch memory for a tree.

    Attributes:
        matching: The indices of samples that agree with the path to each node, node after node.
        nodes: The nodes of the tree.
        opened: All candidates.
        heap: The candidates that may be added, as a heap with the greatest product first.
        texts: The text of each further lookup.
        lengths: The length of each of these texts.
    """

    matching: Annotated[Int64s, np.int64, (MAX_DRAFT + 2) * MAX_SAMPLES]
    nodes: Annotated[Sequence[TreeNode], TreeNode, MAX_DRAFT]
    opened: Annotated[Sequence[OpenCandidate], OpenCandidate, _MAX_OPEN]
    heap: Annotated[Int64s, np.int64, _MAX_OPEN]
    texts: Annotated[TokenIds, np.int32, (MAX_FURTHER_LOOKUPS, CONTINUED_CONTEXT + MAX_DRAFT)]
    lengths: Annotated[Int64s, np.int64, MAX_FURTHER_LOOKUPS]


class FurtherLookups(NamedTuple):
    """What the further lookups of a tree need.

    Attributes:
        snapshot: The snapshot to search.
        lookups: Scratch memory.
        samples_at: The address of MatchSamples[MAX_FURTHER_LOOKUPS].
        max_length: The maximum match length.
        min_length: The minimum match length.
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
    """Remove the first element of a heap of ``size`` elements and return it."""
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
    """Record a candidate to learn from it, unless that was done."""
    candidate = scratch.opened[number]
    if candidate.weight_set != _RECORDED:
        parent = candidate.parent
        depth = scratch.nodes[parent].depth + 1 if parent >= 0 else 0
        record_candidate(scored, candidate.token, parent, depth, candidate.weight_set, candidate.inputs, drafted)
        candidate.weight_set = _RECORDED


@inlined
def _searched_texts(scratch: TreeScratch, texts: SearchedTexts, lookup: int) -> SearchedTexts:
    """Return the texts that a lookup's samples lie in."""
    context = texts.context if lookup == 0 else scratch.texts[lookup - 1][: scratch.lengths[lookup - 1]]
    return SearchedTexts(context, texts.ring, texts.memtable_start, texts.memtable_stop)


@inlined
def _samples_of(further: FurtherLookups, samples: MatchSamples, lookup: int) -> MatchSamples:
    """Return the samples of a lookup; 0 is that of the context."""
    if lookup == 0:
        return samples
    return match_samples_at(further.samples_at + MATCH_SAMPLES_BYTES * (lookup - 1))


@kernel
def _look_up_again(
    scratch: TreeScratch, number: int, texts: SearchedTexts, node: int, further: FurtherLookups, out: DraftRecord
) -> None:
    """Look up the context followed by the path to a node."""
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
    """Add the most probable node while its acceptance probability exceeds the cost of the next token.

    The probability of a node is the product of those on its path, so it is never greater than its parent's, and the
    nodes are added in the order of all possible nodes: no other tree of the same size has more expected accepted
    tokens. O(limit * samples).

    The best candidate after every node is recorded to learn from it, however improbable it seems, because otherwise an
    underestimated token would never be drafted and corrected. If all matches of a path have ended, the path is looked
    up again, up to MAX_FURTHER_LOOKUPS times.

    Args:
        texts: The texts that samples lie in.
        samples: The samples of the context.
        further: What further lookups need.
        params: The parameters of the draft.
        prediction: The position in the client's prediction.
        model: The acceptance model.
        candidates: Scratch for the candidates of a position.
        scratch: Scratch for the tree.
        scored: Receives the candidates, to learn from them.
        out: The draft.
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
