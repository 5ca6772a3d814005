"""The serving loop: every request ends once, counts are of emitted tokens, failures of the cache change nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exactness import OracleDrafter, RandomDrafter
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import Drafter
from ssd.engine import Engine, FinishReason, Request
from ssd.errors import ContextTooLong, EngineStopped, QueueFull, RequestError
from ssd.model.loading.load_target import open_target
from ssd.retrieval.cache import CacheSet
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


def test_a_prediction_saves_steps_and_changes_nothing() -> None:
    expected, _ = greedy_decode(PLAIN_MODEL, prompt(1), 40)
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    edited = [*expected[:15], 3, *expected[16:25], *expected[28:]]  # what was expected differs in two places
    steps = {}
    for name, prediction in (("none", []), ("right", expected), ("edited", edited), ("wrong", expected[::-1])):
        engine = make_engine(k=8)
        engine.submit(
            Request(
                request_id=name, prompt_token_ids=prompt(1), sampling=sampling, namespace=None,
                prediction_token_ids=tuple(prediction),
            )
        )  # fmt: skip
        outputs = finish_all(engine)[name]
        assert tokens_of(outputs) == expected
        steps[name] = outputs[-1].stats.num_verify_steps
    assert steps["right"] < steps["edited"] < steps["none"]
    with pytest.raises(RequestError, match="prediction"):
        make_engine().submit(Request(request_id="x", prompt_token_ids=(3,), prediction_token_ids=(VOCAB,)))


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
