"""Modules that multiply by weights of their own, routers and experts among them: each row's results the same bits.

They call torch's functions where a linear layer could stand. Inside their forward functions these calls are given other
ones: products of numbers of rows that give the same bits (`RowPlan`), and activations that do (`Activation`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ssd.model.layers.replace import MOST_ERROR, Replaced, has_hooks, swap_forward
from ssd.model.layers.row_plan import RowPlan, find_rows
from ssd.model.layers.vector_layers import Activation

_plans: dict[tuple[str, int, int, torch.dtype, int], RowPlan] = {}
"""By the kind of product, its sizes and type, and the threads that compute it."""
_plain = nn.functional.linear


def exact_products(model: nn.Module) -> Iterator[Replaced]:
    """Have modules that hold matrices, and are no layers that we know, compute by the functions here."""
    if isinstance(model, PreTrainedModel):
        model.set_experts_implementation("eager")  # expert by expert: their rows are planned, those of one call are not
    for module in model.modules():
        if _multiplies(module) or any(_is_collection(child) for child in module.children()):
            yield swap_forward(module, _forward)


def _multiplies(module: nn.Module) -> bool:
    return (
        any(each is not None and each.dim() > 1 and each.dtype in MOST_ERROR for each in module._parameters.values())
        and type(module) not in (nn.Linear, nn.Embedding)
        and not isinstance(module, nn.modules.conv._ConvNd)
        and "forward" not in vars(module)
        and not has_hooks(module)
    )


def _is_collection(module: nn.Module) -> bool:
    """Whether it holds a matrix for each of several experts: then what is around it mixes what they give."""
    return _multiplies(module) and any(each is not None and each.dim() == 3 for each in module._parameters.values())


_this = threading.local()


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # A router among its experts: what is exact twice over would be tried on what is exact already.
    if getattr(_this, "is_inside", False):
        return type(module).forward(module, *args, **kwargs)
    _this.is_inside = True
    try:
        with _Exact():
            return type(module).forward(module, *args, **kwargs)
    finally:
        _this.is_inside = False


class _Exact(TorchFunctionMode):
    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _FUNCTIONS.get(function, function)
        return own(*args, **(kwargs or {}))


def _product(kind: str, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``compute`` of x, [..., in], and a matrix, in numbers of rows that give the same bits; other inputs as ever."""

    def planned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.dim() != 2 or x.dim() < 2 or x.dtype not in MOST_ERROR or not x.numel() or x.device.type != "cpu":
            return compute(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        num_outputs = weight.numel() // rows.shape[1]
        key = (kind, rows.shape[1], num_outputs, x.dtype, torch.get_num_threads())
        if key not in _plans:
            _plans[key] = find_rows(lambda some: compute(some, weight), rows.shape[1], num_outputs, x.dtype)
        found = _plans[key].product(lambda some: compute(some, weight), rows.contiguous())
        return found.view(*x.shape[:-1], num_outputs)

    return planned


_linear, _matmul = _product("linear", _plain), _product("matmul", torch.matmul)


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``nn.functional.linear`` whose rows have, on a CPU, the same bits whatever rows are beside them."""
    found = _linear(x, weight)
    return found if bias is None else found + bias


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.addmm(bias, x, weight, **kwargs) if kwargs else bias + _matmul(x, weight)


def _bmm(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.stack([_matmul(rows, weight) for rows, weight in zip(x, weights, strict=True)])


def _sum(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Over the first axis one after the other."""
    if args not in ((), (0,)) or kwargs not in ({}, {"dim": 0}) or bool(args) == bool(kwargs):
        return x.sum(*args, **kwargs)
    total = x[0]
    for each in x[1:]:
        total = total + each
    return total


def _activation(name: str, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    own = Activation(name)

    def activate(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or x.dtype not in MOST_ERROR or not x.dim():
            return plain(x, *args, **kwargs)
        return own(x)

    return activate


_FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {
    nn.functional.linear: exact_linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    torch.addmm: _addmm,
    torch.bmm: _bmm,
    torch.Tensor.sum: _sum,
    nn.functional.silu: _activation("silu", nn.functional.silu),
    **dict.fromkeys(
        (torch.sigmoid, torch.Tensor.sigmoid, nn.functional.sigmoid), _activation("sigmoid", torch.sigmoid)
    ),
}
