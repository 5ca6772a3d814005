"""What running requests say is drafted for each other while they run, and for nobody else, and not after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.siblings.contenders import Cheap
from ssd.compiled.addresses import Int64s, TokenIds, kernel
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting.live_texts import LiveTexts
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.drafting.suffix.drafter import SuffixDrafter
from ssd.drafting.suffix.gather import ENOUGH_SUPPORT, MAX_LEVELS, MAX_SCANNED_SAMPLES
from ssd.drafting.suffix.live import find_live, live_at
from ssd.drafting.suffix.live_memory import LiveMemory
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import open_target
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.snapshot import Snapshot
from tests.models import tiny_model
from tests.reference import acceptance as slow
from tests.reference import drafting as reference
from tests.test_acceptance import asked_of
from tests.test_search import contexts, sequences

Lent = list[tuple[list[int], int]]

FOREIGN = (1 << 31) - 1
live_texts = st.lists(
    st.tuples(st.lists(st.sampled_from([0, 1, 2, FOREIGN, -1]), max_size=30), st.integers(0, 40)), max_size=4
).map(lambda lent: [(text, min(lead, len(text))) for text, lead in lent])
few_snapshots = st.builds(reference.make_snapshot, st.lists(sequences, max_size=2), st.one_of(st.just([]), sequences))


def texts_of(lent: Lent) -> LiveTexts:
    return LiveTexts([np.array(text, np.int32) for text, _ in lent], [lead for _, lead in lent])


@kernel
def _find(live: int, own: int, context: TokenIds, longest: int, positions: Int64s, lengths: Int64s) -> int:
    return find_live(live_at(live), own, context, longest, positions, lengths)


@given(live_texts.filter(bool), st.data(), st.integers(2, 8))
@settings(max_examples=150)
def test_a_lookup_finds_every_place_in_all_texts_but_its_own(lent: Lent, data: Any, longest: int) -> None:
    context = data.draw(st.lists(st.sampled_from([0, 1, 2, FOREIGN]), min_size=longest, max_size=12))
    own = data.draw(st.integers(-1, len(lent) - 1))
    memory, live = LiveMemory(), texts_of(lent)
    memory.write(texts_of([([1] * 50, 0)] * 3))  # what was there before is gone
    at, positions, lengths = memory.write(live), np.zeros(256, np.int64), np.zeros(256, np.int64)
    found = _find(at, own, np.array(context, np.int32), longest, positions, lengths)
    begins = np.cumsum([1, *(len(text) + 1 for text, _ in lent)])
    expected = {}
    for length in range(2, longest + 1):
        for number, place in reference.live_places(lent, context, length):
            if number != own:
                expected[int(begins[number]) + place] = length
    assert positions[:found].tolist() == sorted(expected, reverse=True)
    assert dict(zip(positions[:found].tolist(), lengths[:found].tolist(), strict=True)) == expected


@given(few_snapshots, contexts.filter(bool), live_texts, st.integers(1, 8), st.sampled_from([0.02, 0.2]))
@settings(max_examples=150)
def test_a_chain_weighs_what_running_requests_say_with_all_else(
    snapshot: Snapshot, context: list[int], lent: Lent, limit: int, price: float
) -> None:
    lent = [(text, lead) for text, lead in lent if FOREIGN not in text]
    levels = reference.suffix_levels(
        snapshot, context, 32, 1, limit + 1, most=MAX_LEVELS, enough=int(ENOUGH_SUPPORT), lent=lent
    )
    assume(all(len(found) <= MAX_SCANNED_SAMPLES for _, found in levels))
    own = [([*context], 0)]  # its own text is among them, and is not looked into
    request = DraftRequest("a", np.array(context, np.int32), 0, snapshot, limit, prices=np.array([price]))
    request.live, request.live_number = texts_of([*own, *lent]), 0
    draft, model, product = SuffixDrafter().propose([request])[0], slow.SlowModel(), 1.0
    tokens, asked = draft.token_ids.tolist(), asked_of(snapshot, context)
    for depth in range(len(tokens) + 1):
        if depth and not slow.goes_on(levels, tokens[:depth]):
            return  # looked up again
        found = slow.candidates(levels, asked, tokens[:depth], model)
        best = max((chance for chance, _, _ in found.values()), default=0.0)
        if depth == len(tokens):
            assert not found or depth == limit or product * best < price + 1e-9
            break
        assert draft.probabilities is not None
        assert draft.probabilities[depth] == pytest.approx(best, rel=1e-9)
        assert found[tokens[depth]][0] == pytest.approx(best, rel=1e-9)
        product *= best


def ask(context: Sequence[int], live: LiveTexts | None, number: int = -1, *, tree: bool = False) -> DraftRequest:
    request = DraftRequest(str(number), np.array(context, np.int32), 3, None, 8, prices=np.array([1e-3]), tree=tree)
    request.live, request.live_number = live, number
    return request


@pytest.mark.parametrize("tree", [False, True])
def test_each_is_drafted_what_the_others_have_said_beyond_it(tree: bool) -> None:
    said = [[1, 2, 3, *range(10, 20)], [1, 2, 3, 10, 11, 12, 13], [1, 2, 3]]
    live = texts_of([(text, 3) for text in said])
    drafts = SuffixDrafter().propose([ask(text, live, number, tree=tree) for number, text in enumerate(said)])
    assert [draft.token_ids.tolist() for draft in drafts] == [[], [*range(14, 20)], [*range(10, 18)]]
    assert [draft.source for draft in drafts] == ["none", "live", "live"]


def test_a_prompt_that_all_continue_is_not_drafted_from_each_of_them() -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    live = texts_of([(prompt, 6), ([*prompt, 9], 6)])
    assert len(SuffixDrafter().propose([ask([7, 8, 3, 4], live)])[0].token_ids) == 0
    assert SuffixDrafter().propose([ask([7, 5, 6], live)])[0].token_ids.tolist() == [9]


def test_nothing_is_kept_of_what_is_no_longer_lent() -> None:
    story, drafter = [*range(10, 90)], SuffixDrafter(max_match_length=8)
    for step in range(3):  # long enough for its places to be followed
        draft = drafter.propose([ask(story[: 20 + 8 * step], texts_of([(story, 0)]))])[0]
        assert draft.token_ids.tolist() == story[20 + 8 * step : 28 + 8 * step]
    assert len(drafter.propose([ask(story[:44], None)])[0].token_ids) == 0
    assert len(drafter.propose([ask(story[:45], texts_of([([1, 2], 0)]))])[0].token_ids) == 0


def test_of_very_long_texts_the_ends_are_looked_into() -> None:
    texts = [np.arange(40_000, dtype=np.int32) + 50_000 * number for number in range(3)]
    live, drafter = LiveTexts(texts, [5] * 3), SuffixDrafter()
    assert drafter.propose([ask([139_000, 139_001], live)])[0].token_ids.tolist() == [*range(139_002, 139_010)]
    assert len(drafter.propose([ask([101_000, 101_001], live)])[0].token_ids) == 0


MODEL = tiny_model()
FINGERPRINT = "0" * 32
PROMPT = (5, 6, 7, 8)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.4, ignore_eos=True)


class Told(Cheap):
    """Our drafter at a low price, which notes what each request was lent."""

    def __init__(self, draft: DraftConfig) -> None:
        super().__init__(draft, 0.01)
        self.lent: dict[str, list[list[list[int]]]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""
        for request in requests:
            texts = [] if request.live is None else [text.tolist() for text in request.live.texts]
            if request.live_number >= 0:
                own = texts.pop(request.live_number)
                assert own == request.context.tolist()[len(request.context) - len(own) :]
            self.lent.setdefault(request.request_id, []).append(texts)
        return super().propose(requests)


def make_engine(caches: CacheSet, *, slots: int = 4, limit: int = 4, **more: Any) -> tuple[Engine, Told]:
    draft = DraftConfig(num_speculative_tokens=limit, **more)
    told = Told(draft)
    engine = Engine(
        open_target(MODEL, num_slots=slots, max_length=96, max_draft_tokens=limit),
        drafter=told,
        caches=caches,
        config=EngineConfig(max_num_seqs=slots, coupled_streams=slots),
        draft=draft,
        noise_root=lambda: b"the same",
    )
    return engine, told


def asked(name: str, **more: Any) -> Request:
    return Request(request_id=name, prompt_token_ids=PROMPT, sampling=SAMPLED, **more)


def finish_all(engine: Engine) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            said.setdefault(output.request_id, []).extend(output.token_ids)
    return said


def test_what_is_lent_is_the_output_so_far_of_those_who_may_teach_their_namespace() -> None:
    with CacheSet(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
        engine, told = make_engine(caches)
        for request in (
            asked("a"),
            asked("silent", learn=False),
            asked("other", namespace="other"),
            asked("none", namespace=None),
        ):
            engine.submit(request)
        said = finish_all(engine)["a"]
        assert [*told.lent] == ["a", "silent", "other", "none"]
        assert not any(map(any, (told.lent["a"], told.lent["other"], told.lent["none"])))
        lent = [texts[0] for texts in told.lent["silent"] if texts]
        assert len(lent) > 1 and all(text == [*PROMPT, *said][: len(text)] and len(text) > 4 for text in lent)


@pytest.mark.parametrize("ended", ["cancelled", "finished", "failed"])
def test_nothing_is_lent_of_a_request_that_has_ended(ended: str) -> None:
    with CacheSet(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
        engine, told = make_engine(caches)
        engine.submit(replace(asked("first"), sampling=replace(SAMPLED, max_tokens=3 if ended == "finished" else 40)))
        engine.submit(asked("second"))
        engine.step()
        engine.step()
        assert any(told.lent["second"])
        if ended == "cancelled":
            engine.cancel("first")
        if ended == "failed":
            [first] = [each for each in engine._scheduler.running if each.request.request_id == "first"]
            first.take = None  # type: ignore[method-assign, assignment]
        while not any(output.request_id == "first" and output.finish_reason for output in engine.step()):
            pass
        told.lent.clear()
        finish_all(engine)
        assert told.lent["second"] and not any(told.lent["second"])


def test_one_drafts_what_another_said_a_moment_ago() -> None:
    counts = {}
    for name, more in (("shared", {}), ("not lent", {"learn": False}), ("off", {})):
        with CacheSet(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
            engine, _ = make_engine(caches, live=name != "off")
            greedy = replace(SAMPLED, temperature=0.0)
            engine.submit(replace(asked("first", **more), sampling=greedy))
            for _ in range(12):
                engine.step()
            engine.submit(replace(asked("second"), sampling=greedy))
            finish_all(engine)
            counts[name] = engine.metrics.by_source.get("live")
    assert counts["not lent"] is counts["off"] is None
    assert counts["shared"] is not None and counts["shared"].num_accepted_tokens > 4


@pytest.mark.parametrize("noise", ["seed", "coupled"])
def test_64_samples_of_one_prompt_say_what_they_say_without_drafts(noise: str) -> None:
    said, params = [], replace(SAMPLED, seed=7 if noise == "seed" else None)
    for limit in (0, 4):
        with CacheSet(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
            engine, _ = make_engine(caches, slots=64, limit=limit)
            for number in range(64):
                sample = asked(str(number), choice_index=number, noise_stream=number)
                engine.submit(replace(sample, sampling=params))
            said.append(finish_all(engine))
    assert engine.metrics.by_source["live"].num_draft_tokens > 0
    assert said[0] == said[1]
