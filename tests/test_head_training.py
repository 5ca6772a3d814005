"""Training of draft heads: what is drafted over a whole text at once is what is drafted token by token."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.training.head import Eagle3Training, make_optimizers, save
from benchmarks.training.measure import Written, acceptance, chains, gumbel, read, unroll, write
from benchmarks.training.train import take_step
from ssd.model.heads.head import RecurrentHead
from ssd.model.heads.layouts import load_head
from ssd.model.heads.networks import Eagle3Head
from ssd.model.layers.tap import Tap

VOCABULARY = 60


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        eos_token_id=0,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def new_training(target: LlamaForCausalLM) -> Eagle3Training:
    torch.manual_seed(1)
    return Eagle3Training(target, torch.arange(0, VOCABULARY, 2), (1, 2, 3), 40)


def test_unrolled_steps_are_the_passes_of_serving(target: LlamaForCausalLM) -> None:
    training = Eagle3Training(target, torch.arange(VOCABULARY), (1, 2, 3), 40)
    tokens = torch.randint(1, VOCABULARY, (2, 9))
    hidden, _ = read(target, tokens, Tap(target, (1, 2, 3)))
    drafts = chains(training.head, tokens, hidden, VOCABULARY, 3, lambda logits: logits.argmax(-1))
    features = training.head.combine(hidden)
    for start in range(8):
        cache = DynamicCache()
        positions = torch.arange(start + 1)[None]
        logits, outgoing = training.head(
            tokens[:, 1 : start + 2], features[:, : start + 1], positions, past_key_values=cache
        )
        for depth in range(min(3, 8 - start)):
            drafted = logits[:, -1:].argmax(-1)
            assert torch.equal(drafts[depth][:, start], drafted[:, 0])
            position = torch.tensor([[start + depth + 1]])
            logits, outgoing = training.head(drafted, outgoing[:, -1:], position, past_key_values=cache)


def test_the_last_steps_of_training_read_the_text_itself(target: LlamaForCausalLM) -> None:
    training = Eagle3Training(target, torch.arange(VOCABULARY), (1, 2, 3), 40)
    tokens = torch.randint(1, VOCABULARY, (1, 8))
    hidden, _ = read(target, tokens, Tap(target, (1, 2, 3)))
    features = training.head.combine([states[:, :-1] for states in hidden])
    steps = list(unroll(training.head, tokens[:, 1:], features, 2, None))
    cache = DynamicCache()
    _, outgoing = training.head(tokens[:, 1:5], features[:, :4], torch.arange(4)[None], past_key_values=cache)
    logits, _ = training.head(tokens[:, 5:6], outgoing[:, -1:], torch.tensor([[4]]), past_key_values=cache)
    torch.testing.assert_close(steps[1][:, 4], logits[:, 0], rtol=1e-4, atol=1e-4)


def test_written_text_is_what_the_noise_says(target: LlamaForCausalLM) -> None:
    written = write(target, torch.ones(3, 2, dtype=torch.int64), 8, 0.7, seed=5)
    logits = target(input_ids=written.tokens).logits
    for position in range(2, 8):
        drawn = (logits[:, position - 1] / 0.7 + gumbel(5, position, 3, VOCABULARY)).argmax(-1)
        assert torch.equal(written.tokens[:, position], drawn)


def test_text_behind_its_end_is_not_counted() -> None:
    tokens = torch.tensor([[5, 3, 0, 4], [0, 7, 8, 9]])
    visible = Written(tokens, 1, 0.0, 0).visible()
    assert visible.tolist() == [[False, True, True, False], [False, True, True, True]]


class _Counting(RecurrentHead):
    """Says what comes in a text that only counts up, but at one depth."""

    draft_to_target = None

    def __init__(self, wrong: int) -> None:
        super().__init__()
        self.feature_layers, self.feature_size, self._depths = (0,), 32, cycle(range(4))
        self._wrong = wrong

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **attention: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        following = token_ids + 1 + (next(self._depths) == self._wrong)
        return torch.nn.functional.one_hot(following % VOCABULARY, VOCABULARY).float(), features


@pytest.mark.parametrize("wrong", [0, 2])
def test_tokens_behind_a_wrong_one_are_not_accepted(target: LlamaForCausalLM, wrong: int) -> None:
    texts = Written(torch.arange(1, 41)[None].repeat(2, 1), 3, 0.0, 0)
    figures = acceptance(target, _Counting(wrong), texts)["most_probable"]
    assert figures["accepted_to_depth"] == [1.0] * wrong + [0.0] * (4 - wrong)
    assert figures["accepted"] == wrong


def test_some_steps_lower_the_loss(target: LlamaForCausalLM) -> None:
    training = new_training(target)
    tap = Tap(target, training.head.feature_layers)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1, VOCABULARY, (4, 32)))
    hidden, logits = read(target, tokens, tap)
    optimizers = make_optimizers(training)
    losses = []
    for _ in range(20):
        loss = training.loss(tokens, hidden, logits, 3)
        training.head.zero_grad()
        torch.autograd.backward(loss)
        take_step(optimizers, 1e-2)
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_a_saved_head_is_the_head_that_was_trained(target: LlamaForCausalLM, tmp_path: Path) -> None:
    training = new_training(target)
    with torch.no_grad():
        for weight in training.head.parameters():
            weight.add_(torch.randn_like(weight) * 0.1).copy_(weight.half())
    assert save(training, tmp_path) < 1_000_000
    loaded = load_head(tmp_path, target)
    assert loaded.feature_layers == training.head.feature_layers
    assert isinstance(loaded, Eagle3Head)
    assert loaded.draft_to_target is not None and training.head.draft_to_target is not None
    assert torch.equal(loaded.draft_to_target, training.head.draft_to_target)
    loaded.config._attn_implementation = "sdpa"
    tokens, positions = torch.randint(1, VOCABULARY, (1, 5)), torch.arange(5)[None]
    features = torch.randn(1, 5, 32)
    found, wanted = (head(tokens, features, positions)[0] for head in (loaded, training.head))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
