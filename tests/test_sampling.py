"""Choosing tokens: equal to the slow twins, and with the right law."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ssd.config import SamplingParams
from ssd.errors import RequestError
from ssd.model.sampling.noise import gumbel_noise
from ssd.model.sampling.sampler import PassOutput, argmax_with_noise, token_logprobs
from ssd.model.sampling.target_tokens import apply_prefix_rules, target_tokens, truncated_scores
from tests.reference import target as slow
from tests.reference.noise import position_keys
from tests.sampling_rows import make_row

VOCAB = 24


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 9), st.integers(0, 1 << 20))
def test_keys_and_noise_equal_integer_arithmetic(seed: int, choice: int, position: int) -> None:
    keys = position_keys(seed, choice, np.array([position]))
    assert int(keys[0]) == slow.position_key(seed, choice, position)
    noise = gumbel_noise(torch.from_numpy(keys.view(np.int64)), 5)
    assert np.allclose(noise[0], [slow.gumbel(int(keys[0]), token) for token in range(5)], rtol=1e-13, atol=1e-13)


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float32, (3, VOCAB), elements=st.floats(-80, 80, width=32)),
    st.integers(0, 2**63 - 1),
    st.sets(st.integers(1, VOCAB - 1)),
)
def test_skipping_argmax_equals_the_full_one(scores: np.ndarray, seed: int, ruled_out: set[int]) -> None:
    scores[:, list(ruled_out)] = -np.inf
    keys = position_keys(seed, 0, np.arange(3))
    noise = gumbel_noise(torch.from_numpy(keys.view(np.int64)), VOCAB)
    expected = (torch.from_numpy(scores).double() + noise).argmax(-1).numpy()
    assert np.array_equal(argmax_with_noise(torch.from_numpy(scores), keys), expected)


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 4, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.lists(params_strategy, min_size=1, max_size=4), st.data())
def test_tokens_equal_the_slow_twin(seed: int, params: list[SamplingParams], data: st.DataObject) -> None:
    drafts = [data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)) for _ in params]
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(params), 5, VOCAB)).astype(np.float32))
    rows = [
        make_row(p, draft=draft, prompt=[1, 2, 3], output=[4], seed=seed)
        for p, draft in zip(params, drafts, strict=True)
    ]
    chosen = target_tokens(PassOutput(logits), rows)
    for b, row in enumerate(rows):
        for t in range(row.width):
            assert chosen[b, t] == slow.sampled_token(logits[b, t].tolist(), row.params, seed, 0, 4 + t)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.7]),
        logit_bias=st.sampled_from([(), ((2, 5.0), (3, -100.0))]),
        min_tokens=st.sampled_from([0, 3]),
        allowed_token_ids=st.sampled_from([None, (3, 5), (1, 2, 3, 4, 5, 6, 7)]),
        bad_words=st.sampled_from([(), ((4,), (1, 2)), ((1, 1, 2), (3,), (5,))]),
    ),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), max_size=5),
    st.lists(st.integers(0, 3), max_size=4),
)
def test_prefix_rules_see_each_positions_own_prefix(
    seed: int, params: SamplingParams, prompt: list[int], output: list[int], draft: list[int]
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(draft) + 1, VOCAB)).astype(np.float32))
    expected = [
        slow.penalised(logits[t].tolist(), params, prompt, output + draft[:t], (3, 5)) for t in range(len(draft) + 1)
    ]
    apply_prefix_rules(logits, make_row(params, draft=draft, prompt=prompt, output=output, held_back_ids=(3, 5)))
    assert np.allclose(logits.numpy(), np.array(expected, np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.5, top_k=3),
        SamplingParams(temperature=1.2, min_p=0.2),
    ],
)
def test_sampled_law_is_the_exact_one(params: SamplingParams) -> None:
    """Pearson's chi-square over 40,000 positions; a right sampler fails with probability 1e-6 a case."""
    draws = 40_000
    logits = np.array([2.0, 1.0, 0.5, 0.0, -1.0, 1.9], np.float32)
    law = slow.exact_law(logits, params)
    scores = truncated_scores(torch.from_numpy(logits).expand(draws, -1), [params] * draws)
    counts = np.bincount(argmax_with_noise(scores, position_keys(3, 0, np.arange(draws))), minlength=6)
    assert not counts[law == 0].any()
    support = law > 0
    statistic = float(((counts - draws * law)[support] ** 2 / (draws * law[support])).sum())
    # Upper 1e-6 quantiles of chi-square with 1..5 degrees of freedom.
    limits = {0: 1e-9, 1: 23.93, 2: 27.63, 3: 30.66, 4: 33.38, 5: 35.89}
    assert statistic <= limits[int(support.sum()) - 1]


@pytest.mark.parametrize("params", [{"top_p": 0.999}, {"top_p": 0.3}, {"top_k": 300}, {"top_k": 300, "top_p": 0.9}])
def test_flat_and_peaked_rows_are_cut_where_the_whole_vocabulary_says(params: dict[str, Any]) -> None:
    """Rows that the first look decides beside rows that need the whole vocabulary."""
    random = np.random.default_rng(5)
    logits = np.stack([random.normal(0, scale, 1000).astype(np.float32) for scale in (0.1, 1.0, 8.0)])
    chosen = SamplingParams(**params)
    scores = truncated_scores(torch.from_numpy(logits), [chosen] * 3)
    for row, cut in zip(logits, scores, strict=True):
        assert set(np.flatnonzero(np.isfinite(cut.numpy()))) == set(slow.allowed_tokens(row.tolist(), chosen))


@given(st.integers(0, 10_000), st.lists(st.integers(0, VOCAB - 1), max_size=4), st.integers(0, 5))
def test_logprobs_equal_the_slow_twin(seed: int, token_ids: list[int], num_top: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (5, VOCAB)).astype(np.float32)
    found = token_logprobs(torch.from_numpy(logits), token_ids, num_top)
    for entry, row, token in zip(found, logits.tolist(), token_ids, strict=False):
        expected = slow.logprobs(row)
        ranked = sorted(range(VOCAB), key=lambda other: -row[other])
        assert (entry.token_id, entry.rank) == (token, ranked.index(token) + 1)
        assert [other for other, _ in entry.top] == ranked[:num_top]
        assert np.allclose([entry.logprob, *(p for _, p in entry.top)],
                           [expected[token], *(expected[other] for other in ranked[:num_top])], atol=1e-5)  # fmt: skip
    assert len(found) == len(token_ids)
    impossible = torch.full((1, 3), -torch.inf)
    impossible[0, 1] = 0.0
    assert token_logprobs(impossible, [0], 0)[0].logprob == -9999.0


def test_choices_of_one_seed_are_independent_streams() -> None:
    first, second = (position_keys(1, choice, np.arange(1000)) for choice in (0, 1))
    assert not np.intersect1d(first, second).size


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("top_p", 0), ("min_p", 2), ("max_tokens", -1), ("stop", ("",)), ("allowed_token_ids", ()),
        ("bad_words", ((1,), ())), ("logprobs", 21), ("prompt_logprobs", -1), ("stop", 5), ("stop", (1,)),
        ("temperature", "0"), ("max_tokens", 1.5), ("logit_bias", {1: 2.0}),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_one_stop_string_is_a_string_and_lists_are_taken() -> None:
    assert SamplingParams(stop="return").stop == ("return",)  # type: ignore[arg-type]
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3], seed=np.int64(2), temperature=np.float32(0.5))  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (3,))
