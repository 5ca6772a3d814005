"""Layers that take the place of a model's own: it says what it said, or they go again."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ssd.bundled import MODEL_PATH
from ssd.model.layers.packed_linear import FusedMember, PackedLinear, pack_linears
from ssd.model.layers.replace import plain_logits, replace_layers
from ssd.model.layers.vector_layers import FusedNorm, FusedRotary, fuse_norms, fuse_rotary
from ssd.model.loading.load_target import load_model, open_target
from tests.models import tiny_model

KINDS = (pack_linears, fuse_norms, fuse_rotary)


def replace(model: Any, expected: list[torch.Tensor] | None = None) -> bool:
    return replace_layers(model, KINDS, expected=expected or plain_logits(model), tolerance=1e-3)


def kinds(model: nn.Module) -> set[type]:
    """Of layers that may be replaced, and of what turns queries and keys."""
    changed = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    used = [type(each) for each in model.modules()]
    used += [type(forward.__func__.__globals__["apply_rotary_pos_emb"]) for forward in changed]
    return set(used) & {nn.Linear, PackedLinear, FusedMember, FusedNorm, FusedRotary}


def test_a_model_says_the_same_and_is_changed_once() -> None:
    model = tiny_model()
    expected = plain_logits(model)
    assert replace(model, expected)
    assert kinds(model) == {PackedLinear, FusedMember, FusedNorm, FusedRotary}
    for found, want in zip(plain_logits(model), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert not replace(model, expected)


def test_the_bundled_model_decodes_as_its_library_does() -> None:
    model = load_model(MODEL_PATH, dtype="float32", device="cpu")
    library = deepcopy(model)
    target = open_target(model, num_slots=1, max_length=64)
    assert nn.Linear not in kinds(model) and kinds(library) == {nn.Linear}
    ids = torch.arange(40, 56)[None]
    with torch.inference_mode():
        logits = target.forward([0], ids.numpy(), [16]).logits
        torch.testing.assert_close(logits, library(input_ids=ids).logits, rtol=1e-3, atol=1e-3)


class _Reaching(nn.Module):
    """Looks at its layer's weight, as some models do."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.inner.weight.dtype))


def test_a_model_that_reaches_into_its_layers_is_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = tiny_model()
    model.lm_head = _Reaching(model.lm_head)
    expected = plain_logits(model)
    with caplog.at_level(logging.WARNING):
        assert not replace(model, expected)
    assert kinds(model) == {nn.Linear}
    assert "stay as they are" in caplog.text and "weight" in caplog.text
    for found, want in zip(plain_logits(model), expected, strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("kind", [PackedLinear, FusedNorm])
def test_a_wrong_kernel_is_found_out(
    kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    expected = plain_logits(model)
    replaced = [each for each_kind in KINDS for each in each_kind(model)]
    assert replaced
    for parent, name, again in replaced:
        setattr(parent, name, again())
    wrong = (lambda self, x: x.new_ones(*x.shape[:-1], self.out_features)) if kind is PackedLinear else _shifted
    monkeypatch.setattr(kind, "__call__", wrong)
    monkeypatch.setattr("ssd.model.layers.vector_layers.agrees", lambda *_: True)
    with caplog.at_level(logging.WARNING):
        assert not replace(model, expected)
    assert kinds(model) & {PackedLinear, FusedMember, FusedNorm, FusedRotary} == set()
    assert "logits differ by" in caplog.text
    for found, want in zip(plain_logits(model), expected, strict=True):
        assert torch.equal(found, want)


def _shifted(_norm: FusedNorm, x: torch.Tensor) -> torch.Tensor:
    return x + 1
