"""What is said of a draft is what the drafter did: its tokens, its chances, its places and why it ended."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ssd.drafting.acceptance import KNOTS, KNOTS_PER_UNIT
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import DraftRequest
from ssd.drafting.seen import OWN_TEXT, Position, Seen, path_to, see
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot
from tests.reference import acceptance as slow
from tests.reference import drafting as reference
from tests.test_acceptance import PRICES, asked_of, levels_of
from tests.test_search import contexts, sequences

indexes = st.builds(reference.make_snapshot, st.lists(sequences, max_size=4))


def request_of(snapshot: Snapshot, context: list[int], limit: int, tree: bool, prompt_length: int = 0) -> DraftRequest:
    return DraftRequest("a", np.array(context, np.int32), prompt_length, snapshot, limit, tree=tree)


def votes_by_hand(seen: Seen, position: Position) -> dict[int, float]:
    """Votes of the places that are said to agree."""
    lookup = seen.lookups[position.lookup]
    passed = position.depth - lookup.depth
    found: dict[int, float] = {}
    for number in position.agreeing_places:
        place = lookup.places[number]
        if len(place.goes_on) > passed:
            found[place.goes_on[passed]] = found.get(place.goes_on[passed], 0.0) + place.weight
    return found


@given(indexes, contexts, st.integers(1, 12), st.sampled_from(PRICES), st.booleans(), st.integers(0, 9))
@settings(max_examples=120)
def test_what_is_said_is_what_is_drafted(
    snapshot: Snapshot, context: list[int], limit: int, price: float, tree: bool, prompt_length: int
) -> None:
    assume(context)
    request = request_of(snapshot, context, limit, tree, prompt_length)
    seen = see(SuffixDrafter(recycling=False), request, price)
    alone = request_of(snapshot, context, limit, tree, prompt_length)
    alone.prices = np.array([price])
    draft = SuffixDrafter().propose([alone])[0]
    assert seen.draft.token_ids.tolist() == draft.token_ids.tolist()
    assert seen.draft.parents_of_all() == draft.parents_of_all()
    assert (seen.draft.source, seen.draft.match_length) == (draft.source, draft.match_length)
    assert [position.after for position in seen.positions] == list(range(-1, len(draft.token_ids)))
    taken = {
        candidate.node: candidate
        for position in seen.positions
        for candidate in position.candidates
        if candidate.node is not None
    }
    assert sorted(taken) == list(range(len(draft.token_ids)))
    if len(draft.token_ids):
        assert draft.probabilities is not None
        chances, estimates = draft.chances().tolist(), draft.probabilities.tolist()
        assert [taken[node].token_id for node in sorted(taken)] == draft.token_ids.tolist()
        assert [taken[node].chance for node in sorted(taken)] == estimates
        assert [taken[node].product for node in sorted(taken)] == pytest.approx(chances)
    left = seen.best_left_out()
    if seen.ended == "limit":
        assert len(draft.token_ids) == limit
    elif seen.ended == "price":
        assert left is not None
        assert left.product < price
    else:
        assert left is None
    for position in seen.positions:
        by_hand = votes_by_hand(seen, position)
        for candidate in position.candidates:
            assert sum(candidate.own_votes) + sum(candidate.index_votes) == pytest.approx(by_hand[candidate.token_id])
        assert len(position.candidates) == min(len(by_hand), 12 if tree else 4)


@given(indexes, contexts, st.integers(1, 9), st.sampled_from(PRICES), st.booleans())
@settings(max_examples=60)
def test_places_and_chances_are_those_of_the_slow_twin(
    snapshot: Snapshot, context: list[int], limit: int, price: float, tree: bool
) -> None:
    assume(context)
    levels = levels_of(snapshot, context, limit + 1)
    seen = see(SuffixDrafter(recycling=False), request_of(snapshot, context, limit, tree), price)
    first = seen.lookups[0]
    assert list(first.lengths) == [length for length, _ in levels]
    below: set[tuple[int, int, int]] = set()
    for level, (length, evidence) in enumerate(levels):
        found = {where for _, where, _ in evidence} - below
        below |= found
        said = {
            (1, 0, place.position) if place.segment == OWN_TEXT else (0, place.segment, place.position)
            for place in first.places
            if place.level == level
        }
        assert said <= found
        assert sum(place.weight for place in first.places if place.level == level) == pytest.approx(len(found))
        for place in first.places:
            if place.level == level:
                text = context if place.segment == OWN_TEXT else reference.texts(snapshot)[place.segment]
                assert text[place.position - length : place.position] == context[-length:]
    asked, model = asked_of(snapshot, context), slow.SlowModel()
    if any(place.weight != 1.0 for place in first.places):
        return  # sampled
    for position in seen.positions:
        if position.lookup != 0 or not position.candidates:
            continue
        path = [int(seen.draft.token_ids[node]) for node in path_to(position.after, seen.draft)]
        expected = slow.candidates(levels, asked, path, model)
        for candidate in position.candidates:
            assert candidate.chance == pytest.approx(expected[candidate.token_id][0], rel=1e-9)


def test_views_add_up_to_the_chance_and_what_was_learned_is_used() -> None:
    text = [1, 2, 3, 4, 5, 6]
    snapshot, learned = reference.make_snapshot([[*text, SEPARATOR]]), LearnedState()
    drafter = SuffixDrafter(recycling=False)
    request = request_of(snapshot, text[:3], 2, False)
    request.learned = learned
    before = see(drafter, request, 0.1)
    for number in range(60):  # what stands there never comes
        for context in (text[:3], [*text[:3], 9, 9]):
            drafter.propose([DraftRequest(str(number), np.array(context, np.int32), 0, snapshot, 2, learned=learned)])
        drafter.finish(str(number))
    num_learned = drafter.model_of(learned).num_learned
    after = see(drafter, request, 0.001)
    assert drafter.model_of(learned).num_learned == num_learned > 50
    assert after.positions[0].candidates[0].chance < before.positions[0].candidates[0].chance
    candidate = before.positions[0].candidates[0]
    odds = sum(view.weight * np.log(view.chance / (1 - view.chance)) for view in candidate.views)
    at_knots = (np.arange(KNOTS) - (KNOTS - 1) // 2) / KNOTS_PER_UNIT
    assert candidate.chance == pytest.approx(np.interp(odds, at_knots, 1 / (1 + np.exp(-at_knots))))
    assert {"index", "this token", "both tokens"} <= {view.name for view in candidate.views}
