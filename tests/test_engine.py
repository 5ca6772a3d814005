"""The serving loop: every request ends once, counts are of emitted tokens, failures of the cache change nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
from ssd.drafting.protocol import Draft, Drafter, DraftRequest
from ssd.engine import Engine, FinishReason, Request, RequestOutput
from ssd.errors import ContextTooLong, EngineStopped, QueueFull, RequestError
from ssd.model.loading.load_target import open_target
from ssd.retrieval.cache import CacheSet
from tests.models import VOCAB, tiny_model
from tests.reference.target import greedy_decode
from tests.sharing_replica import eventually

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


def finish_all(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def prompt(seed: int, length: int = 9) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCAB, length).tolist())


def test_requests_are_answered_while_the_kernels_that_draft_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, warm_up = threading.Event(), SuffixDrafter.warm_up
    asked: list[str] = []

    def wait_and_warm_up(drafter: SuffixDrafter) -> None:
        assert compiled.wait(60)
        warm_up(drafter)

    def ask(drafter: SuffixDrafter, requests: Sequence[DraftRequest]) -> list[Draft]:
        asked.extend(request.request_id for request in requests)
        return propose(drafter, requests)

    propose = SuffixDrafter.propose
    monkeypatch.setattr(SuffixDrafter, "warm_up", wait_and_warm_up)
    monkeypatch.setattr(SuffixDrafter, "propose", ask)
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


def test_greedy_output_is_plain_decoding() -> None:
    engine = make_engine(RandomDrafter(VOCAB))
    for seed in range(5):
        engine.submit(Request(request_id=str(seed), prompt_token_ids=prompt(seed, 1 + 7 * seed), sampling=GREEDY))
    for name, outputs in finish_all(engine).items():
        expected, _ = greedy_decode(PLAIN_MODEL, prompt(int(name), 1 + 7 * int(name)), 12)
        if EOS in expected:
            expected = expected[: expected.index(EOS) + 1]
        assert tokens_of(outputs) == expected
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason == (FinishReason.STOP if expected[-1] == EOS else FinishReason.LENGTH)


def test_a_prediction_saves_steps_and_changes_nothing() -> None:
    expected, _ = greedy_decode(PLAIN_MODEL, prompt(1), 40)
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    edited = [*expected[:15], 3, *expected[16:25], *expected[28:]]  # what was expected differs in two places
    steps = {}
    for name, prediction in (("none", []), ("right", expected), ("edited", edited), ("wrong", expected[::-1])):
        engine = make_engine(k=8)
        asked = tuple(prediction)
        engine.submit(
            Request(
                request_id=name,
                prompt_token_ids=prompt(1),
                sampling=sampling,
                namespace=None,
                prediction_token_ids=asked,
            )
        )
        outputs = finish_all(engine)[name]
        assert tokens_of(outputs) == expected
        steps[name] = outputs[-1].stats.num_verify_steps
    assert steps["right"] < steps["edited"] < steps["none"]
    with pytest.raises(RequestError, match="prediction"):
        make_engine().submit(Request(request_id="x", prompt_token_ids=(3,), prediction_token_ids=(VOCAB,)))


@pytest.mark.parametrize("drafter", [None, RandomDrafter(VOCAB), "oracle"], ids=["ours", "random", "all-knowing"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_of_text_ends_an_output_unless_it_is_ignored(drafter: Drafter | str | None, ignore_eos: bool) -> None:
    expected, _ = greedy_decode(PLAIN_MODEL, prompt(3), 12)
    at = next(i for i in range(2, 11) if expected[i] not in expected[:i])
    chosen = OracleDrafter({prompt(3): expected}, VOCAB) if isinstance(drafter, str) else drafter
    engine = make_engine(chosen, k=8, eos=expected[at])
    engine.submit(Request(request_id="a", prompt_token_ids=prompt(3), sampling=replace(GREEDY, ignore_eos=ignore_eos)))
    outputs = finish_all(engine)["a"]
    assert tokens_of(outputs) == (expected if ignore_eos else expected[: at + 1])
    last = outputs[-1]
    assert (last.finish_reason, last.stop_reason) == (
        FinishReason.LENGTH if ignore_eos else FinishReason.STOP,
        None,
    )


def test_a_long_prompt_is_computed_in_chunks_beside_running_requests() -> None:
    engine = make_engine(prefill_chunk_tokens=8)
    engine.submit(Request(request_id="short", prompt_token_ids=prompt(1), sampling=GREEDY))
    engine.step()
    engine.submit(Request(request_id="long", prompt_token_ids=prompt(2, 70), sampling=GREEDY))
    while_computing = [output.request_id for _ in range(5) for output in engine.step()]
    assert set(while_computing) == {"short"}
    outputs = finish_all(engine)
    assert tokens_of(outputs["long"]) == greedy_decode(PLAIN_MODEL, prompt(2, 70), 12)[0]


def test_a_limit_inside_an_accepted_draft_cuts_it_there() -> None:
    expected, _ = greedy_decode(PLAIN_MODEL, prompt(3), 12)
    engine = make_engine(OracleDrafter({prompt(3): [*expected, 5, 5, 5]}, VOCAB), k=8)
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    engine.submit(Request(request_id="a", prompt_token_ids=prompt(3), sampling=sampling))
    outputs = finish_all(engine)["a"]
    assert tokens_of(outputs) == expected[:3]
    stats = outputs[-1].stats
    assert stats.num_output_tokens == 3 == stats.num_accepted_tokens + stats.num_verify_steps


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


def test_learned_text_speeds_up_the_same_request() -> None:
    with CacheSet(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
        engine = make_engine(caches=caches, k=16)
        steps = []
        for turn in range(2):
            engine.submit(Request(request_id=str(turn), prompt_token_ids=prompt(4), sampling=GREEDY))
            outputs = finish_all(engine)[str(turn)]
            steps.append(outputs[-1].stats.num_verify_steps)
        assert steps[1] <= 3 < steps[0]


def test_one_seed_gives_one_output_whatever_the_drafts_and_the_batch() -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95, seed=11)
    request = Request(request_id="a", prompt_token_ids=prompt(5), sampling=sampling)
    seen = set()
    for drafter, others in ((make_drafter("none", DraftConfig()), 0), (RandomDrafter(VOCAB), 2)):
        engine = make_engine(drafter)
        engine.submit(request)
        for index in range(others):
            engine.submit(Request(request_id=f"other-{index}", prompt_token_ids=prompt(index + 50), sampling=sampling))
        seen.add(tuple(tokens_of(finish_all(engine)["a"])))
    assert len(seen) == 1


def test_choices_of_one_seed_differ() -> None:
    engine = make_engine()
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=11)
    for choice in range(2):
        engine.submit(
            Request(request_id=str(choice), prompt_token_ids=prompt(5), sampling=sampling, choice_index=choice)
        )
    outputs = finish_all(engine)
    assert tokens_of(outputs["0"]) != tokens_of(outputs["1"])


class BrokenDrafter(RandomDrafter):
    """Raises, then proposes tokens that do not exist, then too many."""

    calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.calls += 1
        if self.calls % 3 == 0:
            raise RuntimeError("broken on purpose")
        ids = np.full(3, VOCAB + 5, np.int32) if self.calls % 3 == 1 else np.full(50, 7, np.int32)
        return [Draft(ids)] * len(requests)

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        raise RuntimeError("broken on purpose")


def test_a_broken_drafter_is_a_counter_and_changes_nothing() -> None:
    engine = make_engine(BrokenDrafter(VOCAB))
    engine.submit(Request(request_id="a", prompt_token_ids=prompt(6), sampling=GREEDY))
    assert tokens_of(finish_all(engine)["a"]) == greedy_decode(PLAIN_MODEL, prompt(6), 12)[0]
    assert engine.metrics.drafter_failures > 0


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


def test_cancelling_frees_the_slot_for_the_next() -> None:
    engine = make_engine(slots=1)
    engine.submit(Request(request_id="a", prompt_token_ids=prompt(1), sampling=GREEDY))
    engine.submit(Request(request_id="b", prompt_token_ids=prompt(2), sampling=GREEDY))
    engine.step()
    engine.cancel("a")
    engine.cancel("never-seen")
    *first, cancelled = engine.step()
    assert cancelled.finish_reason is FinishReason.CANCELLED
    assert tokens_of([*first, *finish_all(engine)["b"]]) == greedy_decode(PLAIN_MODEL, prompt(2), 12)[0]


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


def test_a_recurrent_model_is_served_without_drafts() -> None:
    model = tiny_model("Mamba")
    target = open_target(model, num_slots=2, max_length=64)
    engine = Engine(target, drafter=RandomDrafter(VOCAB), eos_token_ids=[EOS])
    for seed in range(3):
        engine.submit(Request(request_id=str(seed), prompt_token_ids=prompt(seed), sampling=GREEDY))
    for name, outputs in finish_all(engine).items():
        expected = greedy_decode(tiny_model("Mamba"), prompt(int(name)), 12)[0]
        assert tokens_of(outputs) == expected[: len(tokens_of(outputs))]
        assert outputs[-1].stats.num_draft_tokens == 0
