"""Batch-invariant matrix products inside modules with their own weights, such as routers and experts.

These modules call torch's functions instead of linear layers. Inside their ``forward`` these calls are redirected.
Matrix products pad or split their rows to numbers of rows that give the same bits (`RowPlan`), and activations are
computed by `Activation`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ssd.model.cpu.cpu_layers import Activation
from ssd.model.cpu.row_plan import EXACT_ROWS, RowPlan, find_invariant_shapes, with_fastest_rows
from ssd.model.layers.replace import MAX_ERROR, Replaced, has_hooks, swap_forward

# The row plans by kind of product, sizes, dtype and number of threads.
_plans: dict[tuple[str, int, int, torch.dtype, int], RowPlan] = {}
_plain = nn.functional.linear


def redirect_matmuls(model: nn.Module) -> Iterator[Replaced]:
    """Make matrix products batch-invariant in modules with their own weight matrices, such as routers and experts.

    Experts are then computed one after another. Yields for each module a `Replaced` record, which can restore it.
    """
    if isinstance(model, PreTrainedModel):
        model.set_experts_implementation("eager")  # one call per expert, so that rows can be planned
    for module in model.modules():
        # The parent of a stack of experts combines their outputs.
        if _has_matrices(module) or any(_is_expert_stack(child) for child in module.children()):
            yield swap_forward(module, _forward)


def _has_matrices(module: nn.Module) -> bool:
    return (
        any(each is not None and each.dim() > 1 and each.dtype in MAX_ERROR for each in module._parameters.values())
        and type(module) not in (nn.Linear, nn.Embedding)
        and not isinstance(module, nn.modules.conv._ConvNd)
        and "forward" not in vars(module)
        and not has_hooks(module)
    )


def _is_expert_stack(module: nn.Module) -> bool:
    # The weights of all experts are one tensor of three dimensions.
    return _has_matrices(module) and any(each is not None and each.dim() == 3 for each in module._parameters.values())


_local = threading.local()


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # A router may contain its experts; nested redirection would test functions that are already batch-invariant.
    if getattr(_local, "is_inside", False):
        return type(module).forward(module, *args, **kwargs)
    _local.is_inside = True
    try:
        with _Redirection():
            return type(module).forward(module, *args, **kwargs)
    finally:
        _local.is_inside = False


class _Redirection(TorchFunctionMode):
    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _FUNCTIONS.get(function, function)
        return own(*args, **(kwargs or {}))


def _invariant_product(
    kind: str, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Return a batch-invariant version of the matrix product ``compute`` for a CPU."""

    def compute_by_plan(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.dim() != 2 or x.dim() < 2 or x.dtype not in MAX_ERROR or not x.numel() or x.device.type != "cpu":
            return compute(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        num_outputs = weight.numel() // rows.shape[1]

        def product(some: torch.Tensor) -> torch.Tensor:
            return compute(some, weight)

        key = (kind, rows.shape[1], num_outputs, x.dtype, torch.get_num_threads())
        if key not in _plans:
            plan = find_invariant_shapes(product, rows.shape[1], num_outputs, x.dtype)
            timed = [("", product, x.new_zeros(EXACT_ROWS, rows.shape[1]))]
            _plans[key] = with_fastest_rows({"": plan}, timed)[""] if plan.is_exact else plan
        found = _plans[key].product(product, rows.contiguous())
        return found.view(*x.shape[:-1], num_outputs)

    return compute_by_plan


_linear, _matmul = _invariant_product("linear", _plain), _invariant_product("matmul", torch.matmul)


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``nn.functional.linear`` batch-invariantly on a CPU: a row's bits do not depend on the other rows."""
    found = _linear(x, weight)
    return found if bias is None else found + bias


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.addmm(bias, x, weight, **kwargs) if kwargs else bias + _matmul(x, weight)


def _bmm(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.stack([_matmul(rows, weight) for rows, weight in zip(x, weights, strict=True)])


def _sum(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Sum over the first axis sequentially, so that the order of the additions does not depend on the shape."""
    if args not in ((), (0,)) or kwargs not in ({}, {"dim": 0}) or bool(args) == bool(kwargs):
        return x.sum(*args, **kwargs)
    total = x[0]
    for each in x[1:]:
        total = total + each
    return total


def _activation(name: str, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    own = Activation(name)

    def activate(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or x.dtype not in MAX_ERROR or not x.dim():
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
