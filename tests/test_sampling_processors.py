"""The sampling rules against transformers' own processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import generation as hf

from ssd.config import SamplingParams
from ssd.model.sampling.target_tokens import apply_prefix_rules, truncated_scores
from tests.sampling_rows import make_row

VOCAB = 24
STOP = (3, 5)


def ruled(logits: torch.Tensor, params: SamplingParams, prompt: list[int], text: list[int]) -> torch.Tensor:
    """Our logits after ``text``, which is partly output and partly draft."""
    at = len(text) // 2
    row = make_row(params, prompt=prompt, output=text[:at], draft=text[at:], held_back_ids=STOP)
    repeated = logits.expand(len(text) - at + 1, -1).clone()
    apply_prefix_rules(repeated, row)
    return repeated[-1]


logit_rows = st.integers(0, 10_000).map(
    lambda seed: torch.from_numpy(np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32))
)
texts = st.lists(st.integers(0, 7), max_size=8)


@settings(max_examples=80)
@given(logit_rows, texts.filter(bool), texts, st.sampled_from([0.7, 1.3]), st.dictionaries(
    st.integers(0, 7), st.sampled_from([-100.0, -1.5, 4.0]), max_size=3))  # fmt: skip
def test_bias_and_repetition_penalty(
    logits: torch.Tensor, prompt: list[int], text: list[int], penalty: float, bias: dict[int, float]
) -> None:
    params = SamplingParams(repetition_penalty=penalty, logit_bias=tuple(bias.items()))
    ids = torch.tensor([prompt + text])
    expected = logits[None]
    if bias:
        expected = hf.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(ids, expected)
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(ids, expected)
    assert torch.allclose(ruled(logits, params, prompt, text), expected[0], rtol=1e-5, atol=1e-5)


@settings(max_examples=80)
@given(logit_rows, texts, st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=4))
def test_bad_words(logits: torch.Tensor, text: list[int], words: list[list[int]]) -> None:
    """Theirs looks at the prompt, too, as ours does not: so the prompt has other tokens here."""
    params = SamplingParams(bad_words=tuple(map(tuple, words)))
    ids = torch.tensor([[20, 21, *text]])
    expected = hf.NoBadWordsLogitsProcessor(words)(ids, logits[None])[0]
    assert torch.equal(ruled(logits, params, [20, 21], text), expected)


@given(logit_rows, texts, st.integers(0, 10))
def test_min_tokens(logits: torch.Tensor, text: list[int], min_tokens: int) -> None:
    processor = hf.MinNewTokensLengthLogitsProcessor(2, min_tokens, list(STOP), device="cpu")
    expected = processor(torch.tensor([[20, 21, *text]]), logits[None])[0]
    assert torch.equal(ruled(logits, SamplingParams(min_tokens=min_tokens), [20, 21], text), expected)


@given(logit_rows, st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_allowed_tokens(logits: torch.Tensor, allowed: set[int]) -> None:
    processor = hf.SuppressTokensLogitsProcessor(sorted(set(range(VOCAB)) - allowed), device="cpu")
    expected = processor(torch.tensor([[20]]), logits[None])[0]
    assert torch.equal(ruled(logits, SamplingParams(allowed_token_ids=tuple(allowed)), [20], [1, 2]), expected)


@settings(max_examples=150)
@given(
    logit_rows,
    st.sampled_from([0.2, 0.8, 1.0, 1.9]),
    st.sampled_from([0, 1, 5, 100]),
    st.sampled_from([0.1, 0.6, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_truncation(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
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
    scores = ruled(torch.zeros(VOCAB), SamplingParams(**params), [1], [])  # type: ignore[arg-type]
    assert set(torch.isfinite(scores).nonzero()[:, 0].tolist()) == left
