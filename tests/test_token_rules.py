"""Bias, allowed tokens and bad words are made once a request and say what the slow twins say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd.config import SamplingParams
from ssd.model.sampling.row_choice import DeviceRules
from ssd.model.sampling.target_tokens import apply_prefix_rules
from ssd.token_rules import BadWords, TokenRules
from tests.reference.sampling import bad_word_ends
from tests.sampling_rows import make_row

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
    made = DeviceRules.of(params.rules, 8, CPU)
    assert made is DeviceRules.of(params.rules, 8, CPU) and made is not DeviceRules.of(params.rules, 4, CPU)


def test_a_smaller_vocabulary_leaves_out_what_it_has_not() -> None:
    rules = TokenRules([(2, 5.0), (9, 1.0)], [1, 9], [])
    made = DeviceRules.of(rules, 4, CPU)
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
