"""Training of draft heads: what is drafted over a whole text at once is what is drafted token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ssd.bundled.training.heads.__main__ import frequent_tokens, make_optimizers, save
from ssd.bundled.training.heads.chains import chains, unroll
from ssd.bundled.training.heads.eagle3 import Eagle3Training
from ssd.bundled.training.heads.kinds import Kind
from ssd.bundled.training.heads.measure import acceptance
from ssd.bundled.training.heads.medusa import MedusaTraining
from ssd.bundled.training.heads.texts import Written, gumbel, read, write
from ssd.bundled.training.train import take_step
from ssd.model.heads.eagle3 import Eagle3Head
from ssd.model.heads.head import ParallelHead
from ssd.model.heads.layouts.load_head import load_head
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


def new_kind(name: str, target: LlamaForCausalLM) -> Kind:
    torch.manual_seed(1)
    if name == "medusa":
        return MedusaTraining(target, 3)
    return Eagle3Training(target, torch.arange(0, VOCABULARY, 2), (1, 2, 3), 40)


def test_unrolled_steps_are_the_passes_of_serving(target: LlamaForCausalLM) -> None:
    kind = Eagle3Training(target, torch.arange(VOCABULARY), (1, 2, 3), 40)
    tokens = torch.randint(1, VOCABULARY, (2, 9))
    hidden, _ = read(target, tokens, Tap(target, (1, 2, 3)))
    drafts = chains(kind.head, tokens, hidden, VOCABULARY, 3, lambda logits: logits.argmax(-1))
    features = kind.head.combine(hidden)
    for start in range(8):
        cache = DynamicCache()
        positions = torch.arange(start + 1)[None]
        logits, outgoing = kind.head(
            tokens[:, 1 : start + 2], features[:, : start + 1], positions, past_key_values=cache
        )
        for depth in range(min(3, 8 - start)):
            drafted = logits[:, -1:].argmax(-1)
            assert torch.equal(drafts[depth][:, start], drafted[:, 0])
            position = torch.tensor([[start + depth + 1]])
            logits, outgoing = kind.head(drafted, outgoing[:, -1:], position, past_key_values=cache)


def test_the_last_steps_of_training_read_the_text_itself(target: LlamaForCausalLM) -> None:
    kind = Eagle3Training(target, torch.arange(VOCABULARY), (1, 2, 3), 40)
    tokens = torch.randint(1, VOCABULARY, (1, 8))
    hidden, _ = read(target, tokens, Tap(target, (1, 2, 3)))
    features = kind.head.combine([states[:, :-1] for states in hidden])
    steps = list(unroll(kind.head, tokens[:, 1:], features, 2, None))
    cache = DynamicCache()
    _, outgoing = kind.head(tokens[:, 1:5], features[:, :4], torch.arange(4)[None], past_key_values=cache)
    logits, _ = kind.head(tokens[:, 5:6], outgoing[:, -1:], torch.tensor([[4]]), past_key_values=cache)
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


class _Knowing(ParallelHead):
    """Heads that say what comes in a text that only counts up, but for one of them."""

    def __init__(self, wrong: int, embeddings: torch.Tensor) -> None:
        super().__init__()
        self._embeddings = embeddings / embeddings.norm(dim=1, keepdim=True)
        self.feature_layers, self.feature_size, self.num_tokens, self._wrong = (0,), 32, 4, wrong

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        now = (features @ self._embeddings.T).argmax(-1)
        ahead = torch.tensor([2 + d + (d == self._wrong) for d in range(4)])
        return torch.nn.functional.one_hot(now[:, None] + ahead, VOCABULARY).float()


@pytest.mark.parametrize("wrong", [0, 2])
def test_tokens_behind_a_wrong_one_are_not_accepted(target: LlamaForCausalLM, wrong: int) -> None:
    head = _Knowing(wrong, target.model.embed_tokens.weight)
    texts = Written(torch.arange(1, 41)[None].repeat(2, 1), 3, 0.0, 0)
    figures = acceptance(target, head, texts)["most_probable"]
    assert figures["accepted_to_depth"] == [1.0] * wrong + [0.0] * (4 - wrong)
    assert figures["accepted"] == wrong


def test_the_most_frequent_tokens_are_found() -> None:
    assert frequent_tokens(torch.tensor([[7, 7, 2, 9, 9, 9]]), 2).tolist() == [7, 9]


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_some_steps_lower_the_loss(target: LlamaForCausalLM, name: str) -> None:
    kind = new_kind(name, target)
    tap = Tap(target, kind.head.feature_layers)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1, VOCABULARY, (4, 32)))
    hidden, logits = read(target, tokens, tap)
    optimizers = make_optimizers(kind)
    losses = []
    for _ in range(20):
        loss = kind.loss(tokens, hidden, logits, 3)
        kind.head.zero_grad()
        torch.autograd.backward(loss)
        take_step(optimizers, 1e-2)
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_a_saved_head_is_the_head_that_was_trained(target: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    kind = new_kind(name, target)
    with torch.no_grad():
        for weight in kind.head.parameters():
            weight.add_(torch.randn_like(weight) * 0.1).copy_(weight.half())
    assert save(kind, tmp_path) < 1_000_000
    loaded = load_head(tmp_path, target)
    assert loaded.feature_layers == kind.head.feature_layers
    features = torch.randn(2, 32)
    if name == "medusa":
        torch.testing.assert_close(loaded(features), kind.head(features), rtol=1e-4, atol=1e-4)
        return
    assert isinstance(loaded, Eagle3Head) and isinstance(kind, Eagle3Training)
    assert loaded.draft_to_target is not None and kind.head.draft_to_target is not None
    assert torch.equal(loaded.draft_to_target, kind.head.draft_to_target)
    loaded.config._attn_implementation = "sdpa"
    tokens, positions = torch.randint(1, VOCABULARY, (1, 5)), torch.arange(5)[None]
    features = torch.randn(1, 5, 32)
    found, wanted = (head(tokens, features, positions)[0] for head in (loaded, kind.head))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
