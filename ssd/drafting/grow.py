"""From candidates to a draft: a chain of the most probable, or a tree grown best first.

Where a draft's places have ended, what it ends with is looked up again: it may stand elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import numpy as np

from ssd.compiled.addresses import Float64, Int64, Int64s, Record, TokenIds, inlined, kernel
from ssd.drafting.acceptance import INPUTS, Model
from ssd.drafting.draft_records import MAX_DRAFT, DraftParams, DraftRecord, cost_of_token
from ssd.drafting.foreseen import begin_node
from ssd.drafting.judge import Candidates, JudgedDraft, Position, error_bucket, judge, keep_judged, name_source, seek
from ssd.drafting.lookup import (
    EVIDENCE_BYTES,
    MAX_SAMPLES,
    NOTHING,
    Evidence,
    LookupScratch,
    Texts,
    evidence_at,
    look_up,
    next_token,
    num_samples,
    token_before,
)
from ssd.drafting.offered import ROOT, PredictionPlace, child_of, predicted_token
from ssd.drafting.vote import MAX_CANDIDATES, MAX_RECYCLED, MAX_VOTED
from ssd.retrieval.snapshot import SnapshotRecord

CONTINUED_CONTEXT: Final = 4096
"""Tokens of a context that are looked at where a draft is carried on past the end of its sources."""

LEAST_CONTINUED: Final = 4
"""Shorter matches do not carry on a draft whose sources have ended: they mostly begin something else."""

_LEAST_NEW: Final = 2
"""Tokens that no place said, before it is looked whether some place says all of them."""


@inlined
def wants_places(texts: Texts, evidence: Evidence, alive: Int64s, num_alive: int, passed: int, predicted: int) -> bool:
    """Whether a draft is worth a lookup of what it ends with, before it goes on with what no place says.

    ``alive[:num_alive]`` : samples that agree with it; ``passed`` : tokens since they were looked up. ``predicted`` :
    what the client's prediction says, which is followed as it is. O(samples).
    """
    if passed == 0 or predicted >= 0:
        return False
    for i in range(num_alive):
        if next_token(evidence, alive[i], passed, texts) >= 0:
            return False
    return num_alive > 0 or passed >= _LEAST_NEW


@inlined
def begin_text(context: TokenIds, text: TokenIds) -> int:
    """Copy the end of a context into ``text``, int32[CONTINUED_CONTEXT + n]: how many tokens."""
    kept = min(len(context), CONTINUED_CONTEXT)
    text[:kept] = context[len(context) - kept :]
    return int(np.int64(kept))


CHAIN_CANDIDATES: Final = 4
"""Tokens judged at a position: the best of them is hardly ever one with fewer votes."""

CHAIN_RECYCLED: Final = 2
"""Of the target's own candidates beside them."""


class ChainScratch(Record):
    """Scratch memory. ``alive`` : samples that agree with the draft.

    Where a chain ended because nothing was found: ``product`` : the chance that all of it is accepted. ``follows`` :
    whether the prediction agrees with it. ``offered`` : the node of the forest that it is at, NOTHING for none.
    """

    alive: Annotated[Int64s, np.int64, MAX_SAMPLES]
    product: Float64
    follows: Int64
    offered: Int64


@kernel
def chain(
    texts: Texts,
    evidence: Evidence,
    begin: int,
    may_look_up: bool,
    params: DraftParams,
    prediction: PredictionPlace,
    model: Model,
    found: Candidates,
    space: ChainScratch,
    judged: JudgedDraft,
    out: DraftRecord,
) -> bool:
    """Draft the most probable token while the chance that all of the draft is accepted is worth the next one's price.

    ``begin`` : tokens of ``out`` that are there already and that ``texts.context`` ends with. Returns whether it ended
    because nothing was found to go on with, or, where it ``may_look_up`` what it ends with, no place that says so.
    """
    alive, count = space.alive, num_samples(evidence)
    for i in range(count):
        alive[i] = i
    follows = begin == 0 or space.follows == 1
    product = 1.0 if begin == 0 else space.product
    before, earlier = int(np.int64(texts.context[-1])), token_before(texts)
    offered = ROOT if begin == 0 else space.offered
    error, votes, was_right = error_bucket(judged), found.votes, prediction.was_wrong == 0
    for depth in range(begin, params.limit + 1):
        begin_node(found.keyed, found.foreseen, out, depth - 1, depth)
        predicted = predicted_token(params, prediction, depth) if follows else NOTHING
        at = Position(
            depth=depth,
            passed=depth - begin,
            before=before,
            earlier=earlier,
            offered=offered,
            temperature_bucket=params.temperature_bucket,
            predicted=predicted,
            agreed=prediction.agreed + depth,
            was_right=was_right,
            error_bucket=error,
            prompt_length=params.prompt_length,
        )
        looks_up = may_look_up and depth < params.limit and found.keyed.token < 0
        if looks_up and wants_places(texts, evidence, alive, count, at.passed, predicted):
            space.product, space.follows, space.offered = product, int(follows), offered
            return True
        size = seek(texts, evidence, alive, count, at, CHAIN_CANDIDATES, CHAIN_RECYCLED, found)
        judge(evidence, size, at, model, found)
        if size == 0:
            space.product, space.follows, space.offered = product, int(follows), offered
            return True
        best = 0
        for row in range(1, size):
            if found.chances[row] > found.chances[best]:
                best = row
        token, chance = votes.tokens[best], found.chances[best]
        product *= chance
        pays = depth < params.limit and product >= cost_of_token(params, depth)
        # The first one that is left out is learned from too: it may have been worth its price.
        keep_judged(judged, token, depth - 1, depth, found.sets[best], found.inputs[best], pays)
        if not pays:
            return False
        if depth == 0:
            name_source(found, best, evidence, predicted, out)
        before, earlier = token, before
        out.tokens[depth], out.probabilities[depth] = token, chance
        out.size = depth + 1
        follows = follows and predicted == token
        kept = 0
        for i in range(count):
            alive[kept] = alive[i]
            kept += votes.nexts[i] == token
        count, offered = kept, child_of(found.forest, offered, token)
    return False


_MOST_OPEN: Final = MAX_CANDIDATES * (MAX_DRAFT + 1)
_KEPT: Final = -1

MOST_CARRIED: Final = 2
"""Places of a tree that are looked up again, because all that led to them has ended."""


class Node(Record):
    """A drafted token.

    ``depth`` : draft tokens before it. ``lookup`` : which one its samples come from, 0 for that of the context;
    ``looked_up_at`` : draft tokens before that. ``first``, ``num_alive`` : the samples that agree with the path to it,
    where in ``alive`` they begin and how many they are. ``follows`` : whether the prediction agrees with that path.
    ``offered`` : the node of the forest that the path leads to, NOTHING for none. ``best`` : the most probable
    candidate after it: its number, NOTHING where there is none.
    """

    depth: Int64
    lookup: Int64
    looked_up_at: Int64
    first: Int64
    num_alive: Int64
    follows: Int64
    offered: Int64
    best: Int64


class OpenCandidate(Record):
    """A candidate for the tree.

    ``parent`` : the node before it, -1 at the context's end. ``weight_set``, ``inputs`` : what it was judged by; the
    first is _KEPT once that is kept. ``chance`` : of it, once those before it are accepted; ``product`` : of all these.
    """

    parent: Int64
    token: Int64
    weight_set: Int64
    inputs: Annotated[Int64s, np.int64, INPUTS]
    product: Float64
    chance: Float64


class TreeScratch(Record):
    """Scratch memory.

    ``alive`` : samples that agree with the path to a node, those of every node one after another. ``heap`` : numbers of
    the candidates that may enter the tree, the greatest product first. ``texts`` : of each further lookup the text.
    ``lengths`` : how long that is.
    """

    alive: Annotated[Int64s, np.int64, (MAX_DRAFT + 2) * MAX_SAMPLES]
    nodes: Annotated[Sequence[Node], Node, MAX_DRAFT]
    opened: Annotated[Sequence[OpenCandidate], OpenCandidate, _MOST_OPEN]
    heap: Annotated[Int64s, np.int64, _MOST_OPEN]
    texts: Annotated[TokenIds, np.int32, (MOST_CARRIED, CONTINUED_CONTEXT + MAX_DRAFT)]
    lengths: Annotated[Int64s, np.int64, MOST_CARRIED]


class FurtherLookups(NamedTuple):
    """What further lookups of a tree use.

    ``evidences_at`` : address of Evidence[MOST_CARRIED]. Matches have ``min_length`` to ``max_length`` tokens.
    """

    snapshot: SnapshotRecord
    lookups: LookupScratch
    evidences_at: int
    max_length: int
    min_length: int


@inlined
def _sift_up(space: TreeScratch, place: int) -> None:
    heap, opened = space.heap, space.opened
    while place > 0 and opened[heap[place]].product > opened[heap[(place - 1) // 2]].product:
        above = (place - 1) // 2
        heap[place], heap[above] = heap[above], heap[place]
        place = above


@inlined
def _pop(space: TreeScratch, size: int) -> int:
    """Take the first of a heap of ``size``."""
    heap, opened = space.heap, space.opened
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
def _keep_once(space: TreeScratch, number: int, judged: JudgedDraft, drafted: bool) -> None:
    """Keep what a candidate was judged by."""
    candidate = space.opened[number]
    if candidate.weight_set != _KEPT:
        parent = candidate.parent
        depth = space.nodes[parent].depth + 1 if parent >= 0 else 0
        keep_judged(judged, candidate.token, parent, depth, candidate.weight_set, candidate.inputs, drafted)
        candidate.weight_set = _KEPT


@inlined
def _texts_of(space: TreeScratch, texts: Texts, lookup: int) -> Texts:
    """The texts that a lookup's samples lie in."""
    context = texts.context if lookup == 0 else space.texts[lookup - 1][: space.lengths[lookup - 1]]
    return Texts(context, texts.ring, texts.tail_start, texts.tail_stop)


@inlined
def _evidence_of(further: FurtherLookups, evidence: Evidence, lookup: int) -> Evidence:
    """What a lookup found, 0 for that of the context."""
    if lookup == 0:
        return evidence
    return evidence_at(further.evidences_at + EVIDENCE_BYTES * (lookup - 1))


@kernel
def _look_up_again(
    space: TreeScratch, number: int, texts: Texts, node: int, further: FurtherLookups, out: DraftRecord
) -> None:
    """Look up the context and the path to a node."""
    text, depth = space.texts[number], space.nodes[node].depth
    kept = begin_text(texts.context, text)
    for place in range(depth, -1, -1):
        text[kept + place] = out.tokens[node]
        node = out.parents[node]
    space.lengths[number] = kept + depth + 1
    look_up(
        further.snapshot,
        further.lookups,
        text[: kept + depth + 1],
        further.max_length,
        further.min_length,
        evidence_at(further.evidences_at + EVIDENCE_BYTES * number),
    )


@kernel
def grow_tree(
    texts: Texts,
    evidence: Evidence,
    further: FurtherLookups,
    params: DraftParams,
    prediction: PredictionPlace,
    model: Model,
    found: Candidates,
    space: TreeScratch,
    judged: JudgedDraft,
    out: DraftRecord,
) -> None:
    """Add the node that is most probably accepted while that is worth the next one's price: best first.

    A node's chance is the product of those on its path, so none is above its parent's and the order is that of all
    nodes there could be: no tree of as many nodes from these candidates has a greater expected number of accepted
    tokens. The best candidate of every place that was looked at is learned from, however little it seems worth:
    what is never drafted could else never be found to be underrated. Where all places that agreed with a path have
    ended, it is looked up again, of the first MOST_CARRIED paths. O(limit * samples).
    """
    alive, nodes, heap = space.alive, space.nodes, space.heap
    count = num_samples(evidence)
    for i in range(count):
        alive[i] = i
    first, num_nodes, num_open, num_opened, parent, follows, best_of_all = 0, 0, 0, 0, -1, True, NOTHING
    product, depth, offered = 1.0, 0, ROOT
    last = int(np.int64(texts.context[-1]))
    before, earlier = last, token_before(texts)
    error, votes, was_right = error_bucket(judged), found.votes, prediction.was_wrong == 0
    lookup, looked_up_at, num_carried, here, said = 0, 0, 0, evidence, _texts_of(space, texts, 0)
    while True:
        predicted = predicted_token(params, prediction, depth) if follows else NOTHING
        may_look_up = num_carried < MOST_CARRIED and num_nodes < params.limit and params.no_lookup == 0
        passed = depth - looked_up_at
        begin_node(found.keyed, found.foreseen, out, parent, depth)
        may_look_up = may_look_up and found.keyed.token < 0
        if may_look_up and wants_places(said, here, alive[first:], count, passed, predicted):
            _look_up_again(space, num_carried, texts, parent, further, out)
            num_carried += 1
            lookup, looked_up_at, passed = num_carried, depth, 0
            here, said = _evidence_of(further, evidence, lookup), _texts_of(space, texts, lookup)
            count = num_samples(here)
            for i in range(count):
                alive[first + i] = i
            node = nodes[parent]
            node.lookup, node.looked_up_at, node.num_alive = lookup, looked_up_at, count
        at = Position(
            depth=depth,
            passed=passed,
            before=before,
            earlier=earlier,
            offered=offered,
            temperature_bucket=params.temperature_bucket,
            predicted=predicted,
            agreed=prediction.agreed + depth,
            was_right=was_right,
            error_bucket=error,
            prompt_length=params.prompt_length,
        )
        size = seek(said, here, alive[first:], count, at, MAX_VOTED, MAX_RECYCLED, found)
        judge(here, size, at, model, found)
        best = 0
        for row in range(1, size):
            if found.chances[row] > found.chances[best]:
                best = row
        if parent < 0 and size > 0:
            name_source(found, best, evidence, predicted, out)
        best_here = NOTHING
        for row in range(size):
            chance = found.chances[row]
            is_hopeful = product * chance >= 0.5 * cost_of_token(params, num_nodes)
            if not is_hopeful and row != best:
                continue
            entry = space.opened[num_opened]
            entry.parent, entry.token, entry.weight_set = parent, votes.tokens[row], found.sets[row]
            for i in range(INPUTS):
                entry.inputs[i] = found.inputs[row, i]
            entry.product, entry.chance = product * chance, chance
            if row == best:
                best_here = num_opened
            if is_hopeful:
                heap[num_open] = num_opened
                _sift_up(space, num_open)
                num_open += 1
            num_opened += 1
        if parent >= 0:
            nodes[parent].best = best_here
        else:
            best_of_all = best_here
        if num_open == 0:
            break
        taken = _pop(space, num_open)
        num_open -= 1
        entry = space.opened[taken]
        product, parent = entry.product, entry.parent
        depth = nodes[parent].depth + 1 if parent >= 0 else 0
        pays = num_nodes < params.limit and product >= cost_of_token(params, num_nodes)
        _keep_once(space, taken, judged, pays)
        if not pays:
            break
        before, earlier = entry.token, int(out.tokens[parent]) if parent >= 0 else last
        out.tokens[num_nodes], out.probabilities[num_nodes] = before, entry.chance
        out.parents[num_nodes] = parent
        out.size = num_nodes + 1
        # Its samples are those of its parent that go on with it.
        lookup = nodes[parent].lookup if parent >= 0 else 0
        looked_up_at = nodes[parent].looked_up_at if parent >= 0 else 0
        here, said = _evidence_of(further, evidence, lookup), _texts_of(space, texts, lookup)
        from_first = nodes[parent].first if parent >= 0 else 0
        from_count = nodes[parent].num_alive if parent >= 0 else num_samples(evidence)
        first = nodes[num_nodes - 1].first + nodes[num_nodes - 1].num_alive if num_nodes > 0 else from_count
        count = 0
        for i in range(from_count):
            alive[first + count] = alive[from_first + i]
            count += next_token(here, alive[from_first + i], depth - looked_up_at, said) == before
        follows = (parent < 0 or nodes[parent].follows == 1) and predicted_token(params, prediction, depth) == before
        offered = child_of(found.forest, nodes[parent].offered if parent >= 0 else ROOT, before)
        node = nodes[num_nodes]
        node.depth, node.first, node.num_alive, node.follows = depth, first, count, int(follows)
        node.offered, node.lookup, node.looked_up_at = offered, lookup, looked_up_at
        parent = num_nodes
        depth += 1
        num_nodes += 1
    # Those left out come after those drafted: what is kept of a node has the node's number.
    for place in range(-1, num_nodes):
        left_out = nodes[place].best if place >= 0 else best_of_all
        if left_out != NOTHING:
            _keep_once(space, left_out, judged, False)
