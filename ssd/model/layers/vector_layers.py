"""Activation functions on a CPU whose bits depend on the number alone.

torch computes most numbers by vectors and those left over at the end of a row, or of a thread's part, one by one, which
rounds otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from ssd.compiled.addresses import kernel
from ssd.compiled.functions import FUNCTIONS, apply, norm, spread, sum_of_squares, turn
from ssd.compiled.vectors import KINDS
from ssd.model.layers.replace import MOST_ERROR, MOST_NUMBERS, Replaced, agrees, has_hooks, parents

_NAMES: Final = tuple(FUNCTIONS)
_WORK = 20
"""Of a number, as multiplications."""


class Activation(nn.Module):
    """A function of each number by itself, of float32, bfloat16 or float16; computed in float32."""

    def __init__(self, name: str) -> None:
        """``name`` : of `FUNCTIONS`."""
        super().__init__()
        self.name = name
        self._number = _NAMES.index(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x : [..., n], whose rows may be parts of wider ones. Returns its shape."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        arguments = (
            self._number, KINDS[str(x.dtype)], rows.data_ptr(), rows.stride(0) * x.itemsize, out.data_ptr(), *rows.shape
        )  # fmt: skip
        spread(_apply, arguments, rows.shape[0], _WORK * x.numel(), torch.get_num_threads)
        return out

    __call__ = forward  # without torch's search for hooks


def fuse_activations(model: nn.Module) -> Iterator[Replaced]:
    """Put an `Activation` in the place of modules that compute the same on a few numbers; what was replaced."""
    dtype = next((p.dtype for p in model.parameters() if p.dtype in MOST_ERROR), torch.float32)
    for parent in parents(model):
        for name, child in list(parent.named_children()):
            found = _same(child, dtype)
            if found is not None:
                setattr(parent, name, found)
                yield Replaced(parent, name, lambda child=child: child)  # type: ignore[misc]


@torch.inference_mode()
def _same(module: nn.Module, dtype: torch.dtype) -> Activation | None:
    """One that computes what ``module`` does, if that is a function without weights that we have."""
    if (
        isinstance(module, (Activation, nn.Identity))
        or next(module.children(), None) is not None
        or next(iter(module.state_dict()), None) is not None
        or has_hooks(module)
        or len(inspect.signature(module.forward).parameters) != 1
    ):
        return None
    x = torch.cat([torch.linspace(-12, 12, 97), torch.linspace(-0.5, 0.5, 31)]).to(dtype)[None]
    try:
        wanted = module(x)
    except Exception:  # it takes something else
        return None
    candidates = (Activation(name) for name in _NAMES) if isinstance(wanted, torch.Tensor) else ()
    return next((found for found in candidates if agrees(found(x), wanted, MOST_ERROR[dtype])), None)


@kernel
def _apply(  # pragma: no cover - compiled
    number: int, kind: int, rows: int, row_bytes: int, out: int, num_rows: int, size: int, first: int, step: int
) -> None:
    """Addresses of ``kind`` [num_rows, size], ``rows`` so many bytes apart, ``out`` contiguous."""
    for row in range(first, num_rows, step):
        apply(kind, number, rows + row * row_bytes, out + row * size * (2 if kind else 4), size)


_PROBE_SCALES = (1.0, 30.0, 1e-3)
"""Of inputs: with the last one what is added to the mean square shows."""


class FusedNorm(nn.Module):
    """``weight * x / sqrt(mean(x ** 2) + eps)`` over the last axis (Zhang and Sennrich 2019, section 3).

    float32, bfloat16 or float16, as the weight; computed in float32.
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        """``weight`` : [n]. ``offset`` : what the model adds to it before it multiplies."""
        super().__init__()
        self._offset = offset
        self._kept = (weight.detach().float() + offset).contiguous()  # where the loop finds it
        self._address, self._size = self._kept.data_ptr(), len(weight)
        self._kind = KINDS[str(weight.dtype)]
        self.weight, self.eps = nn.Parameter(weight.detach(), requires_grad=False), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x : [..., n]. Returns the same shape."""
        if x.dtype != self.weight.dtype:
            return nn.functional.rms_norm(x.float(), self._kept.shape, self._kept, self.eps).to(x.dtype)
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // self._size
        arguments = (
            self._kind, self._offset == 0.0, x.data_ptr(), self._address, out.data_ptr(), rows, self._size, self.eps
        )  # fmt: skip
        spread(_normalise, arguments, rows, 4 * x.numel(), torch.get_num_threads)
        return out

    __call__ = forward  # without torch's search for hooks, which takes as long as the loop

    def take(self, weight: torch.Tensor) -> None:
        """Multiply by another weight from now on, of the same size, without the offset."""
        self.weight.copy_(weight)
        self._kept.copy_(weight.float() + self._offset)


def fuse_norms(model: nn.Module, make: Callable[[nn.Module], nn.Module | None] | None = None) -> Iterator[Replaced]:
    """Put faster layers in the place of those that compute the same on a few numbers; what was replaced, as it goes.

    make : of a layer one that computes the same, or None; a `FusedNorm` unless given.
    """
    for parent in parents(model):
        for name, child in list(parent.named_children()):
            fused = (make or _fused)(child)
            if fused is not None:
                setattr(parent, name, fused)
                yield Replaced(parent, name, lambda child=child: child)  # type: ignore[misc]


def weight_and_eps(norm: nn.Module) -> tuple[nn.Parameter, float] | None:
    """What a layer that may be such a norm, by its looks, computes with; None where it is another."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if (
        not type(norm).__name__.endswith("RMSNorm")
        or not isinstance(weight, nn.Parameter)
        or not isinstance(eps, float)
        or weight.dim() != 1
        or len(list(norm.parameters())) != 1
        or has_hooks(norm)
        or len(inspect.signature(norm.forward).parameters) != 1
    ):
        return None
    return weight, eps


def _fused(norm: nn.Module) -> FusedNorm | None:
    """One that computes what ``norm`` does, if it is such a layer: weights may be kept as they are or less 1."""
    found = weight_and_eps(norm)
    if found is None or found[0].dtype not in MOST_ERROR:
        return None
    for offset in (0.0, 1.0):
        fused = FusedNorm(*found, offset)
        if _norms_agree(norm, fused):
            return fused
    return None


@torch.inference_mode()
def _norms_agree(norm: nn.Module, fused: FusedNorm) -> bool:
    generator, dtype = torch.Generator().manual_seed(0), fused.weight.dtype
    for scale in _PROBE_SCALES:
        x = (scale * torch.randn(1, 3, len(fused.weight), generator=generator)).to(dtype)
        if not agrees(fused(x), norm(x), MOST_ERROR[dtype]):
            return False
    return True


@kernel
def _normalise(  # pragma: no cover - compiled
    kind: int, rounds_first: bool, x: int, weight: int, out: int,
    num_rows: int, size: int, eps: float, first: int, step: int,
) -> None:  # fmt: skip
    """Addresses of ``kind`` [num_rows, size], float32[size] and ``kind`` [num_rows, size]."""
    row_bytes = size * (2 if kind else 4)
    for row in range(first, num_rows, step):
        given, found = x + row * row_bytes, out + row * row_bytes
        factor = np.float32(1.0 / np.sqrt(np.float64(sum_of_squares(kind, given, size)) / size + eps))
        norm(kind, rounds_first, given, weight, found, size, factor)


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
            if plain is not None and not _turns_agree(plain, make, dtype, device, most_error):
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
def _turns_agree(plain: Rotary, make: MakeRotary, dtype: torch.dtype, device: torch.device, most_error: float) -> bool:
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
