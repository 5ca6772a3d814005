"""The serving loop: every request ends once, counts are of emitted tokens, failures of the cache change nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence as Rows
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exactness import OracleDrafter, RandomDrafter
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import Draft, DraftRequest, make_drafter
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import EMPTY_DRAFT, Drafter
from ssd.engine import Engine, FinishReason, Request
from ssd.engine.metrics import Histogram
from ssd.errors import ContextTooLong, EngineStopped, QueueFull, RequestError
from ssd.model.loading.load_target import open_target
from ssd.retrieval.cache import CacheSet
from tests.fixed_times import measure_asking
from tests.models import VOCAB, tiny_model
from tests.reference.target import greedy_decode
from tests.sharing_replica import eventually
from tests.whole_answers import finish_all, tokens_of

MODEL = tiny_model()
PLAIN_MODEL = tiny_model()  # the same weights, never driven by an engine
EOS = 2
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
FINGERPRINT = "0" * 32


def make_engine(drafter: Drafter | None = None, *, slots: int = 3, caches: CacheSet | None = None, k: int = 4,
                eos: int = EOS, **config: Any) -> Engine:  # fmt: skip
    target = open_target(MODEL, num_slots=slots, max_length=96, max_draft_tokens=k)
    draft = DraftConfig(num_speculative_tokens=k)
    return Engine(
        target,
        drafter=drafter or make_drafter("ssd", draft),
        caches=caches,
        config=EngineConfig(max_num_seqs=slots, **config),
        draft=draft,
        eos_token_ids=[eos],
    )


def prompt(seed: int, length: int = 9) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCAB, length).tolist())


def test_requests_are_answered_while_the_kernels_that_draft_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, warm_up = threading.Event(), SuffixDrafter.warm_up
    asked: list[str] = []

    def wait_and_warm_up(drafter: SuffixDrafter) -> None:
        assert compiled.wait(60)
        warm_up(drafter)

    def ask(drafter: SuffixDrafter, rows: Any, groups: Any) -> None:
        asked.extend(drafter._kept)
        draft(drafter, rows, groups)

    draft = SuffixDrafter.draft_groups
    monkeypatch.setattr(SuffixDrafter, "warm_up", wait_and_warm_up)
    monkeypatch.setattr(SuffixDrafter, "draft_groups", ask)
    engine = make_engine()
    engine.warm_up(patience_s=0.0)
    said = {}
    for name in ("before", "after"):
        assert engine.is_drafting == (name == "after")
        engine.submit(Request(request_id=name, prompt_token_ids=prompt(1), sampling=GREEDY))
        said[name] = tokens_of(finish_all(engine)[name])
        assert (name in asked) == (name == "after")
        compiled.set()
        eventually(lambda: engine.is_drafting)
        engine.calibrate()
    assert said["before"] == said["after"]
    assert engine.metrics.drafter_failures == 0


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_of_text_ends_an_output_unless_it_is_ignored(ignore_eos: bool) -> None:
    expected, _ = greedy_decode(PLAIN_MODEL, prompt(3), 12)
    at = next(i for i in range(2, 11) if expected[i] not in expected[:i])
    engine = make_engine(OracleDrafter({prompt(3): expected}, VOCAB), k=8, eos=expected[at])
    engine.submit(Request(request_id="a", prompt_token_ids=prompt(3), sampling=replace(GREEDY, ignore_eos=ignore_eos)))
    outputs = finish_all(engine)["a"]
    assert tokens_of(outputs) == (expected if ignore_eos else expected[: at + 1])
    reason = FinishReason.LENGTH if ignore_eos else FinishReason.STOP
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (reason, None)


def test_a_stop_token_inside_an_accepted_draft_ends_it_there() -> None:
    expected, _ = greedy_decode(PLAIN_MODEL, prompt(3), 12)
    at = next(i for i in range(2, 12) if expected[i] not in expected[:i])
    with CacheSet(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
        engine = make_engine(OracleDrafter({prompt(3): expected}, VOCAB), k=12, caches=caches)
        sampling = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(expected[at],))
        engine.submit(Request(request_id="a", prompt_token_ids=prompt(3), sampling=sampling))
        outputs = finish_all(engine)["a"]
        assert tokens_of(outputs) == expected[: at + 1]
        assert outputs[-1].stop_reason == expected[at]
        assert outputs[-1].stats.num_accepted_tokens <= at + 1
        # Prompt, output and separator, nothing after the stop.
        assert caches.get("default").snapshot().num_tokens == len(prompt(3)) + at + 2


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 15), st.integers(0, 6)), min_size=1, max_size=8))
def test_every_request_ends_once_and_counts_add_up(requests: list[tuple[int, int, int]]) -> None:
    engine = make_engine(RandomDrafter(VOCAB), slots=2)
    for index, (length, max_tokens, cancel_after) in enumerate(requests):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=index)
        engine.submit(Request(request_id=str(index), prompt_token_ids=prompt(index, length), sampling=sampling))
        if cancel_after == 0:
            engine.cancel(str(index))
    outputs = finish_all(engine)
    assert len(outputs) == len(requests)
    for index, (_, max_tokens, cancel_after) in enumerate(requests):
        mine = outputs[str(index)]
        assert [output.finish_reason is not None for output in mine].count(True) == 1 and mine[-1].finish_reason
        assert (mine[-1].finish_reason is FinishReason.CANCELLED) == (cancel_after == 0)
        stats = mine[-1].stats
        assert stats.num_output_tokens == len(tokens_of(mine)) <= max_tokens
        assert stats.num_accepted_tokens <= stats.num_draft_tokens
        if cancel_after:
            assert stats.num_output_tokens <= stats.num_accepted_tokens + stats.num_verify_steps
    assert engine.metrics.num_running == engine.metrics.num_waiting == 0


def one_token(**sampling: Any) -> Request:
    return Request(request_id="a", prompt_token_ids=(5,), sampling=SamplingParams(**sampling))


def test_bad_requests_are_refused_and_nothing_is_queued() -> None:
    engine = make_engine()
    too_long = Request(request_id="a", prompt_token_ids=prompt(0, 96), sampling=GREEDY)
    for bad, error in (
        (too_long, ContextTooLong),
        (Request(request_id="a", prompt_token_ids=prompt(0, 90), sampling=GREEDY), ContextTooLong),
        (Request(request_id="a", prompt_token_ids=()), RequestError),
        (Request(request_id="a", prompt_token_ids=(VOCAB,)), RequestError),
        (Request(request_id="a", prompt_token_ids=(3,), prediction_token_ids=(VOCAB,)), RequestError),
        (one_token(logit_bias=((VOCAB, 1.0),)), RequestError),
        (one_token(stop=("x",)), RequestError),
    ):  # fmt: skip
        with pytest.raises(error):
            engine.submit(bad)
    assert not engine.has_work()


def test_a_full_queue_and_a_stopped_engine_refuse() -> None:
    engine = make_engine(slots=1, max_waiting=1)
    for name in "ab":
        engine.submit(Request(request_id=name, prompt_token_ids=(5,), sampling=GREEDY))
    with pytest.raises(QueueFull):
        engine.submit(Request(request_id="c", prompt_token_ids=(5,), sampling=GREEDY))
    finish_all(engine)
    engine.close()
    with pytest.raises(EngineStopped):
        engine.submit(Request(request_id="d", prompt_token_ids=(5,), sampling=GREEDY))


def test_submitting_from_many_threads_loses_nothing() -> None:
    engine = make_engine()

    def submit(first: int) -> None:
        for index in range(first, first + 10):
            engine.submit(
                Request(request_id=str(index), prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=1))
            )

    threads = [threading.Thread(target=submit, args=(first,)) for first in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(finish_all(engine)) == 30


def test_warm_up_leaves_no_trace_in_the_counts() -> None:
    engine = make_engine()
    engine.warm_up()
    assert engine.metrics.generation_tokens == 0 and not engine.has_work()


# When a request was where, what the histograms make of it, and counts that add up


def count(histogram: Histogram) -> int:
    return sum(histogram.counts)


def test_who_never_had_a_slot_has_no_time_in_one() -> None:
    engine = make_engine()
    engine.submit(Request(request_id="gone", prompt_token_ids=prompt(1)))
    engine.cancel("gone")
    finish_all(engine)
    found = engine.metrics.histograms
    assert (count(found.queue), count(found.prefill), count(found.inference)) == (0, 0, 0)
    assert count(found.generation_tokens) == 1


def test_a_number_is_counted_at_the_first_bound_it_is_not_above() -> None:
    draw = random.Random(3)
    histogram = Histogram((1, 2, 5))
    values = [draw.choice([0.5, 1, 1.5, 2, 5, 5.1, 99]) for _ in range(200)]
    for value in values:
        histogram.observe(value)
    assert histogram.total == sum(values)
    bounds = (0, 1, 2, 5, 100)
    assert histogram.counts == [sum(low < v <= high for v in values) for low, high in pairwise(bounds)]


@pytest.mark.parametrize("runs_beside_host", [False, True])
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32 - 1))
def test_counts_of_requests_and_of_outputs_add_up(runs_beside_host: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    target = open_target(tiny_model(), num_slots=3, max_length=64, max_draft_tokens=4)
    target.runs_beside_host = runs_beside_host
    draft = DraftConfig(num_speculative_tokens=4)
    with CacheSet(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        config = EngineConfig(max_num_seqs=3)
        engine = Engine(target, drafter=make_drafter("ssd", draft), caches=caches, config=config, draft=draft)
        prompts = random.integers(3, 50, (3, 9))
        for number in range(6):
            sampling = SamplingParams(max_tokens=int(random.integers(3, 30)), temperature=0.0, ignore_eos=True)
            prompt = tuple(prompts[number % 3].tolist())
            engine.submit(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, keeps_steps=True))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
    metrics, ended = engine.metrics, [output.stats for output in outputs if output.finish_reason is not None]
    drafts = [output.draft for output in outputs if output.draft is not None]
    assert metrics.num_accepted_tokens > 0
    for drafted, accepted in (
        (metrics.num_draft_tokens, metrics.num_accepted_tokens),
        (sum(each.num_drafted for each in drafts), sum(each.num_accepted for each in drafts)),
        (sum(stats.num_draft_tokens for stats in ended), sum(sum(s.accepted_by_source.values()) for s in ended)),
        tuple(np.sum([step for stats in ended for step in stats.steps or ()], axis=0).tolist()),
        (sum(c.num_draft_tokens for c in metrics.by_source.values()), sum(metrics.accepted_per_position)),
    ):
        assert (drafted, accepted) == (metrics.num_draft_tokens, metrics.num_accepted_tokens)
    assert metrics.num_verify_steps == len(drafts) == sum(stats.num_verify_steps for stats in ended)
    assert metrics.generation_tokens == sum(len(output.token_ids) for output in outputs)


# Whom the engine asks for drafts, and what it makes of them before it verifies them

PROMPT = (1, 2, 3, 4, 5)


class Knowing:
    """Knows what will be said, and gives it so much of a chance."""

    def __init__(self, said: list[int], chance: float | None) -> None:
        self.said, self.chance = said, chance

    def propose(self, requests: Rows[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            at = len(request.context) - len(PROMPT)
            tokens = np.array(self.said[at : at + min(4, request.limit)], np.int32)
            drafts.append(
                Draft(tokens, probabilities=None if self.chance is None else np.full(len(tokens), self.chance))
            )
        return drafts

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        assert num_accepted == len(draft.token_ids)

    def finish(self, request_id: str) -> None:
        return


def outputs_of(drafter: Drafter) -> list[list[int]]:
    """Tokens by step."""
    engine = make_engine(drafter, slots=1)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    engine.submit(Request(request_id="a", prompt_token_ids=PROMPT, sampling=sampling))
    steps = []
    while engine.has_work():
        steps.append([token for output in engine.step() for token in output.token_ids])
    return steps


@pytest.mark.parametrize(("chance", "is_sure"), [(0.95, True), (0.8, False), (None, True)])
def test_only_what_is_almost_certain_may_delay_the_first_token(chance: float | None, is_sure: bool) -> None:
    said = [token for step in outputs_of(make_drafter("none", DraftConfig())) for token in step]
    steps = outputs_of(Knowing(said, chance))
    assert [token for step in steps for token in step] == said
    assert len(steps[0]) == (5 if is_sure else 1)
    assert len(steps[1]) == 5, "whoever has seen the first token waits no longer for it"


class Nothing:
    """Never has a draft, and takes its time."""

    def __init__(self) -> None:
        self.num_asked = 0

    def propose(self, requests: Rows[DraftRequest]) -> list[Draft]:
        assert requests
        self.num_asked += len(requests)
        time.sleep(2e-3 * len(requests))
        return [EMPTY_DRAFT] * len(requests)

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        assert not len(draft.token_ids) and num_accepted == 0

    def finish(self, request_id: str) -> None:
        return


def test_the_engine_asks_a_slow_drafter_less_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_asking(monkeypatch)
    drafter = Nothing()
    texts = []
    for k in (4, 0):
        engine = make_engine(drafter, slots=4, k=k)
        for number in range(4):
            sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            engine.submit(Request(request_id=str(number), prompt_token_ids=prompt(number, 5), sampling=sampling))
        texts.append({name: tokens_of(outputs) for name, outputs in finish_all(engine).items()})
    assert texts[0] == texts[1] and all(len(text) == 40 for text in texts[0].values())
    assert 4 * 4 <= drafter.num_asked < 4 * 40


def test_what_was_distrusted_is_tried_again_where_prices_left_no_draft() -> None:
    engine = make_engine(slots=1)
    shares = engine._proposals._kept_shares
    for _ in range(50):
        shares.observe(1.0, 1.0, 0)
    before = shares.share(1.0)
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
    engine.submit(Request(request_id="a", prompt_token_ids=PROMPT, sampling=sampling))
    finish_all(engine)
    assert shares.share(1.0) > before
