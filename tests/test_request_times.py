"""When a request was where, what the histograms make of it, and counts that add up."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine import Engine, Request
from ssd.engine.metrics import Histogram
from ssd.model.loading.load_target import open_target
from ssd.retrieval.cache import CacheSet
from tests.models import tiny_model
from tests.test_engine import make_engine, prompt
from tests.whole_answers import finish_all


def repeating(name: str, *, tokens: int = 24) -> Request:
    """A request that a constant logit bias makes repeat itself, so that drafts are accepted."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logit_bias=((7, 100.0),), ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=(7,) * 9, sampling=sampling, namespace=None)


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
