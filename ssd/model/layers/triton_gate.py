"""``silu(gate) * up`` of a gated feed-forward layer on a device in one launch: a Triton kernel.

Import this module only where triton is installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from ssd.model.layers.replace import MOST_ERROR, Replaced, agrees, has_hooks

_BLOCK = 1024


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Both [..., n], parts of wider tensors or not. Returns that shape; the first factor is rounded to their type."""
    gate_rows, up_rows = (each.reshape(-1, each.shape[-1]) for each in (gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, size = gate_rows.shape
    with torch.cuda.device_of(gate):  # type: ignore[no-untyped-call]
        _gate[(rows, triton.cdiv(size, _BLOCK))](
            gate_rows, up_rows, out, gate_rows.stride(0), up_rows.stride(0), size, BLOCK=_BLOCK
        )
    return out


def fuse_gates_by_triton(model: nn.Module) -> Iterator[Replaced]:
    """Have layers compute so that are ``down_proj(silu(gate_proj(x)) * up_proj(x))``; what was replaced, as it goes."""
    for module in model.modules():
        if _is_gated(module):
            module.forward = MethodType(_forward, module)
            yield Replaced(module, "forward", lambda module=module: MethodType(type(module).forward, module))  # type: ignore[misc]


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    down: torch.Tensor = module.down_proj(silu_times(module.gate_proj(x), module.up_proj(x)))
    return down


@torch.inference_mode()
def _is_gated(module: nn.Module) -> bool:
    """Whether the layer is one by its looks, and computes the same on a few numbers."""
    weight = getattr(getattr(module, "gate_proj", None), "weight", None)
    if (
        not isinstance(weight, torch.Tensor)
        or weight.dim() != 2
        or weight.dtype not in MOST_ERROR
        or not all(callable(getattr(module, name, None)) for name in ("up_proj", "down_proj", "act_fn"))
        or "forward" in vars(module)
        or has_hooks(module)
        or len(inspect.signature(module.forward).parameters) != 1
    ):
        return False
    x = torch.randn(1, 3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    try:
        return agrees(_forward(module, x), module(x), MOST_ERROR[weight.dtype])
    except Exception:  # it reads its layers in another way
        return False


@triton.jit
def _gate(gate, up, out, gate_row, up_row, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of one row: out is contiguous, [rows, size]. Grid (rows, blocks)."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(gate + row * gate_row + at, mask=at < size, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_row + at, mask=at < size, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    opened = (given / (1.0 + tl.exp(-given))).to(kind).to(tl.float32)
    tl.store(out + row * size + at, (opened * factor).to(kind), mask=at < size)
