"""Rotary position embedding on a CPU as one loop.

Attention layers of transformers call a function of their source file, a dozen tensor operations, each of which costs
more to launch than to compute for the few positions of a decode or verify pass: see ``benchmarks.layers``. A layer gets
a copy of its forward function that finds another function under that name; what other models use stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ssd.compiled.addresses import kernel
from ssd.compiled.functions import turn
from ssd.compiled.vectors import KINDS
from ssd.model.layers.replace import MOST_ERROR, MOST_NUMBERS, Replaced, agrees

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]
MakeRotary = Callable[[Rotary], Rotary]
"""Of the library's function one that computes the same."""

_NAME = "apply_rotary_pos_emb"
_HOST = torch.device("cpu")


class FusedRotary:
    """Turns each pair of numbers ``dim / 2`` apart by its angle (Su et al. 2021, section 3.4.2).

    Rounded as the library's function does: the same bits.
    """

    def __init__(self, plain: Rotary) -> None:
        """``plain`` : the library's function, for whatever is not the usual case."""
        self.plain = plain

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k : [B, heads, T, dim]; cos, sin : [B, T, dim]. Returns q and k turned."""
        if args or kwargs or not (_fits(q, cos, sin) and _fits(k, cos, sin)):
            return self.plain(q, k, cos, sin, *args, **kwargs)
        return _turned(q, cos, sin), _turned(k, cos, sin)


def fuse_rotary(
    model: nn.Module,
    make: MakeRotary = FusedRotary,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _HOST,
    most_error: float = 1e-6,
) -> Iterator[Replaced]:
    """Give layers that turn queries and keys in the usual way what ``make`` makes; what was replaced, as it goes.

    dtype, device : of the numbers that are tried. most_error : as a share of their norm, put down to rounding.
    """
    copies: dict[FunctionType, FunctionType | None] = {}
    for module in model.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or "forward" in vars(module):
            continue
        if forward not in copies:
            plain = forward.__globals__.get(_NAME) if _NAME in forward.__code__.co_names else None
            if plain is not None and not _agree(plain, make, dtype, device, most_error):
                plain = None
            copies[forward] = None if plain is None else _with_another(forward, make(plain))
        copy = copies[forward]
        if copy is not None:
            module.forward = MethodType(copy, module)
            yield Replaced(module, "forward", lambda module=module, own=forward: MethodType(own, module))  # type: ignore[misc]


def _with_another(forward: FunctionType, rotary: Rotary) -> FunctionType:
    """A copy of ``forward`` that calls ``rotary``."""
    names = {**forward.__globals__, _NAME: rotary}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@torch.inference_mode()
def _agree(plain: Rotary, make: MakeRotary, dtype: torch.dtype, device: torch.device, most_error: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(*shape, generator=generator).to(device, dtype)
        for shape in ((2, 3, 5, 8), (2, 1, 5, 8), *[(2, 5, 8)] * 2)
    )
    try:
        wanted = plain(q, k, cos, sin)
    except Exception:  # it takes something else
        return False
    found = make(plain)(q, k, cos, sin)
    return all(agrees(got, want, most_error) for got, want in zip(found, wanted, strict=True))


def _fits(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return (
        x.dtype == cos.dtype == sin.dtype
        and x.dtype in MOST_ERROR
        and x.dim() == 4
        and x.numel() <= MOST_NUMBERS
        and cos.shape == sin.shape == (x.shape[0], x.shape[2], x.shape[3])
        and x.shape[3] % 2 == 0
        and x.stride(3) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    strides = [each * x.itemsize for each in x.stride()[:3]]
    rows, heads, width, dim = x.shape
    _turn(
        KINDS[str(x.dtype)], x.data_ptr(), strides[0], strides[1], strides[2], rows, heads, width, dim,
        cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


@kernel
def _turn(  # pragma: no cover - compiled
    kind: int, x: int, row_bytes: int, head_bytes: int, position_bytes: int,
    num_rows: int, num_heads: int, width: int, dim: int, cos: int, sin: int, out: int,
) -> None:  # fmt: skip
    """Addresses; all but ``x`` are contiguous."""
    size = dim * (2 if kind else 4)
    for row in range(num_rows):
        for head in range(num_heads):
            for t in range(width):
                given = x + row * row_bytes + head * head_bytes + t * position_bytes
                angle = (row * width + t) * size
                found = out + ((row * num_heads + head) * width + t) * size
                turn(kind, given, cos + angle, sin + angle, found, dim // 2)
