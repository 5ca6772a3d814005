"""The acceptance model against its slow twin, as bytes, and what it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ssd.config import CacheConfig
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.drafting.draft_scratch import MAX_LEVELS, MAX_RECYCLED_CANDIDATES, MAX_SCANNED_SAMPLES
from ssd.drafting.grow import CHAIN_CANDIDATES, CHAIN_RECYCLED
from ssd.drafting.lookup import ENOUGH_SUPPORT
from ssd.drafting.protocol import Draft, DraftOutcome, DraftRequest
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot
from tests.reference import acceptance as slow
from tests.reference import drafting as reference
from tests.test_search import sequences


def levels_of(
    snapshot: Snapshot, context: list[int], limit: int, min_length: int = 1
) -> list[tuple[int, reference.Evidence]]:
    """MatchSamples of every occurrence; skips what the fast one samples."""
    levels = reference.suffix_levels(
        snapshot, context, 32, min_length, limit, most=MAX_LEVELS, enough=int(ENOUGH_SUPPORT)
    )
    assume(all(sum(own for _, _, own in found) <= MAX_SCANNED_SAMPLES for _, found in levels))
    return levels


def asked_of(snapshot: Snapshot, context: list[int], **more: Any) -> slow.Asked:
    num_static = sum(segment.start is None for segment in snapshot.segments)
    return slow.Asked(context, num_static=num_static, num_texts=len(snapshot.segments) + 1, **more)


def check_draft(
    draft: Draft, request: DraftRequest, levels: list[tuple[int, reference.Evidence]], known: slow.Asked
) -> None:
    """A chain takes the most probable token while that is worth its price; a tree has the most probable nodes of all.

    What is looked up again, where no place goes on, is not compared.
    """
    assert request.token_costs is not None
    price, limit, model = float(request.token_costs[0]), request.limit, slow.SlowModel()
    tokens = draft.token_ids.tolist()

    def is_known(path: list[int]) -> bool:
        return not path or slow.goes_on(levels, path) or known.choices(path) is not None

    if request.allow_tree:
        products: list[float] = []
        open_paths: list[tuple[float, list[int]]] = [(1.0, [])]
        while open_paths:
            product, path = open_paths.pop()
            if not is_known(path):
                return
            found = slow.candidates(levels, known, path, model, most_recycled=MAX_RECYCLED_CANDIDATES)
            for token, (chance, _, _) in found.items():
                if product * chance >= price and len(path) < limit:
                    products.append(product * chance)
                    open_paths.append((product * chance, [*path, token]))
        chances = [] if draft.probabilities is None else draft.path_probabilities().tolist()
        assert chances == pytest.approx(sorted(products, reverse=True)[:limit], rel=1e-9)
        siblings = list(zip(draft.parents_of_all(), tokens, strict=True))
        assert len(set(siblings)) == len(siblings)
        return
    product = 1.0
    for depth in range(len(tokens) + 1):
        if not is_known(tokens[:depth]):
            return
        voted = slow.candidates(levels, replace(known, successors={}), tokens[:depth], model)
        assume(len(voted) <= CHAIN_CANDIDATES)  # which of more are judged is not the twin's to say
        found = slow.candidates(levels, known, tokens[:depth], model, most_recycled=CHAIN_RECYCLED)
        best = max((chance for chance, _, _ in found.values()), default=0.0)
        if depth == len(tokens):
            assert not found or depth == limit or product * best < price + 1e-9
            return
        assert draft.probabilities is not None
        assert draft.probabilities[depth] == pytest.approx(best, rel=1e-9)
        assert found[tokens[depth]][0] == pytest.approx(best, rel=1e-9)
        product *= best
        assert product >= price - 1e-9


@pytest.mark.parametrize("tree", [False, True])
def test_a_draft_is_carried_on_past_the_end_of_all_it_was_drawn_from(tree: bool) -> None:
    """A long text is stored in pieces that overlap, as the shared log cuts it."""
    snapshot = reference.make_snapshot([[*range(60), SEPARATOR], [*range(40, 100), SEPARATOR]])
    request = DraftRequest(
        "a", np.arange(30, dtype=np.int32), 0, snapshot, 60, token_costs=np.array([1e-6]), allow_tree=tree
    )
    assert sorted(SuffixDrafter().propose([request])[0].token_ids.tolist()) == [*range(30, 90)]


@given(st.lists(sequences, max_size=3), sequences, st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_learning_step_by_step_equals_the_slow_twin(parts: list[list[int]], tail: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    snapshot = reference.make_snapshot(parts, tail)
    text = random.integers(0, 3, 40).tolist()
    fast, model, mean_error = SuffixDrafter(), slow.SlowModel(), 0.0
    judged: list[tuple[int, slow.Views, slow.View]] = []
    length, start = 3, 0
    while length < len(text):
        context = text[:length]
        for depth, (token, views, chosen) in enumerate(judged):
            if start + depth >= length:
                break
            came = text[start + depth] == token
            error = model.learn(views, chosen, came)
            mean_error += int(0.1 * (error * (1 << 20) - mean_error))
            if not came:
                break
        levels = levels_of(snapshot, context, 5)
        request = DraftRequest("a", np.array(context, np.int32), 3, snapshot, 4)
        draft = fast.propose([request])[0]
        asked = asked_of(snapshot, context, prompt_length=3, mean_error=mean_error / (1 << 20))
        judged, start = [], length
        for depth in range(len(draft.token_ids) + 1):
            found = slow.candidates(levels, asked, draft.token_ids[:depth].tolist(), model)
            if not found:
                break
            chances = sorted(chance for chance, _, _ in found.values())
            assume(len(chances) < 2 or chances[-1] > chances[-2] + 1e-9)
            token = max(found, key=lambda token: found[token][0])
            judged.append((token, *found[token][1:]))
            if depth < len(draft.token_ids):
                assert draft.token_ids[depth] == token
                assert draft.probabilities is not None
                assert draft.probabilities[depth] == pytest.approx(found[token][0], rel=1e-9)
        accepted = 0
        while accepted < len(draft.token_ids) and text[length + accepted : length + accepted + 1] == [
            draft.token_ids[accepted]
        ]:
            accepted += 1
        length += accepted + 1


def test_a_published_copy_does_not_change_and_another_drafter_goes_on_from_it() -> None:
    learned, text = LearnedState(), np.tile(np.arange(7, dtype=np.int32), 9)
    first = SuffixDrafter()
    for length in range(7, 47, 4):
        first.propose([DraftRequest("a", text[:length], 7, None, 8, learned=learned)])
    assert [learned.newest] == [None]
    first.finish("a")
    assert [learned.newest] == [None], "a copy that is made so often that requests wait for it"
    first.publish()
    assert learned.newest is not None
    published = learned.newest.to_bytes()
    assert published == first.model_of(learned).to_bytes()
    for length in range(7, 47, 4):
        first.propose([DraftRequest("b", text[:length], 7, None, 8, learned=learned)])
    assert learned.newest.to_bytes() == published != first.model_of(learned).to_bytes()
    first.publish()
    assert learned.newest.to_bytes() == first.model_of(learned).to_bytes()
    assert SuffixDrafter().model_of(learned).to_bytes() == first.model_of(learned).to_bytes()


def test_estimates_come_true_though_the_best_looking_token_is_drafted() -> None:
    """Texts that go on three ways at random: whichever looks best, it comes a third of the time."""
    random = np.random.default_rng(5)
    drafter, late = SuffixDrafter(default_token_cost=0.05), []
    for number in range(300):
        text = np.concatenate([[*range(10, 16), random.integers(3)] for _ in range(8)]).astype(np.int32)
        for length in range(6, len(text), 7):
            draft = drafter.propose([DraftRequest(str(number), text[:length], 6, None, 4)])[0]
            if number >= 150 and len(draft.token_ids):
                assert draft.probabilities is not None
                late.append((float(draft.probabilities[0]), draft.token_ids[0] == text[length]))
        drafter.finish(str(number))
    estimated, came = np.array(late, np.float64).T
    assert len(late) > 500
    assert abs(estimated.mean() - came.mean()) < 0.03


def test_the_last_step_teaches_too() -> None:
    snapshot = reference.make_snapshot([[*range(100), SEPARATOR]])
    drafter = SuffixDrafter(default_token_cost=0.3)
    request = DraftRequest("a", np.arange(4, dtype=np.int32), 4, snapshot, 16)
    draft = drafter.propose([request])[0]
    drafter.observe([DraftOutcome("a", draft, 2)])
    drafter.finish("a")
    assert drafter.model_of(None).num_learned == 3  # two that came and the one that did not


def predicting(request_id: str, context: list[int], prediction: list[int], limit: int = 4) -> DraftRequest:
    given = np.array(prediction, np.int32)
    return DraftRequest(request_id, np.array(context, np.int32), 2, None, limit, prediction=given)


EXPECTED = [*range(100, 160)]


@pytest.mark.parametrize(
    ("output", "goes_on"),
    [
        ([], 100),
        ([100, 101, 102], 103),
        ([100, 101, 7, 103], 104),
        ([100, 101, 7, 8, 9, 102, 103], 104),
        ([100, 101, 110, 111], 112),
        ([100, 101, 7, 8, 9], 105),
        (EXPECTED, None),
    ],
    ids=["start", "as predicted", "replaced", "inserted", "left out", "three replaced", "all said"],
)
def test_a_prediction_is_followed_and_found_again_behind_an_edit(output: list[int], goes_on: int | None) -> None:
    drafter = SuffixDrafter()
    for length in range(len(output) + 1):
        draft = drafter.propose([predicting("a", [1, 2, *output[:length]], EXPECTED)])[0]
    if goes_on is None:
        assert len(draft.token_ids) == 0
    else:
        assert draft.token_ids[0] == goes_on
        assert draft.source == "prediction"


def test_a_prediction_in_which_all_tokens_are_the_same_is_bounded_work() -> None:
    drafter = SuffixDrafter()
    same = [5] * 20_000
    for length in (0, 1, 2, 40):
        draft = drafter.propose([predicting("a", [1, 2, *same[:length]], same)])[0]
        assert set(draft.token_ids.tolist()) == {5}
    draft = drafter.propose([predicting("a", [1, 2, *same[:40], 6], same)])[0]
    assert (draft.token_ids.tolist(), draft.source) == ([5] * 4, "prediction")


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 5))
@settings(max_examples=100)
def test_a_fresh_prediction_is_judged_as_the_slow_twin_judges_it(
    prompt: list[int], prediction: list[int], limit: int
) -> None:
    context = [1, *prompt]
    levels = levels_of(reference.make_snapshot([]), context, limit + 1)
    request = DraftRequest(
        "a", np.array(context, np.int32), len(context), None, limit, prediction=np.array(prediction, np.int32)
    )
    draft = SuffixDrafter().propose([request])[0]
    asked, model, follows = slow.Asked(context, len(context), prediction=prediction), slow.SlowModel(), True
    for depth, token in enumerate(draft.token_ids.tolist()):
        found = slow.candidates(levels, asked, draft.token_ids[:depth].tolist(), model, follows)
        if not found:
            return
        assert draft.probabilities is not None
        assert draft.probabilities[depth] == pytest.approx(max(c for c, _, _ in found.values()), rel=1e-9)
        assert found[token][0] == pytest.approx(draft.probabilities[depth], rel=1e-9)
        follows = follows and depth < len(prediction) and prediction[depth] == token


def test_what_a_namespace_learned_is_there_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = CacheConfig(directory=tmp_path)
    text = np.tile(np.arange(7, dtype=np.int32), 9)
    for expected in (0, 20):  # at least
        with CacheManager(config, "0" * 32, inline=True) as caches:
            drafter, other = SuffixDrafter(), caches.get("other").learned
            snapshot, learned = caches.get().snapshot(), caches.get().learned
            assert drafter.model_of(learned).num_learned >= expected
            assert drafter.model_of(other).num_learned == 0
            for length in range(7, 47, 4):
                drafter.propose([DraftRequest("a", text[:length], 7, snapshot, 8, learned=learned)])
            drafter.publish()
    kept = tmp_path / "default" / "learned.bin"
    assert AcceptanceModel.from_bytes(kept.read_bytes()).num_learned >= 40
    kept.write_bytes(kept.read_bytes()[:-1])
    with CacheManager(config, "0" * 32, inline=True) as caches:
        assert SuffixDrafter().model_of(caches.get().learned).num_learned == 0
    assert "A new model is trained" in caplog.text
