"""Rotary embedding as one loop against the library's function, and which layers get it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ssd.model.layers.vector_layers import FusedRotary, fuse_rotary
from tests.models import tiny_model


@given(
    batch=st.integers(1, 3),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    width=st.integers(1, 5),
    dim=st.sampled_from([2, 6, 16, 64]),
    is_cut=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_it_turns_as_the_library_does_to_the_bit(
    batch: int, heads: tuple[int, int], width: int, dim: int, is_cut: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    # As projections leave them: heads behind positions, and a part of a wider tensor.
    q, k = (torch.randn(batch, width, count, dim + is_cut).to(dtype)[..., :dim].transpose(1, 2) for count in heads)
    cos, sin = torch.randn(batch, width, dim).to(dtype), torch.randn(batch, width, dim).to(dtype)
    with torch.inference_mode():
        for found, want in zip(FusedRotary(_never)(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
            assert torch.equal(found, want)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the usual case was given away")


@pytest.mark.parametrize("case", ["type", "partial", "shared angles", "large", "axis"])
def test_what_is_not_the_usual_case_is_the_librarys(case: str) -> None:
    torch.manual_seed(0)
    shape = (2, 3, 4, 8) if case != "large" else (2, 64, 600, 8)
    q, k = torch.randn(shape), torch.randn(shape)
    angles = [torch.randn(shape[0], shape[2], shape[3]) for _ in range(2)]
    options: dict[str, Any] = {}
    if case == "type":
        q, k = q.bfloat16(), k.bfloat16()
    elif case == "shared angles":
        angles = [angle[:1] for angle in angles]
    elif case == "axis":
        q, k, options = q.transpose(1, 2), k.transpose(1, 2), {"unsqueeze_dim": 2}
    elif case == "partial":
        angles = [angle[..., :1] for angle in angles]
    asked: list[tuple[Any, ...]] = []

    def plain(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        return apply_rotary_pos_emb(*args, **kwargs)

    for found, want in zip(
        FusedRotary(plain)(q, k, *angles, **options), apply_rotary_pos_emb(q, k, *angles, **options), strict=True
    ):
        assert torch.equal(found, want)
    assert len(asked) == 1


def test_a_layer_gets_the_loop_and_its_library_keeps_its_function() -> None:
    model = tiny_model()
    replaced = list(fuse_rotary(model))
    assert replaced and not list(fuse_rotary(model))
    for parent, name, _ in replaced:
        assert name == "forward"
        assert isinstance(vars(parent)["forward"].__globals__["apply_rotary_pos_emb"], FusedRotary)
        assert type(parent).forward.__globals__["apply_rotary_pos_emb"] is not FusedRotary
    for parent, name, again in replaced:
        setattr(parent, name, again())
        assert vars(parent)["forward"].__func__ is type(parent).forward


def apply_other(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return q * cos[:, None], k * sin[:, None]


class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(x, x, x[:, 0], x[:, 0])


def test_layers_that_turn_in_another_way_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(fuse_rotary(Layer()))) == 1
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", apply_other)
    assert not list(fuse_rotary(Layer()))
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", lambda q: q)
    assert not list(fuse_rotary(Layer()))
    assert not list(fuse_rotary(nn.Linear(2, 2)))
