"""On a device that computes beside the host, outputs come while the next pass runs: they are the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.bundled import MODEL_PATH
from ssd.config import BatchInvariant, CacheConfig
from ssd.engine import Engine, FinishReason, Request, RequestOutput, pipeline
from ssd.engine.batch import Batch
from ssd.engine.forward_pass import ForwardPass
from ssd.engine.sequence import Sequence
from ssd.model.cuda_graphs.graph_runner import CudaGraphRunner, run_eagerly
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.runners.slot_runner import SlotRunner
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec
from tests.engines import FINGERPRINT, ask, make_engine, prompt_of
from tests.fixed_times import fix_times
from tests.models import VOCAB, tiny_model
from tests.test_pass_noise import formula
from tests.whole_answers import answers_of, finish_all, whole

CODEC = TextCodec.load(str(MODEL_PATH))
KINDS = ["tiny", "static", *(["device"] if torch.cuda.is_available() else [])]


@cache
def opened(kind: str) -> Any:
    if kind in ("bundled", "device"):
        model = load_model(MODEL_PATH, dtype="float32", device="cuda" if kind == "device" else "cpu")
    else:
        model = tiny_model()
    exact: BatchInvariant = "auto" if kind == "bundled" else "on"  # not every CPU has it of packed weights
    target: Any = open_target(
        model, num_slots=3, max_length=128, max_draft_tokens=4, keeps_top=True, batch_invariant=exact
    )
    if kind == "static":
        target.graph_runner = CudaGraphRunner(target, run_eagerly, tolerance=1e-4, sampler=formula, keeps_top=True)
    return target


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass that began before the tokens that it is over were read."""
    found: list[int] = []
    run_ahead = SlotRunner.run_ahead
    monkeypatch.setattr(SlotRunner, "run_ahead", lambda *args: found.append(len(args[1])) or run_ahead(*args))
    return found


def engine_of(kind: str = "static", drafter: str = "ssd", **more: Any) -> Engine:
    settings = {"max_num_seqs": 3, "prefill_chunk_tokens": 16, "scheduling_policy": "priority", **more}
    return make_engine(drafter, opened(kind), codec=CODEC if kind == "bundled" else None, **settings)


def sampled(name: str, max_tokens: int, **more: Any) -> Request:
    return ask(name, (5, 6, 7), max_tokens=max_tokens, **{"temperature": 1.0, "seed": 1, "ignore_eos": True, **more})


@settings(max_examples=40)
@given(st.sampled_from(KINDS), st.sampled_from([0, 3, 16]), st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_a_random_load_gives_the_same(kind: str, quiet: int, seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        prompt = random.integers(3, VOCAB, int(random.integers(1, 40))).tolist()
        more: dict[str, Any] = {"max_tokens": 5, "prompt_logprobs": 1}
        if random.random() < 0.7:
            more = {
                "max_tokens": int(random.integers(1, 30)),
                "temperature": float(random.choice([0.0, 1.0])),
                "seed": number if number % 2 else None,  # even ones are coupled
                "logprobs": int(random.choice([0, 2])) if random.random() < 0.5 else None,
                "stop_token_ids": (int(random.integers(3, VOCAB)),),
            }
        requests.append(ask(str(number), prompt, priority=int(random.integers(-2, 3)), **more))
    arrivals = random.integers(0, 9, count).tolist()
    found = []
    for is_asynchronous in (False, True):
        with (
            CacheManager(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(pipeline, "_MIN_DRAFTLESS_PASSES", quiet)
            engine = engine_of(kind, is_asynchronous=is_asynchronous, caches=caches)
            begun: list[RequestOutput] = []
            for number, request in enumerate(requests):
                engine.submit(request)
                begun += [output for _ in range(arrivals[number]) for output in engine.step()]
            found.append({name: whole(outputs) for name, outputs in finish_all(engine, begun).items()})
            assert engine.metrics.integrity_violations == 0 and engine.check() == []
            assert engine.metrics.drafter_failures == 0
            assert sum(engine.metrics.num_requests_finished.values()) == count
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_passes_follow_each_other_where_nothing_is_drafted(followed: list[int], kind: str) -> None:
    said = []
    for is_asynchronous in (False, True):
        engine = engine_of(kind, drafter="none", is_asynchronous=is_asynchronous)
        asked = [sampled(str(number), 20 + number, temperature=number) for number in range(2)]
        said.append([answer.token_ids for answer in answers_of(engine, asked)])
        assert bool(followed) == is_asynchronous and engine.check() == []
    assert said[0] == said[1]
    assert followed[:18] == [2] * 18


@pytest.mark.parametrize("kind", KINDS[1:])
def test_who_comes_and_who_goes_waits_for_the_passes_under_way(followed: list[int], kind: str) -> None:
    engine = engine_of(kind, drafter="none", is_asynchronous=True)
    engine.submit(sampled("first", 60))
    while len(followed) < 3:
        engine.step()
    engine.submit(sampled("second", 4))
    engine.cancel("first")
    ends = [output for _ in range(4) for output in engine.step() if output.finish_reason is not None]
    assert [output.request_id for output in ends] == ["first"] and engine.has_work()
    assert sum(len(output.token_ids) for output in finish_all(engine)["second"]) > 0
    assert engine.check() == [] and engine.metrics.num_requests_finished == {"cancelled": 1, "length": 1}


def test_a_pass_that_fails_takes_the_one_behind_it_along(followed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def said(fails: bool) -> dict[str, list[int]]:
        engine = engine_of(drafter="none", is_asynchronous=True)
        for name in "ab":
            engine.submit(sampled(name, 25, seed=ord(name)))
        outputs, verify, number = [], ForwardPass.verify, len(followed)
        while engine.has_work():
            if fails and len(followed) > number + 2:
                fails = False
                monkeypatch.setattr(ForwardPass, "verify", _fail)
                outputs += engine.step()
                monkeypatch.setattr(ForwardPass, "verify", verify)
                assert engine._pipeline.current is None or len(engine._pipeline.current.batch.sequences) == 1
            outputs += engine.step()
        assert engine.check() == []
        return {name: [t for o in outputs if o.request_id == name for t in o.token_ids] for name in "ab"}

    assert said(fails=True) == said(fails=False)


def _fail(_pass: ForwardPass) -> None:
    raise RuntimeError("the device was lost")


def test_text_is_made_and_learned_from_while_the_next_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with CacheManager(CacheConfig(), fingerprint=CODEC.fingerprint, inline=True) as caches:
        engine = engine_of("bundled", is_asynchronous=True, caches=caches)
        made: list[bool] = []
        output, cache = Sequence.make_output, caches.get("default")
        monkeypatch.setattr(
            Sequence, "make_output", lambda *args: made.append(engine._pipeline.current is not None) or output(*args)
        )
        append, learned = cache.append, []
        monkeypatch.setattr(
            cache, "append", lambda *a, **k: learned.append(engine._pipeline.current is not None) or append(*a, **k)
        )
        for name, max_tokens in (("short", 3), ("long", 12)):
            engine.submit(ask(name, CODEC.encode_prompt("import os\n"), max_tokens=max_tokens, ignore_eos=True))
        outputs = finish_all(engine)
    assert made[:-1] == [True] * (len(made) - 1) and not made[-1]
    assert learned == [True, False]
    assert sum(len(each.token_ids) for each in outputs["long"]) == 12


def test_what_a_cancelled_request_had_is_sent_before_its_end() -> None:
    engine = engine_of("tiny", is_asynchronous=True)
    engine.submit(sampled("a", 30))
    assert engine.step() == [] and engine.has_work(), "the first pass is under way"
    engine.cancel("a")
    tokens, end = engine.step()
    assert tokens.token_ids and tokens.finish_reason is None
    assert end.token_ids == () and end.finish_reason is FinishReason.CANCELLED
    assert not engine.has_work() and engine.check() == []


@pytest.mark.parametrize("wrong", [None, 21, 22, 40])
def test_what_comes_next_is_drafted_while_a_pass_runs(wrong: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that are stored, all or with a ``wrong`` token: prepared drafts are as good as others."""
    fix_times(monkeypatch)
    prompts = [prompt_of(row, 12) for row in range(3)]

    def answered(answers: list[list[int]], *, is_asynchronous: bool) -> tuple[list[list[int]], int, int]:
        """What was said; passes of all rows, and of how many the draft was prepared."""
        with CacheManager(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
            for prompt, answer in zip(prompts, answers, strict=False):
                text = np.array([*prompt, *answer], np.int32)
                if wrong is not None:
                    text[len(prompt) + wrong] = (text[len(prompt) + wrong] + 1) % VOCAB
                caches.get("default").append(text, prompt_length=len(prompt))
            caches.maintain()
            engine = engine_of("tiny", is_asynchronous=is_asynchronous, caches=caches)
            propose, prepared = engine._speculation.propose, list[bool]()

            def counted(batch: Batch) -> Any:
                drafts = propose(batch)
                prepared.extend(sequence.row.used_offset > 0 for sequence in batch.sequences)
                return drafts

            monkeypatch.setattr(engine._speculation, "propose", counted)
            asked = [
                ask(str(row), prompt, max_tokens=80, ignore_eos=True, learn=False) for row, prompt in enumerate(prompts)
            ]
            tokens = [answer.token_ids for answer in answers_of(engine, asked)]
        return tokens, engine.metrics.num_verify_steps, sum(prepared)

    answers, _, _ = answered([], is_asynchronous=False)
    in_turn, num_passes, num_prepared = answered(answers, is_asynchronous=False)
    beside, num_beside, num_prepared_beside = answered(answers, is_asynchronous=True)
    assert in_turn == beside == answers and num_prepared == 0
    assert num_beside <= num_passes + 2 * len(prompts) and num_prepared_beside > num_beside // 2
