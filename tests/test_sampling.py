"""Choosing tokens: equal to the slow twins and to transformers' own processors, and with the right law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import generation as hf

from ssd.config import SamplingParams
from ssd.errors import RequestError
from ssd.model.cpu.cpu_sampling import DeviceRules, rule_out
from ssd.model.sampling.sampler import token_logprobs
from ssd.model.sampling.target_tokens import apply_prefix_rules, logits_with_rules, truncated_scores
from ssd.token_rules import BadWords, TokenRules
from tests.reference import target as slow
from tests.reference.sampling import bad_word_ends
from tests.sampling_rows import make_row

VOCAB = 24


@given(st.integers(0, 10_000), st.lists(st.integers(0, VOCAB - 1), max_size=4), st.integers(0, 5))
def test_logprobs_equal_the_slow_twin(seed: int, token_ids: list[int], num_top: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (5, VOCAB)).astype(np.float32)
    found = token_logprobs(torch.from_numpy(logits), token_ids, num_top)
    for entry, row, token in zip(found, logits.tolist(), token_ids, strict=False):
        expected = slow.logprobs(row)
        ranked = sorted(range(VOCAB), key=lambda other: -row[other])
        assert (entry.token_id, entry.rank) == (token, ranked.index(token) + 1)
        assert [other for other, _ in entry.top] == ranked[:num_top]
        assert np.allclose(
            [entry.logprob, *(p for _, p in entry.top)],
            [expected[token], *(expected[other] for other in ranked[:num_top])],
            atol=1e-5,
        )
    assert len(found) == len(token_ids)
    impossible = torch.full((1, 3), -torch.inf)
    impossible[0, 1] = 0.0
    assert token_logprobs(impossible, [0], 0)[0].logprob == -9999.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("min_p", 2),
        ("max_tokens", -1),
        ("stop", ("",)),
        ("allowed_token_ids", ()),
        ("bad_words", ((1,), ())),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", 5),
        ("stop", (1,)),
        ("temperature", "0"),
        ("max_tokens", 1.5),
        ("logit_bias", {1: 2.0}),
        ("top_k", 1 << 31),
        ("max_tokens", 1 << 63),
        ("min_tokens", 10**400),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e308),
        ("seed", 10**5000),
        ("temperature", float("nan")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field and len(str(caught.value)) < 200


@settings(max_examples=150)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.2, 0.8, 1.0, 1.9]),
    st.sampled_from([0, 1, 5, 100]),
    st.sampled_from([0.1, 0.6, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_truncation_is_that_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    warpers = [hf.TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    warpers += [hf.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [hf.TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    warpers += [hf.MinPLogitsWarper(min_p)] if min_p else []
    expected = logits[None]
    for warper in warpers:
        expected = warper(torch.tensor([[0]]), expected)
    assert torch.allclose(truncated_scores(logits[None], [params]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("params", "left"),
    [
        ({"allowed_token_ids": (3, 5), "min_tokens": 4}, {3, 5}),
        ({"allowed_token_ids": (3, 4), "min_tokens": 4}, {4}),
        ({"allowed_token_ids": (6,), "bad_words": ((6,),)}, {6}),
        ({"bad_words": tuple((token,) for token in range(VOCAB))}, set(range(VOCAB))),
    ],
)
def test_a_weaker_rule_that_would_leave_nothing_is_not_applied(params: dict[str, object], left: set[int]) -> None:
    scores = torch.zeros(1, VOCAB)
    apply_prefix_rules(scores, make_row(SamplingParams(**params), prompt=[1], forbidden_ids=(3, 5)))  # type: ignore[arg-type]
    assert set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist()) == left


# -- rules made once a request ---------------------------------------------------------------------------------------

CPU = torch.device("cpu")
WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=12)
TEXT = st.lists(st.integers(0, 4), max_size=40)


def int32(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


@given(WORDS, TEXT, TEXT)
def test_bad_words_are_those_of_the_slow_twin(words: list[list[int]], text: list[int], more: list[int]) -> None:
    made = BadWords(words)
    state = made.after(int32(text))
    for stop in range(len(more) + 1):
        assert made.ends(state) == bad_word_ends(words, text + more[:stop])
        # A state may forget what is longer than any sequence; what it forbids is the same.
        assert made.ends(made.after(int32(text + more[:stop]))) == made.ends(state)
        state = made.move(state, more[stop]) if stop < len(more) else state


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rule_that_accepts_no_token_is_skipped_and_the_other_one_applies(order: tuple[int, int]) -> None:
    masks, scores = (np.zeros(4, np.bool_), np.array([False, True, False, True])), torch.zeros(4)
    rule_out(scores, masks[order[0]], masks[order[1]], {3})
    assert scores.isfinite().tolist() == [False, True, False, False]


@pytest.mark.parametrize("words", [[[1] * length for length in range(1, 400)], [[0, *([1] * 300)], [1] * 300]])
def test_words_that_begin_alike_cost_a_bounded_walk(words: list[list[int]]) -> None:
    made = BadWords(words)
    assert made.ends(made.after(int32([1] * 5000))) == bad_word_ends(words, [1] * 5000)


def test_rules_are_made_once_a_request_and_anew_for_another() -> None:
    params = SamplingParams(logit_bias=((3, 1.0),), allowed_token_ids=(1, 3), bad_words=((1, 2),))
    assert params.rules is params.rules
    changed = replace(params, bad_words=())
    assert changed.rules.bad_words is None and params.rules.bad_words is not None
    assert params == SamplingParams(logit_bias=((3, 1.0),), allowed_token_ids=(1, 3), bad_words=((1, 2),))
    made = DeviceRules.from_rules(params.rules, 8, CPU)
    assert made is DeviceRules.from_rules(params.rules, 8, CPU) and made is not DeviceRules.from_rules(
        params.rules, 4, CPU
    )


def test_tokens_that_were_held_back_cost_nothing_once_there_are_enough() -> None:
    logits = torch.zeros(1, 1, 8)
    for output, is_held in (([5], True), ([5, 6], False)):
        row = make_row(SamplingParams(min_tokens=2), prompt=[1], output=output, forbidden_ids=(3,))
        ruled = logits_with_rules(logits, [row])
        assert ruled[0, 0, 3].isinf() if is_held else ruled is logits


def test_a_smaller_vocabulary_leaves_out_what_it_has_not() -> None:
    rules = TokenRules([(2, 5.0), (9, 1.0)], [1, 9], [])
    made = DeviceRules.from_rules(rules, 4, CPU)
    assert (
        made.bias_ids.tolist() == [2]
        and made.allowed is not None
        and made.allowed.tolist() == [False, True, False, False]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_is_added_in_float32_at_every_position_and_adds_up(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    params = SamplingParams(logit_bias=((2, 0.1), (5, -100.0), (2, 0.3)))
    row = make_row(params, prompt=[1], draft=[4, 4])
    expected = logits.float()
    expected[:, 2] += 0.4
    expected[:, 5] -= 100.0
    apply_prefix_rules(logits, row)
    assert torch.equal(logits, expected.to(dtype))
