"""The serving loop: every request ends once, counts are of emitted tokens, failures of the cache change nothing."""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
import weakref
from collections.abc import Sequence as Rows
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exactness import OracleDrafter
from ssd.config import CacheConfig
from ssd.drafting import Draft, DraftRequest
from ssd.drafting.protocol import Drafter, DraftOutcome, NoDrafter, ScoredPass
from ssd.drafting.suffix_drafter import NamespaceGroup, SuffixDrafter
from ssd.engine import FinishReason, pass_timing, speculation
from ssd.engine.draft_buffers import make_drafts
from ssd.engine.metrics import Histogram
from ssd.errors import ContextTooLong, EngineStopped, QueueFull, RequestError
from ssd.retrieval.cache_manager import CacheManager
from tests import fixed_times
from tests.engines import EOS, FINGERPRINT, ask, make_engine, prompt_of, target_of
from tests.fixed_times import measure_asking, seconds_of, unfixed_passes
from tests.models import VOCAB, tiny_model
from tests.reference.scheduling import plain_decode
from tests.sharing_replica import eventually
from tests.whole_answers import finish_all, tokens_of


def test_requests_are_answered_while_the_kernels_that_draft_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, warm_up = threading.Event(), SuffixDrafter.warm_up
    asked: list[str] = []

    def wait_and_warm_up(drafter: SuffixDrafter) -> None:
        assert compiled.wait(60)
        warm_up(drafter)

    def noted(drafter: SuffixDrafter, groups: Any) -> None:
        set_groups(drafter, groups)
        asked.extend(drafter._rows)

    set_groups = SuffixDrafter.set_groups
    monkeypatch.setattr(SuffixDrafter, "warm_up", wait_and_warm_up)
    monkeypatch.setattr(SuffixDrafter, "set_groups", noted)
    engine = make_engine()
    engine.warm_up(patience_s=0.0)
    said = {}
    for name in ("before", "after"):
        assert engine.is_drafting == (name == "after")
        engine.submit(ask(name, prompt_of(1)))
        said[name] = tokens_of(finish_all(engine)[name])
        assert (name in asked) == (name == "after")
        compiled.set()
        eventually(lambda: engine.is_drafting)
        engine.calibrate()
    assert said["before"] == said["after"]
    assert engine.metrics.drafter_failures == 0


def test_a_snapshot_that_is_replaced_while_a_kernel_searches_it_lives_until_the_kernel_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched, were_alive = list[weakref.ref[Any]](), list[bool]()

    def noted(drafter: SuffixDrafter, groups: Rows[NamespaceGroup]) -> None:
        set_groups(drafter, groups)
        searched[:] = [weakref.ref(group.snapshot._record) for group in groups if group.snapshot is not None]

    def replaced(*args: Any) -> None:
        caches.get("default").append(prompt_of(len(were_alive)))  # as other threads do
        were_alive.append(bool(searched) and all(record() is not None for record in searched))
        make_drafts(*args)

    set_groups = SuffixDrafter.set_groups
    monkeypatch.setattr(SuffixDrafter, "set_groups", noted)
    monkeypatch.setattr(speculation, "make_drafts", replaced)
    with CacheManager(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
        engine = make_engine(caches=caches)
        engine.submit(ask("a", prompt_of(1)))
        finish_all(engine)
    assert len(were_alive) > 1
    assert all(were_alive)


def test_a_pass_that_was_interrupted_while_sizes_are_timed_costs_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    target, now, random_ = target_of(num_slots=3), 0.0, random.Random(0)
    forward = target.forward

    def interrupted(slots: Any, tokens: Any, counts: Any) -> Any:
        nonlocal now
        now += 1e-3 * tokens.size + (0.5 if random_.random() < 0.3 else 0.0)
        return forward(slots, tokens, counts)

    monkeypatch.setattr(target, "forward", interrupted)
    monkeypatch.setattr(pass_timing, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(pass_timing, "_USUAL_S", 100.0)
    monkeypatch.setattr(pass_timing, "_LONGEST_S", 100.0)
    times = unfixed_passes(target, 5)
    assert set(times) == set(itertools.product((1, 3), (1, 2, 5)))
    for (num_rows, width), seconds in times.items():
        assert seconds == pytest.approx(1e-3 * num_rows * width)


@pytest.mark.parametrize("end", ["end of text", "ignored", "stop token"])
def test_an_output_ends_inside_of_an_accepted_draft_and_nothing_behind_it_is_learned(end: str) -> None:
    said = plain_decode(tiny_model(), prompt_of(3), ask("a", ()).sampling)
    at = next(i for i in range(2, 11) if said[i] not in said[:i])
    token = said[at]
    with CacheManager(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
        drafter = OracleDrafter({prompt_of(3): said}, VOCAB)
        is_stop = end == "stop token"
        engine = make_engine(drafter, limit=8, caches=caches, eos=[EOS if is_stop else token])
        stops = (token,) if is_stop else ()
        engine.submit(ask("a", prompt_of(3), ignore_eos=end == "ignored", stop_token_ids=stops))
        outputs = finish_all(engine)["a"]
        expected = said if end == "ignored" else said[: at + 1]
        assert tokens_of(outputs) == expected
        assert outputs[-1].finish_reason is (FinishReason.LENGTH if end == "ignored" else FinishReason.STOP)
        assert outputs[-1].stop_reason == (token if is_stop else None)
        assert outputs[-1].stats.num_accepted_tokens <= outputs[-1].stats.num_output_tokens == len(expected)
        # Prompt, output and separator.
        assert caches.get("default").snapshot().num_tokens == len(prompt_of(3)) + len(expected) + 1


def test_bad_requests_are_refused_and_nothing_is_queued() -> None:
    engine = make_engine()
    for bad, error in (
        (ask("a", prompt_of(0, 96)), ContextTooLong),
        (ask("a", prompt_of(0, 90)), ContextTooLong),
        (ask("a", ()), RequestError),
        (ask("a", (VOCAB,)), RequestError),
        (ask("a", (3,), prediction_token_ids=(VOCAB,)), RequestError),
        (ask("a", (5,), logit_bias=((VOCAB, 1.0),)), RequestError),
        (ask("a", (5,), stop=("x",)), RequestError),
    ):
        with pytest.raises(error):
            engine.submit(bad)
    assert not engine.has_work()


def test_a_full_queue_and_a_stopped_engine_refuse() -> None:
    engine = make_engine(target=target_of(num_slots=1), max_waiting=1)
    for name in "ab":
        engine.submit(ask(name, (5,)))
    with pytest.raises(QueueFull):
        engine.submit(ask("c", (5,)))
    finish_all(engine)
    engine.close()
    with pytest.raises(EngineStopped):
        engine.submit(ask("d", (5,)))


def test_more_prompts_than_may_wait_are_answered_and_those_that_are_left_are_cancelled() -> None:
    engine = make_engine(target=target_of(num_slots=1), max_waiting=1)
    prompts = [list(prompt_of(seed)) for seed in range(5)]
    ends = [output.finish_reason for output in engine.generate(prompts) if output.finish_reason is not None]
    assert len(ends) == 5 and not engine.has_work()
    next(left := engine.generate(prompts[:2]))
    left.close()  # type: ignore[attr-defined]
    with pytest.raises(RequestError):
        list(engine.generate([prompts[0], []]))
    assert {reason for (*_, last) in finish_all(engine).values() for reason in [last.finish_reason]} <= {
        FinishReason.CANCELLED
    }


def test_what_times_passes_may_fail_while_requests_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    expected = plain_decode(tiny_model(), prompt_of(3), ask("a", ()).sampling)

    def failing(*_arguments: object) -> None:
        raise MemoryError("the widest pass")

    monkeypatch.setattr(speculation, "timed_passes", failing)
    engine.calibrate()
    engine.submit(ask("a", prompt_of(3)))
    assert tokens_of(finish_all(engine)["a"]) == expected


@pytest.mark.parametrize("factor", [0.01, 30.0, 100.0])
def test_repeated_requests_are_drafted_however_wrong_passes_were_timed(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(_target: object, max_width: int) -> dict[pass_timing.Size, float]:
        sizes = itertools.product((1, 4), (1, 2, max_width))
        return {(rows, width): seconds_of(rows * width) * (factor if width > 1 else 1.0) for rows, width in sizes}

    monkeypatch.setattr(speculation, "timed_passes", wrong)
    with CacheManager(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
        engine = make_engine(SuffixDrafter(), caches=caches, limit=16)
        engine.calibrate()
        for number in range(20):
            engine.submit(ask(str(number), PROMPT, max_tokens=40, ignore_eos=True))
            last = finish_all(engine)[str(number)][-1]
    assert last.stats.num_verify_steps <= 6


def test_what_withholds_drafts_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A drafted token costs more than a pass here, so nothing is drafted, and that is reported."""
    monkeypatch.setattr(fixed_times, "seconds_of", lambda positions: 1e-3 if positions == 1 else 1.5e-3 * positions)
    with CacheManager(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
        engine = make_engine(SuffixDrafter(), caches=caches, limit=16)
        engine.calibrate()
        assert engine.speculation.active
        for number in range(16):
            engine.submit(ask(str(number), PROMPT, max_tokens=40, ignore_eos=True))
            finish_all(engine)
    is_active, reason = engine.speculation
    assert not is_active and re.fullmatch(
        r"verifying .*: a pass of 16 tokens is estimated to take as long as \d\d\.\d passes of one token", reason
    )
    assert 16 <= engine.relative_pass_cost(16) <= 24
    (record,) = caplog.records
    assert record.message.startswith(
        "for 200 decoding steps, drafts with a high acceptance estimate were not verified (verifying drafts costs more"
    )


def test_what_never_drafts_says_why() -> None:
    assert make_engine(limit=0).speculation == (False, "disabled by num_speculative_tokens=0")
    assert make_engine(NoDrafter()).speculation == (False, "disabled by num_speculative_tokens=0")


def test_warm_up_leaves_no_trace_in_the_counts() -> None:
    engine = make_engine()
    engine.warm_up()
    assert engine.metrics.generation_tokens == 0 and not engine.has_work()


# When a request was where, what the histograms make of it, and counts that add up


def count(histogram: Histogram) -> int:
    return sum(histogram.counts)


def test_the_first_decoding_step_computes_the_prompt_of_a_request_that_runs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target: Any = target_of()
    engine, widths = make_engine(target=target), list[int]()
    score = target.score

    def recorded(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        widths.append(tokens.shape[1])
        return score(tokens, *args, **kwargs)

    monkeypatch.setattr(target, "score", recorded)
    engine.submit(ask("alone", prompt_of(1, 20), max_tokens=1))
    finish_all(engine)
    assert widths == [20]
    for name in ("one", "two"):
        engine.submit(ask(name, prompt_of(len(name) + ord(name[0]), 20), max_tokens=1))
    finish_all(engine)
    assert widths[1:] == [19, 19, 1], "several sequences share their first decoding step"


def test_who_never_had_a_slot_has_no_time_in_one() -> None:
    engine = make_engine()
    engine.submit(ask("gone", prompt_of(1)))
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


@pytest.mark.parametrize("is_asynchronous", [False, True])
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_request_ends_once_and_counts_add_up(is_asynchronous: bool, seed: int) -> None:
    """Every third request is cancelled, some before they begin."""
    random = np.random.default_rng(seed)
    outputs = []
    with CacheManager(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
        engine = make_engine(target=target_of(num_slots=3), caches=caches, is_asynchronous=is_asynchronous)
        prompts, most = random.integers(3, 50, (3, 9)), random.integers(3, 30, 9).tolist()
        for number in range(9):
            sampling = {"max_tokens": most[number], "ignore_eos": True}
            engine.submit(ask(str(number), prompts[number % 3].tolist(), record_steps=True, **sampling))
            outputs += [output for _ in range(int(random.integers(0, 3))) for output in engine.step()]
            if number % 3 == 2:
                engine.cancel(str(number))
        while engine.has_work():
            outputs += engine.step()
    metrics, ends = engine.metrics, {o.request_id: o for o in outputs if o.finish_reason is not None}
    assert sum(output.finish_reason is not None for output in outputs) == len(ends) == 9
    assert metrics.num_running == metrics.num_waiting == 0
    for number in range(9):
        end, mine = ends[str(number)], [output for output in outputs if output.request_id == str(number)]
        assert end is mine[-1] and end.stats.num_output_tokens == len(tokens_of(mine)) <= most[number]
        is_whole = len(tokens_of(mine)) == most[number]
        assert end.finish_reason is (FinishReason.LENGTH if number % 3 < 2 or is_whole else FinishReason.CANCELLED)
        assert end.stats.num_output_tokens <= end.stats.num_accepted_tokens + end.stats.num_verify_steps
    ended = [end.stats for end in ends.values()]
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
    begun = {output.request_id for output in outputs if output.token_ids}
    assert metrics.prompt_tokens == sum(ends[name].stats.num_prompt_tokens for name in begun)  # each once


# Whom the engine asks for drafts, and what it makes of them before it verifies them

PROMPT = (1, 2, 3, 4, 5)


class Knowing(NoDrafter):
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

    def observe(self, outcomes: Rows[DraftOutcome], scored: ScoredPass | None = None) -> None:
        assert all(outcome.num_accepted == len(outcome.draft.token_ids) for outcome in outcomes)


def outputs_of(drafter: Drafter | str) -> list[list[int]]:
    """Tokens by step."""
    engine = make_engine(drafter, target_of(num_slots=1))
    engine.submit(ask("a", PROMPT, ignore_eos=True))
    steps = []
    while engine.has_work():
        steps.append([token for output in engine.step() for token in output.token_ids])
    return steps


@pytest.mark.parametrize(("chance", "is_sure"), [(0.95, True), (0.8, False), (None, True)])
def test_only_what_is_almost_certain_may_delay_the_first_token(chance: float | None, is_sure: bool) -> None:
    said = [token for step in outputs_of("none") for token in step]
    steps = outputs_of(Knowing(said, chance))
    assert [token for step in steps for token in step] == said
    assert len(steps[0]) == (5 if is_sure else 1)
    assert len(steps[1]) == 5, "whoever has seen the first token waits no longer for it"


class Nothing(NoDrafter):
    """Never has a draft, and takes its time."""

    num_asked = 0

    def propose(self, requests: Rows[DraftRequest]) -> list[Draft]:
        assert requests
        self.num_asked += len(requests)
        time.sleep(2e-3 * len(requests))
        return super().propose(requests)

    def observe(self, outcomes: Rows[DraftOutcome], scored: ScoredPass | None = None) -> None:
        assert not any(len(outcome.draft.token_ids) or outcome.num_accepted for outcome in outcomes)


def test_the_engine_asks_a_slow_drafter_less_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_asking(monkeypatch)
    drafter = Nothing()
    texts = []
    for limit in (4, 0):
        engine = make_engine(drafter, limit=limit)
        for number in range(4):
            engine.submit(ask(str(number), prompt_of(number, 5), max_tokens=40, ignore_eos=True))
        texts.append({name: tokens_of(outputs) for name, outputs in finish_all(engine).items()})
    assert texts[0] == texts[1] and all(len(text) == 40 for text in texts[0].values())
    assert 4 * 4 <= drafter.num_asked < 4 * 40


def test_what_was_distrusted_is_tried_again_where_prices_left_no_draft() -> None:
    engine = make_engine(target=target_of(num_slots=1))
    shares = engine._speculation._calibration
    for _ in range(50):
        shares.observe(1.0, 1.0, 0)
    before = shares.share(1.0)
    engine.submit(ask("a", PROMPT, max_tokens=40, temperature=1.0, seed=1, ignore_eos=True))
    finish_all(engine)
    assert shares.share(1.0) > before
