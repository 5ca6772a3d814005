"""Driving models: every way gives the model's own logits, and taking tokens back leaves no trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ssd.errors import ModelError
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.target import Target
from ssd.model.ways.row_target import RowTarget
from ssd.model.ways.slot_target import SlotTarget
from tests.architectures import ARCHITECTURES, SLOTS
from tests.models import VOCAB, tiny_model

ROLLING_BACK = [
    "Llama",
    *(name for name, each in ARCHITECTURES.items() if each.kind.can_roll_back and each.kind is not SLOTS),
]
"""Of those in slots one: test_coverage, test_exact and test_tree drive all."""
SINGLE_STEPS = [name for name, each in ARCHITECTURES.items() if not each.kind.can_roll_back]

# What transformers has to say about tiny settings, and about kernels that are not installed.
pytestmark = pytest.mark.filterwarnings("default")


@torch.inference_mode()
def plain_logits(target: Target, tokens: list[int]) -> torch.Tensor:
    """The model's own, in one pass without a cache."""
    model = target.model
    ours = model.config._attn_implementation
    if isinstance(target, SlotTarget):
        model.set_attn_implementation("eager")
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    model.set_attn_implementation(ours)
    return logits


@pytest.mark.parametrize("architecture", ROLLING_BACK)
def test_ragged_drafts_with_rollback_give_the_models_logits(architecture: str) -> None:
    target = open_target(tiny_model(architecture), num_slots=4, max_length=64)
    random = np.random.default_rng(1)
    texts = {slot: random.integers(3, VOCAB, 40).tolist() for slot in (3, 0, 2)}
    for slot, text in texts.items():
        target.prefill([slot], np.array([text[: 5 + slot]]), [5 + slot])
    while any(target.length(slot) < 40 for slot in texts):
        rows, counts, right = [], [], []
        slots = [slot for slot in texts if target.length(slot) < 40]
        for slot in slots:
            at = target.length(slot)
            good = int(random.integers(1, min(5, 40 - at) + 1))
            bad = random.integers(3, VOCAB, int(random.integers(0, 4))).tolist()
            rows.append([*texts[slot][at : at + good], *bad])
            counts.append(len(rows[-1]))
            right.append(good)
        width = max(counts)
        padded = np.array([row + [0] * (width - len(row)) for row in rows])
        logits = target.forward(slots, padded, counts).logits
        for b, slot in enumerate(slots):
            at = target.length(slot) - counts[b]
            expected = plain_logits(target, texts[slot])[at : at + right[b]]
            assert torch.allclose(logits[b, : right[b]], expected, rtol=1e-3, atol=2e-4)
            target.rollback(slot, at + right[b])


@pytest.mark.parametrize("architecture", SINGLE_STEPS)
def test_a_recurrent_model_runs_but_never_rolls_back(architecture: str) -> None:
    target = open_target(tiny_model(architecture), num_slots=2, max_length=32)
    assert not target.can_roll_back
    text = np.random.default_rng(2).integers(3, VOCAB, 12).tolist()
    for start, end in ((0, 4), (4, 6)):  # a long prompt comes in parts
        target.prefill([1], np.array([text[start:end]]), [end - start])
    for at in range(6, 12):
        logits = target.forward([1], np.array([[text[at]]]), [1]).logits
        assert torch.allclose(logits[0, 0], plain_logits(target, text)[at], rtol=1e-3, atol=2e-4)


def test_a_model_whose_layers_hide_the_arguments_falls_back() -> None:
    """The start-up test decides by result, not by name: a model that attends differently is driven row by row."""
    model = tiny_model("Llama")
    forward = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *a, slot_rows=None, **k: forward(*a, **k)
    assert isinstance(open_target(model, num_slots=2, max_length=32), RowTarget)


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ModelError, match="context of 128"):
        open_target(tiny_model(), num_slots=2, max_length=129)


def test_a_directory_without_a_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(tmp_path)


def test_an_unknown_dtype_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="use auto"):
        load_model(tmp_path, dtype="float12")
