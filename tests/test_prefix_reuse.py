"""Keys and values that are there already: reused by those who may, and never seen in a token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exactness import RandomDrafter
from ssd.config import SamplingParams
from ssd.engine import Engine, FinishReason, Request, RequestOutput
from ssd.engine.prefix_cache import PrefixCache, reuse_scope
from ssd.engine.sequence import namespace_secret
from tests import engines
from tests.engines import ROOT, ask, target_of
from tests.engines import prompt_of as text
from tests.models import VOCAB, tiny_model
from tests.reference import scheduling as slow
from tests.reference.noise import coupled_key
from tests.whole_answers import Answer, answers_of, finish_all, tokens_of, whole

PLAIN_MODEL = tiny_model()  # never driven by an engine
NOT_EXACT = {"stablelm", "mamba"}
STREAMS = 2


def make_engine(
    name: str = "Llama", *, slots: int = 3, random_drafts: bool = True, chunk: int = 512, reuse: bool = True
) -> Engine:
    """An engine that takes priorities."""
    target = target_of(name, num_slots=slots, batch_invariant="auto" if name in NOT_EXACT else "on")
    return engines.make_engine(
        RandomDrafter(VOCAB) if random_drafts else "ssd",
        target,
        prefill_chunk_tokens=chunk,
        enable_prefix_caching=reuse,
        scheduling_policy="priority",
        coupled_streams=STREAMS,
    )


def greedy(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=1)


def drawn(seed: int | None, max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True, logprobs=1)


def request(name: str, prompt: Sequence[int], sampling: SamplingParams | None = None, **fields: Any) -> Request:
    return ask(name, prompt, sampling or greedy(), **fields)


def answer(engine: Engine, asked: Request) -> tuple[list[int], int]:
    """The output's tokens, and how many of the prompt's were cached."""
    engine.submit(asked)
    outputs = finish_all(engine)[asked.request_id]
    return tokens_of(outputs), outputs[-1].stats.num_cached_tokens


def expected(asked: Request) -> list[int]:
    key_after: Callable[[Sequence[int]], int] | None = None
    if asked.sampling.seed is None and asked.noise_stream is not None:
        secret, stream = namespace_secret(ROOT, asked.namespace or ""), asked.noise_stream
        key_after = lambda text: coupled_key(secret, stream, text, 2)  # noqa: E731
    return slow.plain_decode(
        PLAIN_MODEL, asked.prompt_token_ids, asked.sampling, asked.choice_index, key_after=key_after
    )


@pytest.mark.parametrize("sampling", [greedy(), drawn(3)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("random_drafts", [True, False])
def test_the_next_turn_computes_only_what_is_new(sampling: SamplingParams, random_drafts: bool) -> None:
    engine = make_engine(random_drafts=random_drafts)
    first = request("1", text(1, 30), sampling)
    output, cached = answer(engine, first)
    assert (output, cached) == (expected(first), 0)
    # Everything but the last token of the output was computed, also what was accepted from drafts.
    second = request("2", [*text(1, 30), *output, *text(2, 5)], sampling)
    assert answer(engine, second) == (expected(second), 30 + len(output) - 1)
    assert engine.metrics.prefix_cache_queries == 30 + 30 + len(output) + 5
    assert engine.metrics.prefix_cache_hits == 30 + len(output) - 1
    assert engine.metrics.prompt_tokens == engine.metrics.prefix_cache_queries


def test_what_a_cancelled_request_computed_is_reused() -> None:
    engine = make_engine(chunk=16)
    prompt = text(1, 60)
    engine.submit(request("a", prompt))
    engine.step()
    engine.step()
    engine.cancel("a")
    assert finish_all(engine)["a"][-1].finish_reason is FinishReason.CANCELLED
    assert answer(engine, request("b", prompt)) == (expected(request("", prompt)), 32)


def test_slots_used_longest_ago_are_overwritten_first() -> None:
    engine = make_engine(slots=2)
    for name, seed in (("a", 1), ("b", 2), ("a2", 1), ("c", 3)):  # "a" is used again, so "c" overwrites "b"
        answer(engine, request(name, text(seed, 30)))
    assert answer(engine, request("a3", text(1, 30)))[1] == 29
    assert answer(engine, request("b2", text(2, 30)))[1] == 0


def test_a_short_common_beginning_does_not_cost_a_long_kept_text() -> None:
    engine = make_engine(slots=2)
    system = text(1, 20)
    long = [*system, *text(2, 60)]
    answer(engine, request("long", long))
    assert answer(engine, request("short", [*system, *text(3, 4)]))[1] == 20
    assert answer(engine, request("again", long))[1] == len(long) - 1


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        ({}, {}, True),
        ({"namespace": "a"}, {"namespace": "b"}, False),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, False),
        ({"cache_salt": "a"}, {}, False),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, True),
        ({"namespace": None, "cache_salt": "a"}, {"namespace": None, "cache_salt": "a"}, True),
        ({"namespace": None}, {"namespace": None}, False),
        ({"tenant": "a"}, {"tenant": "b"}, False),
        ({"tenant": "a"}, {}, False),
        ({"tenant": "a"}, {"tenant": "a"}, True),
        ({"tenant": "a", "cache_salt": "s"}, {"tenant": "b", "cache_salt": "s"}, False),
        ({"tenant": "a", "prefix_scope": "x"}, {"tenant": "b", "namespace": "other", "prefix_scope": "x"}, True),
        ({"cache_salt": "a", "prefix_scope": "x"}, {"cache_salt": "b", "prefix_scope": "x"}, False),
        ({"tenant": "a", "namespace": None}, {"tenant": "a", "namespace": None}, False),
    ],
)
def test_only_one_namespace_one_salt_and_one_tenant_share(
    first: dict[str, Any], second: dict[str, Any], shares: bool
) -> None:
    engine = make_engine()
    prompt = text(1, 30)
    answer(engine, request("a", prompt, **first))
    assert answer(engine, request("b", prompt, **second)) == (expected(request("", prompt)), 29 if shares else 0)


def test_a_request_without_namespace_and_salt_leaves_nothing_behind() -> None:
    engine = make_engine()
    prompt = text(1, 30)
    assert reuse_scope(request("a", prompt, namespace=None)) is None
    answer(engine, request("a", prompt, namespace=None))
    assert [engine.target.length(slot) for slot in range(3)] == [0, 0, 0]
    assert engine.metrics.prefix_cache_queries == 0 and engine.metrics.prompt_tokens == 30


def test_prompts_whose_turn_is_not_yet_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(slots=4, chunk=8)
    compared = []
    copy_cached_prefix = PrefixCache.copy_cached_prefix

    def noting(reuse: PrefixCache, sequence: Any, running: Any) -> None:
        compared.append(sequence.request.request_id)
        copy_cached_prefix(reuse, sequence, running)

    monkeypatch.setattr(PrefixCache, "copy_cached_prefix", noting)
    for number in range(4):
        engine.submit(request(str(number), text(number, 40), drawn(5)))
    engine.step()
    assert compared == ["0"]
    finish_all(engine)


@pytest.mark.parametrize("chunk", [512, 7])
def test_choices_of_one_prompt_compute_it_once(chunk: int) -> None:
    engine = make_engine(slots=4, chunk=chunk)
    prompt = text(1, 50)
    choices = [request(str(choice), prompt, drawn(5), choice_index=choice) for choice in range(4)]
    for choice in choices:
        engine.submit(choice)
    outputs = finish_all(engine)
    for choice in choices:
        assert tokens_of(outputs[choice.request_id]) == expected(choice)
    computed = [50 - outputs[choice.request_id][-1].stats.num_cached_tokens for choice in choices]
    assert sorted(computed) == [1, 1, 1, 50]  # the last token is each one's own


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2", "stablelm"])
def test_other_architectures_reuse_too(architecture: str) -> None:
    """Sliding windows, sinks, compressed keys, learned positions, and rows computed one by one."""
    outputs = []
    for reuse in (True, False):
        engine = make_engine(architecture, reuse=reuse)
        system = text(1, 40)
        engine.submit(request("a", [*system, *text(2, 9)], greedy(16)))
        begun = engine.step()
        engine.submit(request("b", [*system, *text(3, 7)], greedy(16)))
        found = finish_all(engine, begun)
        assert found["b"][-1].stats.num_cached_tokens == (40 if reuse else 0)  # copied from a slot that runs
        turn = [*system, *text(2, 9), *tokens_of(found["a"]), *text(4, 3)]
        engine.submit(request("c", turn, drawn(1)))
        found |= finish_all(engine)
        is_exact = architecture not in NOT_EXACT
        outputs.append({name: whole(found[name]) if is_exact else tokens_of(found[name]) for name in "abc"})
        assert (found["c"][-1].stats.num_cached_tokens > 40) == reuse
    assert outputs[0] == outputs[1]


def test_what_is_copied_again_after_a_failed_pass_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(slots=3)
    prompt = text(1, 50)
    answer(engine, request("first", prompt))
    requests = [request(name, [*prompt, *text(number, 3)], greedy(8)) for number, name in enumerate("ab", 2)]
    for each in requests:
        engine.submit(each)
    append, num_failed = engine.target._append, 0

    def failing(slots: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_failed
        if len(slots) == 2 and not kwargs and not num_failed:
            num_failed += 1
            raise RuntimeError("injected")
        return append(slots, tokens, *args, **kwargs)

    monkeypatch.setattr(engine.target, "_append", failing)
    outputs = finish_all(engine)
    assert num_failed == 1
    for each in requests:
        assert outputs[each.request_id][-1].stats.num_cached_tokens <= len(each.prompt_token_ids)
        assert tokens_of(outputs[each.request_id]) == expected(each)


def test_a_recurrent_model_reuses_nothing() -> None:
    engine = make_engine("mamba", slots=2)
    first, second = (answer(engine, request(name, text(1, 30))) for name in "ab")
    assert first == second and second[1] == 0


def alone(asked: Request) -> Answer:
    """By an engine that does nothing else, drafts nothing and keeps nothing."""
    return answers_of(make_engine(slots=1, reuse=False), [replace(asked, num_speculative_tokens=0)])[0]


Asked = tuple[int, int, int, int, str, int]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 40),
            st.integers(1, 12),
            st.integers(0, 6),
            st.sampled_from(["greedy", "seeded", "coupled", "coupled elsewhere"]),
            st.integers(-1, 1),
        ),
        min_size=1,
        max_size=10,
    ),
    st.integers(1, 4),
    st.sampled_from([5, 17, 512]),
)
def test_output_is_that_of_plain_decoding_one_at_a_time(asked: list[Asked], slots: int, chunk: int) -> None:
    """Requests whose prompts begin alike, some cancelled, some preempted, greedy and drawn, in few slots.

    Tokens and log-probabilities. Those that are coupled say what secret, stream and their own text say, whatever was
    said before and beside them.
    """
    engine = make_engine(slots=slots, chunk=chunk)
    requests = {}
    outputs: dict[str, list[RequestOutput]] = {}
    cancel_at: dict[int, list[str]] = {}

    def step(number: int) -> None:
        for name in cancel_at.pop(number, []):
            engine.cancel(name)
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        assert engine.check() == []

    for index, (stem, stem_length, tail, cancel_after, kind, priority) in enumerate(asked):
        prompt = [*text(stem, 40)[:stem_length], *text(100 + index % 4, tail)]
        name = str(index)
        sampling = {"greedy": greedy(), "seeded": drawn(index)}.get(kind, drawn(None))
        namespace = "elsewhere" if kind == "coupled elsewhere" else "default"
        stream = index % STREAMS if kind.startswith("coupled") else None
        requests[name] = request(name, prompt, sampling, priority=priority, namespace=namespace, noise_stream=stream)
        engine.submit(requests[name])
        if cancel_after < 3:
            cancel_at.setdefault(index + cancel_after, []).append(name)
        step(index)
    number = len(asked)
    while engine.has_work():
        step(number)
        number += 1
    for name, mine in outputs.items():
        found, plain = whole(mine), alone(requests[name])
        assert plain.token_ids == expected(requests[name])
        if found.finish_reason is FinishReason.CANCELLED:
            count = len(found.token_ids)
            assert (found.token_ids, found.logprobs or []) == (plain.token_ids[:count], (plain.logprobs or [])[:count])
        else:
            assert found == plain
    assert len(outputs) == len(asked)
    assert engine.metrics.integrity_violations == 0


# The bookkeeping's check: silent when all is well, a sentence for each fault, and never a crash


def feed_other_tokens(engine: Engine) -> None:
    engine.target.rollback(0, 10)
    engine.target.prefill([0], np.array([[9, 9]]), [2])


def give_a_slot_twice(engine: Engine) -> None:
    engine._scheduler.running[1].slot = 0


def wait_and_run(engine: Engine) -> None:
    engine._scheduler._queues[None] = [engine._scheduler.running[0]]


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda engine: engine._scheduler.running.pop(), "slot 1 has 0 owners"),
        (give_a_slot_twice, "slot 0 has 2 owners"),
        (feed_other_tokens, "slot 0 holds other tokens than request a"),
        (lambda engine: engine.target.prefill([0], np.full((1, 20), 9), [20]), "of the 21 of request a"),
        (wait_and_run, "request a occurs 2 times"),
    ],
)
def test_a_fault_is_named(break_it: Callable[[Engine], object], complaint: str) -> None:
    engine = make_engine(slots=2)  # two requests run, one waits, and none has been freed
    for name in "abc":
        engine.submit(request(name, text(ord(name), 20), greedy(30)))
    engine.step()
    assert engine.check() == []
    break_it(engine)
    assert any(complaint in found for found in engine.check()), engine.check()


def test_a_fault_in_an_idle_engine_is_logged_and_counted_and_what_was_kept_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    prompt = text(1, 30)
    answer(engine, request("a", prompt))
    slot = next(slot for slot in range(3) if engine.target.length(slot))
    engine.submit(request("b", text(2, 30)))
    engine.step()
    engine.target.rollback(slot, 20)
    engine.target.prefill([slot], np.array([[9] * 17]), [17])  # what is kept is no longer what is said
    with caplog.at_level(logging.ERROR):
        while engine.has_work():
            engine.step()
    assert engine.metrics.integrity_violations == 1
    assert "holds other tokens than its cached prefix" in caplog.text
    assert answer(engine, request("c", prompt)) == (expected(request("", prompt)), 0)
    assert engine.check() == []
