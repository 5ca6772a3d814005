"""Grow a draft from candidate tokens, best first: a tree, or a chain, which is a tree of width one.

If no text match agrees any more with a path (the draft tokens from the context's end to a node), the last tokens of the
path are looked up again, because they may have occurred elsewhere.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ssd.drafting.acceptance_features import NUM_FEATURES, AcceptanceTables
from ssd.drafting.candidate_scoring import Position, collect_candidates, score_candidates, set_source
from ssd.drafting.draft_outcomes import error_bucket, record_candidate
from ssd.drafting.draft_records import NO_TOKEN, DraftRecord, DraftRow, cost_of_token
from ssd.drafting.draft_scratch import (
    CONTINUED_CONTEXT,
    MAX_FURTHER_LOOKUPS,
    MAX_RECYCLED_CANDIDATES,
    MAX_VOTED_CANDIDATES,
    Candidates,
    DraftNode,
    DraftScratch,
    OpenCandidate,
    Votes,
)
from ssd.drafting.lookup import SearchedTexts, num_samples, sample_matches
from ssd.drafting.noise_prediction import enter_node
from ssd.drafting.prediction import predicted_token
from ssd.drafting.proposal_tree import PROPOSAL_ROOT, child_of
from ssd.jit.addresses import TokenIds, inlined, kernel
from ssd.retrieval.snapshot import SnapshotRecord

CHAIN_CANDIDATES: Final = 4
"""The maximum number of candidate tokens per position of a draft chain."""

CHAIN_RECYCLED: Final = 2
"""The maximum number of candidate tokens that token recycling adds at each position of a draft chain."""

_TREE_LOOKUPS: Final = 2
"""The maximum number of times that a draft tree's last tokens are looked up because no text match has a next token."""

_MIN_CONTINUED_MATCH: Final = 4
"""The minimum match length when the last tokens of a draft are looked up to continue it.

After a shorter match the text mostly continues differently.
"""

_MIN_UNMATCHED: Final = 2
"""The number of draft tokens after which the end of a draft is looked up again, if no text match agrees with the draft.
"""


class DraftInputs(NamedTuple):
    """The searched texts, the cache snapshot and the acceptance model from which the kernel makes one draft.

    ``max_length`` and ``min_length`` are the maximum and minimum match length of a lookup.
    """

    texts: SearchedTexts
    snapshot: SnapshotRecord
    model: AcceptanceTables
    max_length: int
    min_length: int


@inlined
def _push(scratch: DraftScratch, candidate: int) -> None:
    heap, opened, place = scratch.heap, scratch.opened, scratch.num_open
    heap[place] = candidate
    scratch.num_open = place + 1
    while place > 0 and opened[heap[place]].product > opened[heap[(place - 1) // 2]].product:
        above = (place - 1) // 2
        heap[place], heap[above] = heap[above], heap[place]
        place = above


@inlined
def _pop(scratch: DraftScratch) -> OpenCandidate:
    """Remove the most probable open candidate from the heap, and return it."""
    heap, opened, size, place = scratch.heap, scratch.opened, scratch.num_open - 1, 0
    first, heap[0] = int(heap[0]), heap[size]
    scratch.num_open = size
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and opened[heap[child + 1]].product > opened[heap[child]].product:
            child += 1
        if opened[heap[child]].product <= opened[heap[place]].product:
            break
        heap[place], heap[child] = heap[child], heap[place]
        place = child
    return opened[first]


@inlined
def _needs_lookup(votes: Votes, at: Position, num_matching: int, size: int, is_tree: bool) -> bool:
    """Return whether the last tokens of a draft should be looked up again, because no text match offers a next token.

    No lookup is needed if a match or the client's prediction offers a token. Otherwise a lookup is needed if the draft
    agrees with matches whose texts have ended, if _MIN_UNMATCHED tokens were drafted since the last lookup, or if a
    chain has no candidate at all (``size`` is 0).
    """
    if at.since_lookup == 0 or at.predicted >= 0 or votes.num_voted > 0:
        return False
    return num_matching > 0 or at.since_lookup >= _MIN_UNMATCHED or (size == 0 and not is_tree)


@inlined
def _most_probable(candidates: Candidates, size: int) -> int:
    best = 0
    for i in range(1, size):
        if candidates.probabilities[i] > candidates.probabilities[best]:
            best = i
    return best


@inlined
def _open(scratch: DraftScratch, i: int, last: int, product: float, is_hopeful: bool) -> int:
    candidates, number = scratch.candidates, scratch.num_opened
    opened = scratch.opened[number]
    opened.parent, opened.token, opened.weight_set = last, candidates.votes.tokens[i], candidates.weight_set
    for feature in range(NUM_FEATURES):
        opened.inputs[feature] = candidates.inputs[i, feature]
    opened.product, opened.probability = product, candidates.probabilities[i]
    scratch.num_opened = number + 1
    if is_hopeful:
        _push(scratch, number)
    return int(number)


@inlined
def _texts_of(scratch: DraftScratch, texts: SearchedTexts, lookup: int) -> SearchedTexts:
    context = texts.context if lookup == 0 else scratch.texts[lookup - 1][: scratch.lengths[lookup - 1]]
    return SearchedTexts(context, texts.ring, texts.memtable_start, texts.memtable_stop)


@inlined
def _set_matches(scratch: DraftScratch, node: DraftNode, lookup: int) -> None:
    count = num_samples(scratch.samples[lookup])
    node.lookup, node.looked_up_at, node.num_matching = lookup, node.depth, count
    for i in range(count):
        scratch.matches[node.first_match + i].sample = i


@inlined
def _start(scratch: DraftScratch, context: TokenIds) -> None:
    """Remove all nodes and create the root, which stands for the end of the context."""
    node = scratch.nodes[0]
    scratch.num_open, scratch.num_opened = 0, 0
    node.token, node.token_before = context[-1], context[-2] if len(context) > 1 else NO_TOKEN
    node.depth, node.product, node.first_match, node.follows_prediction, node.proposal_node = (
        0,
        1.0,
        0,
        1,
        PROPOSAL_ROOT,
    )
    _set_matches(scratch, node, 0)


@inlined
def _add_node(scratch: DraftScratch, row: DraftRow, entry: OpenCandidate) -> None:
    params, out, nodes, matches = row.params, row.draft, scratch.nodes, scratch.matches
    size, token = out.size, entry.token
    last, node, parent = nodes[size], nodes[size + 1], nodes[entry.parent + 1]
    out.tokens[size], out.parents[size], out.probabilities[size] = token, entry.parent, entry.probability
    out.size = size + 1
    node.token, node.token_before, node.depth, node.product = token, parent.token, parent.depth + 1, entry.product
    node.lookup, node.looked_up_at = parent.lookup, parent.looked_up_at
    node.follows_prediction = int(
        parent.follows_prediction == 1 and predicted_token(params, row.state.prediction, parent.depth) == token
    )
    node.proposal_node = child_of(scratch.candidates.proposals, parent.proposal_node, token)
    # The matches that agree with a chain are replaced: those that agreed before are not needed any more.
    node.first_match = last.first_match + last.num_matching if out.is_tree == 1 else 0
    kept = 0
    for i in range(parent.num_matching):
        match = matches[parent.first_match + i]
        matches[node.first_match + kept].sample = match.sample
        kept += match.next_token == token
    node.num_matching = kept


@kernel
def _look_up_again(scratch: DraftScratch, lookup: int, inputs: DraftInputs, out: DraftRecord) -> None:
    """Look up the last tokens of a draft in all texts, so that the draft can continue from new matches.

    ``lookup`` is the number of this lookup in the draft. Lookup MAX_FURTHER_LOOKUPS searches nothing and finds nothing.
    """
    node, samples, text = scratch.nodes[out.size], scratch.samples[lookup], scratch.texts[lookup - 1]
    samples.num_levels, token = 0, out.size - 1
    if lookup < MAX_FURTHER_LOOKUPS:
        context = inputs.texts.context
        kept = min(len(context), CONTINUED_CONTEXT)
        length = kept + node.depth
        text[:kept] = context[len(context) - kept :]
        for place in range(length - 1, kept - 1, -1):
            text[place] = out.tokens[token]
            token = int(np.int64(out.parents[token]))
        scratch.lengths[lookup - 1] = length
        least = max(inputs.min_length, _MIN_CONTINUED_MATCH)
        sample_matches(inputs.snapshot, scratch.lookups, text[:length], inputs.max_length, least, samples)
    _set_matches(scratch, node, lookup)


@kernel
def grow_draft(scratch: DraftScratch, row: DraftRow, inputs: DraftInputs, resumed: bool) -> None:
    """Build a draft: add the most probable candidate token until the next one would cost more than it gains.

    A candidate's gain is the probability that it and all draft tokens before it are accepted; it never exceeds the
    gain of its parent. Tokens are added in decreasing order of gain, so no other tree of the same size has more
    expected accepted tokens. A chain has one candidate after each token, the most probable one. O(limit * samples).

    The best candidate after every node is stored, however improbable, so that the acceptance model learns its outcome.
    Otherwise a token with too low an estimate would never be drafted, and the estimate would never be corrected.

    ``scratch.samples[0]`` are the matches of the context. If they were ``resumed``, i.e. saved by the last step, the
    function returns as soon as a further lookup is needed, and the caller starts again with a search for the context.
    """
    params, prediction, scored, out = row.params, row.state.prediction, row.state.scored, row.draft
    candidates, is_tree = scratch.candidates, out.is_tree == 1
    most, most_recycled, most_lookups = CHAIN_CANDIDATES, CHAIN_RECYCLED, MAX_FURTHER_LOOKUPS
    if is_tree:
        most, most_recycled, most_lookups = MAX_VOTED_CANDIDATES, MAX_RECYCLED_CANDIDATES, _TREE_LOOKUPS
    if params.no_lookup == 1:
        most_lookups = 0
    error, always_matched, num_lookups = error_bucket(scored), prediction.has_differed == 0, 0
    _start(scratch, inputs.texts.context)
    while True:
        node = scratch.nodes[out.size]
        depth, samples = node.depth, scratch.samples[node.lookup]
        enter_node(candidates.cached_sample, candidates.position_noise, out, out.size - 1, depth)
        predicted = predicted_token(params, prediction, depth) if node.follows_prediction == 1 else NO_TOKEN
        at = Position(
            depth=depth,
            since_lookup=depth - node.looked_up_at,
            last_token=node.token,
            token_before_last=node.token_before,
            proposal_node=node.proposal_node,
            temperature_bucket=params.temperature_bucket,
            predicted=predicted,
            prediction_match_length=prediction.match_length + depth,
            always_matched=always_matched,
            error_bucket=error,
            prompt_length=params.prompt_length,
        )
        texts = _texts_of(scratch, inputs.texts, node.lookup)
        matches = scratch.matches[node.first_match : node.first_match + node.num_matching]
        size = collect_candidates(texts, samples, matches, at, most, most_recycled, candidates)
        may_look_up = num_lookups < most_lookups and out.size < params.limit and candidates.cached_sample.token < 0
        if may_look_up and _needs_lookup(candidates.votes, at, len(matches), size, is_tree):
            if resumed:
                return
            num_lookups += 1
            _look_up_again(scratch, num_lookups, inputs, out)
            continue
        score_candidates(samples, size, at, inputs.model, candidates)
        best, cost = _most_probable(candidates, size), cost_of_token(params, out.size)
        node.best = NO_TOKEN
        for i in range(0 if is_tree else best, size if is_tree else min(best + 1, size)):
            product = node.product * candidates.probabilities[i]
            is_hopeful = product >= 0.5 * cost
            if is_hopeful or i == best:
                opened = _open(scratch, i, out.size - 1, product, is_hopeful)
                if i == best:
                    node.best = opened
        if scratch.num_open == 0:
            break
        entry = _pop(scratch)
        pays = out.size < params.limit and entry.product >= cost
        record_candidate(scored, entry, scratch.nodes[entry.parent + 1].depth, pays)
        if not pays:
            break
        if out.size == 0:
            set_source(candidates, best, samples, matches, predicted, out)
        _add_node(scratch, row, entry)
    # Store the candidates that were left out after the nodes, so that the stored draft tokens have the nodes' numbers.
    for number in range(0 if is_tree else out.size, out.size + 1):
        node = scratch.nodes[number]
        if node.best != NO_TOKEN:
            record_candidate(scored, scratch.opened[node.best], node.depth, False)
