"""Speculative sampling: the law of the output is the target's, by enumeration and by counting."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd.config import SamplingParams
from ssd.drafting.noise_keys import ACCEPT, CHOICE, DRAFT, RECOVER, uniform_noise
from ssd.model.sampling.noisy_argmax import argmax_with_noise
from ssd.model.sampling.pass_output import PassOutput
from ssd.model.sampling.rejection import SampledDraft, acceptance_chances, rejection_tokens, residuals
from ssd.model.sampling.target_tokens import apply_prefix_rules, target_tokens, truncated_scores
from tests.reference import rejection as slow
from tests.reference.noise import position_keys
from tests.sampling_rows import make_row
from tests.statistics import assert_follows

VOCAB = 4
PROMPT = np.array([1, 2], np.int32)
STOP = 3

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, top_p=0.8),
    SamplingParams(temperature=1.4, top_k=2),
    SamplingParams(min_p=0.3, repetition_penalty=1.4),
    SamplingParams(presence_penalty=0.8, frequency_penalty=-0.5, logit_bias=((0, 1.5), (2, -100.0)), min_tokens=2),
]


def logits_after(output: tuple[int, ...], model: int, vocab: int = VOCAB) -> torch.Tensor:
    """What a model would say after ``output``: any numbers, the same each time."""
    random = np.random.default_rng([model, *output, len(output)])
    return torch.from_numpy(random.normal(0, 1.5, vocab).astype(np.float32))


def scores_after(output: tuple[int, ...], model: int, params: SamplingParams, vocab: int = VOCAB) -> torch.Tensor:
    """The same after the sampling rules, float32[V]."""
    logits = logits_after(output, model, vocab)[None]
    row = make_row(params, prompt=PROMPT, output=output, held_back_ids=(STOP,))
    apply_prefix_rules(logits, row)
    return truncated_scores(logits, [params])[0]


def law_after(output: tuple[int, ...], model: int, params: SamplingParams) -> slow.Law:
    probs = torch.softmax(scores_after(output, model, params).double(), -1)
    return {token: float(chance) for token, chance in enumerate(probs) if chance > 0}


def as_tensor(law: slow.Law, rows: int) -> torch.Tensor:
    return torch.tensor([[law.get(token, 0.0) for token in range(VOCAB)]] * rows, dtype=torch.float64)


def accept(target: slow.Law, draft: slow.Law, token: int) -> float:
    """The chance the engine's own code gives."""
    return float(acceptance_chances(as_tensor(target, 1), as_tensor(draft, 1), np.array([token], np.int32))[0])


def recover(target: slow.Law, draft: slow.Law) -> slow.Law:
    """The law the engine's own code recovers from."""
    left = residuals(as_tensor(target, 1), as_tensor(draft, 1))[0]
    return {token: float(chance / left.sum()) for token, chance in enumerate(left) if chance > 0}


laws = st.lists(st.integers(0, 9), min_size=VOCAB, max_size=VOCAB).filter(any).map(
    lambda weights: {token: weight / sum(weights) for token, weight in enumerate(weights) if weight}
)  # fmt: skip


@given(laws, laws)
def test_chances_and_residuals_equal_the_slow_twin(target: slow.Law, draft: slow.Law) -> None:
    for token in draft:
        assert accept(target, draft, token) == pytest.approx(slow.acceptance_chance(target, draft, token))
    assert recover(target, draft) == pytest.approx(slow.residual(target, draft))


@given(laws, laws)
def test_acceptance_is_one_less_the_distance_of_the_laws(target: slow.Law, draft: slow.Law) -> None:
    """Leviathan et al. 2023, theorem 3.5."""
    distance = sum(abs(target.get(token, 0.0) - draft.get(token, 0.0)) for token in range(VOCAB)) / 2
    accepted = sum(chance * accept(target, draft, token) for token, chance in draft.items())
    assert accepted == pytest.approx(1 - distance)


@pytest.mark.parametrize("limits", [(1, 1, 1), (2, 2, 2), (3, 0, 1), (0, 3, 2)], ids=str)
@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
@pytest.mark.parametrize("draft_is", ["another model", "the target", "a point mass"])
def test_the_law_of_every_output_is_the_targets(draft_is: str, params: SamplingParams, limits: tuple[int, ...]) -> None:
    """By enumeration of every draft, every rejection and every recovery."""

    @cache
    def target(output: tuple[int, ...]) -> slow.Law:
        return law_after(output, 0, params)

    @cache
    def draft(output: tuple[int, ...]) -> slow.Law:
        if draft_is == "the target":
            return target(output)
        law = law_after(output, 1, params)
        return {max(law, key=lambda token: law[token]): 1.0} if draft_is == "a point mass" else law

    expected = slow.plain_law(target, 3)
    found = slow.speculative_law(target, draft, 3, limits, accept, recover)
    assert set(found) <= set(expected)
    for output, chance in expected.items():
        assert found.get(output, 0.0) == pytest.approx(chance, abs=1e-12)


def test_dropping_drafts_for_what_was_drawn_would_change_the_law() -> None:
    """Why length and estimates must not depend on the draw: here a draw the draft model finds unlikely is dropped."""
    target, draft = {0: 0.5, 1: 0.5}, {0: 0.8, 1: 0.2}
    kept, dropped = 0, 1
    verified = draft[kept] * accept(target, draft, kept)
    recovered = draft[kept] * (1 - accept(target, draft, kept)) * recover(target, draft).get(kept, 0.0)
    assert verified + recovered + draft[dropped] * target[kept] != pytest.approx(target[kept])


def run_round(seed: int, params: SamplingParams, num_draft_tokens: int, draft_vocab: int = VOCAB) -> list[int]:
    """One round of the real code: draws by key, one pass, tokens out."""
    draft: list[int] = []
    laws = []
    for position in range(num_draft_tokens):
        scores = scores_after(tuple(draft), 1, params, draft_vocab)
        keys = position_keys(seed, 0, np.array([len(PROMPT) + position]), DRAFT)
        laws.append(scores)
        draft.append(int(argmax_with_noise(scores[None], keys)[0]))
    logits = torch.stack([logits_after(tuple(draft[:i]), 0) for i in range(num_draft_tokens + 1)])[None]
    row = make_row(params, prompt=PROMPT, draft=draft, law=torch.stack(laws), seed=seed, held_back_ids=(STOP,))
    chosen = target_tokens(PassOutput(logits), [row])[0]
    accepted = next((i for i in range(num_draft_tokens) if draft[i] != chosen[i]), num_draft_tokens)
    kept: list[int] = chosen[: accepted + 1].tolist()
    return kept


@pytest.mark.parametrize("draft_vocab", [VOCAB, VOCAB - 1])
@pytest.mark.parametrize("params", [PARAMS[0], PARAMS[3]], ids=["plain", "ruled"])
def test_the_drawn_law_is_the_targets(params: SamplingParams, draft_vocab: int) -> None:
    """Counting 3,000 rounds; the token after what a round put out is drawn plainly. Both tokens have the exact law."""
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(3000):
        output = run_round(seed, params, 2, draft_vocab)
        if len(output) == 1:
            keys = position_keys(seed, 0, np.array([len(PROMPT) + 1]), CHOICE)
            output.append(int(argmax_with_noise(scores_after(tuple(output), 0, params)[None], keys)[0]))
        counts[tuple(output[:2])] += 1
    assert_follows(counts, slow.plain_law(lambda output: law_after(output, 0, params), 2))


def test_the_target_itself_as_a_draft_is_always_accepted() -> None:
    scores = torch.stack([scores_after((), 0, PARAMS[0])] * 3)
    for seed in range(200):
        draft = argmax_with_noise(scores[:2], position_keys(seed, 0, np.arange(2), DRAFT)).astype(np.int32)
        accept, recover = (position_keys(seed, 0, np.arange(2), stream) for stream in (ACCEPT, RECOVER))
        assert rejection_tokens(scores, draft, scores[:2], accept, recover, bonus=2).tolist() == [*draft, 2]


def test_streams_of_one_seed_are_independent() -> None:
    keys = [position_keys(1, 0, np.arange(1000), stream) for stream in (CHOICE, DRAFT, ACCEPT, RECOVER)]
    assert len(np.unique(np.concatenate(keys))) == 4000
    assert np.array_equal(keys[0], position_keys(1, 0, np.arange(1000)))
    uniform = uniform_noise(keys[2])
    assert uniform.min() > 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.04


def test_a_cut_draft_keeps_its_laws_in_step() -> None:
    whole = SampledDraft(np.array([3, 1], np.int32), 0, "model", np.array([0.5, 0.5]), law=torch.eye(VOCAB)[:2])
    cut = whole.cut(1)
    assert isinstance(cut, SampledDraft) and cut.law is not None
    assert whole.cut(2) is whole and cut.token_ids.tolist() == [3] and cut.law.tolist() == torch.eye(VOCAB)[:1].tolist()
