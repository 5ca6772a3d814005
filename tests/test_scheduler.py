"""Who runs and who computes: order, ageing, preemption and shares of the budget, all counted in steps."""

from __future__ import annotations

import gc
from collections.abc import Sequence as Several
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import SamplingParams
from ssd.drafting.noise import SequenceNoise
from ssd.engine import Engine, FinishReason, Request, RequestOutput
from ssd.engine.prefix_cache import PrefixCache
from ssd.engine.scheduler import Scheduler
from ssd.engine.sequence import Sequence
from tests.engines import prompt_of as text
from tests.engines import target_of
from tests.models import tiny_model
from tests.reference import scheduling as slow
from tests.test_prefix_reuse import drawn, expected, greedy, make_engine, request
from tests.whole_answers import finish_all, tokens_of


def ends_in_order(engine: Engine, begun: Several[RequestOutput] = ()) -> list[str]:
    """Request ids in the order in which they end."""
    ended = [output.request_id for output in begun if output.finish_reason]
    while engine.has_work():
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    return ended


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.lists(st.integers(-2, 2), max_size=3), st.lists(st.integers(0, 3), max_size=2)), max_size=25),
    st.integers(1, 3),
    st.integers(1, 6),
)
def test_who_runs_is_what_ageing_step_by_step_says(
    steps: list[tuple[list[int], list[int]]], num_slots: int, ageing_steps: int
) -> None:
    """At every step some arrive, by priority, and some of the running end, by place: fixed turns give the same."""
    scheduler = Scheduler(num_slots, PrefixCache(target_of()), ageing_steps=ageing_steps)
    twin = slow.Ageing(num_slots, ageing_steps)
    number = 0
    for arriving, ending in steps:
        sequences = [sequence_of(number + i, priority) for i, priority in enumerate(arriving)]
        scheduler.enqueue(sequences)
        twin.waiting |= {(priority, twin.now, number + i) for i, priority in enumerate(arriving)}
        number += len(arriving)
        scheduler.admit()
        twin.step()
        assert {int(s.request.request_id) for s in scheduler.running} == {r[2] for r in twin.running}
        assert {int(s.request.request_id) for s in scheduler.waiting} == {r[2] for r in twin.waiting}
        assert scheduler.num_waiting == len(twin.waiting)
        assert len({s.slot for s in scheduler.running} | scheduler.free_slots) == num_slots
        for place in ending:
            if place < len(scheduler.running):
                ended = scheduler.running[place]
                scheduler.release(ended)
                twin.running = {r for r in twin.running if r[2] != int(ended.request.request_id)}


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.text("abc", max_size=4), st.lists(st.integers(0, 3), max_size=3)), max_size=25),
    st.integers(1, 3),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
)
def test_tenants_take_turns_and_none_runs_more_than_it_may(
    steps: list[tuple[str, list[int]]], num_slots: int, most: tuple[int, int, int]
) -> None:
    """At every step requests of some tenants arrive, and some of the running end, by place."""
    limits = dict(zip("abc", most, strict=True))
    scheduler = Scheduler(num_slots, PrefixCache(target_of()))
    twin = slow.TakingTurns(num_slots, limits)
    number = 0
    for arriving, ending in steps:
        for tenant in arriving:
            scheduler.enqueue([sequence_of(number, 0, tenant=tenant, max_running=limits[tenant])])
            twin.arrive(tenant, number)
            number += 1
        scheduler.admit()
        twin.step()
        assert {int(s.request.request_id) for s in scheduler.running} == {n for _, n in twin.running}
        assert {int(s.request.request_id) for s in scheduler.waiting} == {n for _, n in twin.waiting}
        assert scheduler.num_waiting == len(twin.waiting)
        for place in ending:
            if place < len(scheduler.running):
                ended = scheduler.running[place]
                scheduler.release(ended)
                twin.running = [each for each in twin.running if each[1] != int(ended.request.request_id)]


def test_how_many_wait_may_be_asked_while_they_change() -> None:
    """Another thread may go on within any allocation: what the collector frees there runs code."""
    scheduler, arriving = Scheduler(1, PrefixCache(target_of())), [sequence_of(n, 0, tenant=str(n)) for n in range(30)]
    thresholds = gc.get_threshold()

    def arrive(phase: str, _info: object) -> None:
        if phase == "start" and arriving:
            scheduler.enqueue([arriving.pop()])

    gc.callbacks.append(arrive)
    gc.set_threshold(1)
    try:
        for _ in range(1000):
            assert 0 <= scheduler.num_waiting <= 30
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(arrive)
    assert scheduler.num_waiting + len(arriving) == 30


def test_an_urgent_request_takes_no_slot_from_another_tenant() -> None:
    engine = make_engine(slots=1)
    engine.submit(request("running", text(1, 5), greedy(3), tenant="a", priority=9))
    begun = engine.step()
    engine.submit(request("urgent", text(2, 5), greedy(1), tenant="b", priority=-9))
    assert ends_in_order(engine, begun) == ["running", "urgent"]
    assert engine.metrics.num_preemptions == 0


def sequence_of(number: int, priority: int, **fields: Any) -> Sequence:
    asked = request(str(number), (5, 6), priority=priority, **fields)
    return Sequence(asked, max_length=8, eos_token_ids=(), stream=None, noise=SequenceNoise.seeded(0))


@pytest.mark.parametrize("name", ["Llama", "mamba"])
@pytest.mark.parametrize("sampling", [greedy(40), drawn(7, 40)], ids=["greedy", "drawn"])
def test_a_more_urgent_request_takes_the_slot_and_the_output_stays_the_same(
    sampling: SamplingParams, name: str
) -> None:
    engine = make_engine(name, slots=1)
    engine.submit(request("slow", text(1, 20), sampling, priority=1))
    begun = [output for _ in range(5) for output in engine.step()]
    assert 0 < len(tokens_of(begun)) < 40
    engine.submit(request("urgent", text(2, 20), greedy(3)))
    assert {output.request_id for output in engine.step()} == {"urgent"}
    assert engine.metrics.num_preemptions == 1
    outputs = finish_all(engine, begun)
    assert tokens_of(outputs["slow"]) == slow.plain_decode(tiny_model(name), text(1, 20), sampling)
    assert outputs["slow"][-1].finish_reason is FinishReason.LENGTH
    assert engine.metrics.prompt_tokens == 40  # a resumed prompt counts once


def test_a_preempted_prompt_goes_on_where_it_was() -> None:
    """Its keys and values stay in another slot as long as nobody needs that."""
    engine = make_engine(slots=2, chunk=16)
    long = request("long", text(1, 80), greedy(4), priority=5)
    engine.submit(long)
    engine.submit(request("other", text(3, 4), greedy(50), priority=-5))
    for _ in range(3):
        engine.step()
    engine.submit(request("urgent", text(2, 4), greedy(1), priority=0))
    outputs = finish_all(engine)
    assert engine.metrics.num_preemptions == 1
    assert tokens_of(outputs["long"]) == expected(long)
    assert outputs["long"][-1].stats.num_cached_tokens == 0  # its own work is no hit


# -- the budget of prompts ---------------------------------------------------------------------------------------------


def steps_to_first_token(engine: Engine, requests: Several[Request]) -> dict[str, int]:
    """Steps until each request has its first token."""
    for asked in requests:
        engine.submit(asked)
    first: dict[str, int] = {}
    step = 0
    while engine.has_work():
        step += 1
        for output in engine.step():
            first.setdefault(output.request_id, step)
    return first


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    engine = make_engine(slots=3, chunk=8)
    first = steps_to_first_token(
        engine, [request("long", text(1, 90), greedy(2)), request("short", text(2, 7)), request("middle", text(3, 13))]
    )
    assert first["short"] == 1 and first["middle"] <= 4 < first["long"]


def test_a_long_prompt_is_done_in_bounded_steps_however_many_short_ones_come() -> None:
    engine = make_engine(slots=2, chunk=8)
    engine.submit(request("long", text(1, 81)))
    step, arrived = 0, None
    while arrived is None:
        step += 1
        engine.submit(request(f"short-{step}", text(step + 1, 9), greedy(1)))
        arrived = step if any(output.request_id == "long" for output in engine.step()) else None
    assert step <= 80 // (8 // 4) + 1


def test_a_prompt_that_is_to_be_scored_waits_for_a_budget_that_is_used_up() -> None:
    engine = make_engine(slots=2, chunk=8)
    scored = request("scored", text(2, 30), SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0))
    engine.submit(request("other", text(1, 20), greedy(2)))
    engine.submit(scored)
    outputs = finish_all(engine)
    assert [len(output.prompt_logprobs) for output in outputs["scored"] if output.prompt_logprobs] == [30]
    assert tokens_of(outputs["scored"]) == expected(scored)
