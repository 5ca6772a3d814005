"""From candidates to a draft: a chain of the most probable."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import Int64s, kernel
from ssd.compiled.records import Float64, Int64, Record
from ssd.drafting.suffix.acceptance import Model
from ssd.drafting.suffix.ask import Ask, name_source, predicted_token, price_of
from ssd.drafting.suffix.carry_on import wants_places
from ssd.drafting.suffix.draft_record import DraftRecord
from ssd.drafting.suffix.gather import MAX_SAMPLES, NOTHING, Evidence, Texts, num_samples, token_before
from ssd.drafting.suffix.judge import Candidates, Position, judge
from ssd.drafting.suffix.keyed import begin_node
from ssd.drafting.suffix.learn import JudgedDraft, error_bucket, keep_judged
from ssd.drafting.suffix.offered import ROOT, child_of
from ssd.drafting.suffix.prediction import PredictionPlace
from ssd.drafting.suffix.seek import seek

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
    ask: Ask,
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
    for depth in range(begin, ask.limit + 1):
        begin_node(found.keyed, found.foreseen, out, depth - 1, depth)
        predicted = predicted_token(ask, prediction, depth) if follows else NOTHING
        at = Position(
            depth=depth,
            passed=depth - begin,
            before=before,
            earlier=earlier,
            offered=offered,
            warmth=ask.warmth,
            predicted=predicted,
            agreed=prediction.agreed + depth,
            was_right=was_right,
            error_bucket=error,
            prompt_length=ask.prompt_length,
        )
        looks_up = may_look_up and depth < ask.limit and found.keyed.token < 0
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
        pays = depth < ask.limit and product >= price_of(ask, depth)
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
