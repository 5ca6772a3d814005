"""Training of draft heads: what is unrolled over a whole text at once is what serving computes token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.training.head import Eagle3Training, read, save, unroll
from benchmarks.training.model import make_optimizers, take_step
from ssd.model.heads.layouts import load_head
from ssd.model.heads.networks import Eagle3Head
from ssd.model.layers.hidden_states import HiddenStateTap

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
    hidden, _ = read(target, tokens, HiddenStateTap(target, (1, 2, 3)))
    features = training.head.combine(hidden)
    steps = list(unroll(training.head, tokens[:, 1:], features[:, :-1], 3))
    for start in range(8):
        cache = DynamicCache()
        positions = torch.arange(start + 1)[None]
        logits, outgoing = training.head(
            tokens[:, 1 : start + 2], features[:, : start + 1], positions, past_key_values=cache
        )
        for depth in range(min(3, 8 - start)):
            torch.testing.assert_close(steps[depth][:, start + depth], logits[:, -1])
            if start + depth < 7:
                said, position = tokens[:, start + depth + 2, None], torch.tensor([[start + depth + 1]])
                logits, outgoing = training.head(said, outgoing[:, -1:], position, past_key_values=cache)


def test_some_steps_lower_the_loss(target: LlamaForCausalLM) -> None:
    training = new_training(target)
    tap = HiddenStateTap(target, training.head.feature_layers)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1, VOCABULARY, (4, 32)))
    hidden, logits = read(target, tokens, tap)
    optimizers = make_optimizers(training.head, "lm_head", 0.01, 0.0)
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
