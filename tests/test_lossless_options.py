"""Speculation changes no token whatever the request asks for, and no log-probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exactness import OracleDrafter, RandomDrafter, score_margin
from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.protocol import Drafter
from ssd.drafting.sequence_noise import SequenceNoise
from ssd.engine import Engine, Request, RequestOutput
from ssd.engine.coupling import secret_of
from ssd.model.loading.load_target import open_target
from tests.models import VOCAB, tiny_model

EOS = 2
TARGET = open_target(tiny_model(), num_slots=2, max_length=96, max_draft_tokens=6)
SMALL = st.integers(3, 40)
ROOT, WINDOW = b"of all", 2

options = st.builds(
    SamplingParams,
    max_tokens=st.just(24),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.6]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 20]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.8]),
    logit_bias=st.dictionaries(SMALL, st.sampled_from([-100.0, 2.0, 6.0]), max_size=3).map(lambda d: tuple(d.items())),
    seed=st.integers(-(2**63), 2**63 - 1) | st.none(),  # without one: coupled
    stop_token_ids=st.lists(SMALL, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 5]),
    allowed_token_ids=st.none() | st.lists(SMALL, min_size=1, max_size=12, unique=True).map(tuple),
    bad_words=st.lists(st.lists(SMALL, min_size=1, max_size=2).map(tuple), max_size=8).map(tuple),
    logprobs=st.sampled_from([None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, 0, 2]),
)


def outputs_of(drafter: Drafter, prompt: Sequence[int], sampling: SamplingParams, *, k: int) -> list[RequestOutput]:
    draft = DraftConfig(num_speculative_tokens=k)
    config = EngineConfig(coupled_streams=1, coupled_window=WINDOW)
    engine = Engine(TARGET, drafter=drafter, config=config, draft=draft, eos_token_ids=[EOS], noise_root=lambda: ROOT)
    for name in ("a", "beside"):  # a second row, so that rows are of different length
        engine.submit(Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
        sampling = SamplingParams(max_tokens=9, temperature=0.0)
    outputs = []
    while engine.has_work():
        outputs += [output for output in engine.step() if output.request_id == "a"]
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@settings(max_examples=60)
@given(options, st.lists(SMALL, min_size=1, max_size=12))
def test_no_option_lets_speculation_change_the_output(sampling: SamplingParams, prompt: list[int]) -> None:
    plain = outputs_of(make_drafter("none", DraftConfig()), prompt, sampling, k=0)
    expected = tokens_of(plain)
    if sampling.ignore_eos:
        known = expected
    else:
        assert EOS not in expected[:-1]
        known = [*expected, 7, 7]  # the drafter goes on where the output must stop
    drafters = [OracleDrafter({tuple(prompt): known}, VOCAB), RandomDrafter(VOCAB), make_drafter("ssd", DraftConfig()),
                make_drafter("ssd", DraftConfig(retrieval=False))]  # fmt: skip
    for drafter in drafters:
        outputs = outputs_of(drafter, prompt, sampling, k=6)
        found = tokens_of(outputs)
        if found != expected:
            at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
            assert at is not None, (found, expected)
            plain_rules = replace(sampling, logprobs=None, prompt_logprobs=None)
            noise = None if sampling.seed is not None else SequenceNoise.coupled(secret_of(ROOT, "default"), 0, WINDOW)
            margin = score_margin(TARGET, [*prompt, *expected[:at]], plain_rules, noise=noise)
            assert margin < 1e-4, (drafter, found, expected)
            continue
        assert [outputs[-1].finish_reason, outputs[-1].stop_reason] == [plain[-1].finish_reason, plain[-1].stop_reason]
        assert_same_logprobs(outputs, plain)


def assert_same_logprobs(outputs: Sequence[RequestOutput], plain: Sequence[RequestOutput]) -> None:
    """Equal to 1e-4, whatever came in one step; the tokens they belong to are the output's."""
    if plain[0].logprobs is None:
        assert all(output.logprobs is None for output in outputs)
    else:
        assert all(len(output.logprobs or ()) == len(output.token_ids) for output in outputs)
        found, expected = ([entry for output in run for entry in output.logprobs or ()] for run in (outputs, plain))
        assert [entry.token_id for entry in found] == tokens_of(plain)
        np.testing.assert_allclose([e.logprob for e in found], [e.logprob for e in expected], atol=1e-4)
        given, wanted = ([[logprob for _, logprob in entry.top] for entry in run] for run in (found, expected))
        np.testing.assert_allclose(given, wanted, atol=1e-4)
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    if plain[0].prompt_logprobs is not None:
        pairs = list(zip(outputs[0].prompt_logprobs or (), plain[0].prompt_logprobs, strict=True))
        assert pairs[0] == (None, None)
        for a, b in pairs[1:]:
            assert a is not None and b is not None
            assert a.token_id == b.token_id
            assert abs(a.logprob - b.logprob) < 1e-4
