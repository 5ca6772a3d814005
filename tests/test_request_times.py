"""When a request was where, and what the histograms make of it."""

from __future__ import annotations

import random
import time
from itertools import pairwise

from ssd.config import SamplingParams
from ssd.engine import Engine, Request
from ssd.engine.metrics import Histogram
from tests.test_engine import finish_all, make_engine, prompt


def repeating(name: str, *, tokens: int = 24, keeps_steps: bool = False) -> Request:
    """A request that a constant logit bias makes repeat itself, so that drafts are accepted."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logit_bias=((7, 100.0),), ignore_eos=True)
    return Request(
        request_id=name, prompt_token_ids=(7,) * 9, sampling=sampling, namespace=None, keeps_steps=keeps_steps
    )


def count(histogram: Histogram) -> int:
    return sum(histogram.counts)


def ended(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.submit(request)
    finish_all(engine)


def test_times_of_a_request_come_in_order() -> None:
    engine = make_engine()
    before = time.perf_counter()
    engine.submit(repeating("one"))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    stats = outputs[-1].stats
    times = [before, stats.submitted_s, stats.started_s, stats.first_token_s, stats.last_token_s, time.perf_counter()]
    assert times == sorted(times) and before > 0
    assert stats.first_token_s < stats.last_token_s
    assert stats.steps is None


def test_every_request_is_observed_once_and_every_pass_after_the_first_is_a_wait_between_tokens() -> None:
    engine = make_engine()
    ended(engine, repeating("one"), repeating("two", tokens=5))
    found = engine.metrics.histograms
    for histogram in (found.queue, found.prefill, found.decode, found.inference, found.max_tokens):
        assert count(histogram) == 2
    assert (count(found.prompt_tokens), found.prompt_tokens.total) == (2, 18)
    assert (count(found.generation_tokens), found.generation_tokens.total) == (2, 29)
    assert found.max_tokens.total == 29
    assert count(found.inter_token) == engine.metrics.num_verify_steps - 2
    computed = 18 - 2 - engine.metrics.prefix_cache_hits  # the last token of a prompt is the pass's to feed
    assert found.step_tokens.total == 29 + computed


def test_who_never_had_a_slot_has_no_time_in_one() -> None:
    engine = make_engine()
    engine.submit(Request(request_id="gone", prompt_token_ids=prompt(1)))
    engine.cancel("gone")
    finish_all(engine)
    found = engine.metrics.histograms
    assert (count(found.queue), count(found.prefill), count(found.inference)) == (0, 0, 0)
    assert count(found.generation_tokens) == 1


def test_steps_are_kept_for_who_asks() -> None:
    engine = make_engine()
    engine.submit(repeating("one", keeps_steps=True))
    while engine.has_work():
        outputs = engine.step()
    stats = outputs[-1].stats
    assert stats.steps is not None
    assert len(stats.steps) == stats.num_drafts > 0
    assert sum(drafted for drafted, _ in stats.steps) == stats.num_draft_tokens
    assert sum(accepted for _, accepted in stats.steps) == stats.num_accepted_tokens


def test_a_number_is_counted_at_the_first_bound_it_is_not_above() -> None:
    draw = random.Random(3)
    histogram = Histogram((1, 2, 5))
    values = [draw.choice([0.5, 1, 1.5, 2, 5, 5.1, 99]) for _ in range(200)]
    for value in values:
        histogram.observe(value)
    assert histogram.total == sum(values)
    bounds = (0, 1, 2, 5, 100)
    assert histogram.counts == [sum(low < v <= high for v in values) for low, high in pairwise(bounds)]
