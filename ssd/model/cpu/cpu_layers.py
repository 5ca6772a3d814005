"""Batch-invariant activations, RMS norms and rotary positions on a CPU.

The bits of a result depend only on its inputs. In torch they also depend on its index, because torch computes most
elements in SIMD vectors, but the last elements of a row or of a thread's share one by one, with other rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from ssd.jit.addresses import inlined, kernel
from ssd.model.cpu.parallel import factors_of, next_task, numbers_of, run_parallel
from ssd.model.cpu.simd import KINDS
from ssd.model.cpu.simd_functions import (
    FUNCTIONS,
    add_numbers,
    apply_function,
    multiply_numbers,
    rotate_pairs,
    scale_by_weights,
    sum_of_squares,
)
from ssd.model.layers.replace import (
    MAX_ERROR,
    MAX_LOOP_ELEMENTS,
    Replaced,
    agrees,
    has_plain_forward,
    swap,
    swap_forward,
)

_NAMES: Final = tuple(FUNCTIONS)
_WORK = 20  # the cost of computing one number, in multiplications


class Activation(nn.Module):
    """A batch-invariant activation function on a CPU for float32, bfloat16 or float16, computed in float32.

    ``name`` is a key of `FUNCTIONS`, for example "silu".
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._number = _NAMES.index(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        return self._compute(rows if rows.stride(-1) == 1 else rows.contiguous(), 0).view(x.shape)

    def gate(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return the activation of ``x`` times ``factor``, two halves of the rows of one tensor, [..., n]."""
        rows = x.view(-1, x.shape[-1])
        assert x.stride() == factor.stride() and rows.stride(1) == 1
        return self._compute(rows, factor.data_ptr()).view(x.shape)

    def _compute(self, rows: torch.Tensor, factor: int) -> torch.Tensor:
        out = torch.empty(rows.shape, dtype=rows.dtype)
        kind, row_bytes = KINDS[str(rows.dtype)], rows.stride(0) * rows.itemsize
        numbers = self._number, kind, rows.data_ptr(), row_bytes, factor, out.data_ptr(), rows.shape[1]
        run_parallel(_apply, numbers, rows.shape[0], _WORK * rows.numel())
        return out

    __call__ = forward  # without torch's search for hooks


def fuse_activations(model: nn.Module) -> Iterator[Replaced]:
    """Replace activation modules by `Activation`s with the same outputs on test inputs, up to rounding.

    Yields for each module a `Replaced` record, which can restore it.
    """
    dtype = next((p.dtype for p in model.parameters() if p.dtype in MAX_ERROR), torch.float32)
    return swap(model, lambda module: _matching_activation(module, dtype))


@torch.inference_mode()
def _matching_activation(module: nn.Module, dtype: torch.dtype) -> Activation | None:
    """Return an `Activation` that computes the same function as ``module``; None if SSD does not implement it."""
    has_parts = next(module.children(), None) is not None or bool(module.state_dict())
    if isinstance(module, (Activation, nn.Identity)) or has_parts or not has_plain_forward(module):
        return None
    x = torch.cat([torch.linspace(-12, 12, 97), torch.linspace(-0.5, 0.5, 31)]).to(dtype)[None]
    try:
        wanted = module(x)
    except Exception:  # it has other arguments
        return None
    candidates = (Activation(name) for name in _NAMES) if isinstance(wanted, torch.Tensor) else ()
    return next((found for found in candidates if agrees(found(x), wanted, MAX_ERROR[dtype])), None)


@kernel
def _apply(call: int) -> None:  # pragma: no cover - compiled
    numbers = numbers_of(call, 7)
    number, kind, rows, row_bytes = numbers[0], numbers[1], numbers[2], numbers[3]
    factor, out, size = numbers[4], numbers[5], numbers[6]
    row = next_task(call, -1)
    while row >= 0:
        target = out + row * size * (2 if kind else 4)
        apply_function(kind, number, rows + row * row_bytes, target, size)
        if factor:
            multiply_numbers(kind, target, factor + row * row_bytes, target, size)
        row = next_task(call, row)


_PROBE_SCALES = (1.0, 30.0, 1e-3)  # the scales of the test inputs; with the last one eps has a visible effect


class FusedNorm(nn.Module):
    """A batch-invariant RMS norm on a CPU: ``weight * x / sqrt(mean(x ** 2) + eps)`` (Zhang and Sennrich 2019).

    The norm is computed in float32, for a weight [n] and inputs of the same dtype: float32, bfloat16 or float16.
    ``offset`` is added to the weight: 1 in Gemma, whose checkpoints store the weight minus 1, and 0 in most models. For
    kernels that apply the norm themselves, `row_rule` contains three arguments of `normalise`: the address of the sum
    of weight and offset, ``rounds_first``, and eps.
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self._offset = offset
        self._kept = (weight.detach().float() + offset).contiguous()  # memory that the loop reads by address
        self._size, self._kind = len(weight), KINDS[str(weight.dtype)]
        self.weight, self.eps = nn.Parameter(weight.detach(), requires_grad=False), eps
        self.row_rule = self._kept.data_ptr(), offset == 0.0, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:
            return nn.functional.rms_norm(x.float(), self._kept.shape, self._kept, self.eps).to(x.dtype)
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // self._size
        weight, rounds_first, eps = self.row_rule
        numbers = self._kind, rounds_first, x.data_ptr(), weight, out.data_ptr(), self._size
        run_parallel(_normalise, numbers, rows, 4 * x.numel(), factors=(eps,))
        return out

    __call__ = forward  # without torch's search for hooks, which takes as long as the loop

    def copy_weight(self, weight: torch.Tensor) -> None:
        """Copy another weight of the same size into the norm; the other weight must not include the offset."""
        self.weight.copy_(weight)
        self._kept.copy_(weight.float() + self._offset)


NO_NORM: Final = (0, False, 0.0)
"""The `FusedNorm.row_rule` that stands for no norm."""


def add_residual(
    residual: torch.Tensor, x: torch.Tensor, output_norm: FusedNorm | None, norm: FusedNorm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``residual + output_norm(x)`` and the ``norm`` of this sum, bit-identical to the separate operations.

    The tensors are contiguous, [..., n]. Without ``output_norm``, ``x`` itself is added; without ``norm``, both
    results are the sum.
    """
    size = x.shape[-1]
    assert residual.is_contiguous() and x.is_contiguous() and residual.shape == x.shape and residual.dtype == x.dtype
    total = torch.empty_like(x)
    normed = total if norm is None else torch.empty_like(x)
    first, second = (NO_NORM if each is None else each.row_rule for each in (output_norm, norm))
    arrays = residual.data_ptr(), x.data_ptr(), total.data_ptr(), normed.data_ptr()
    numbers = KINDS[str(x.dtype)], *arrays, size, *first[:2], *second[:2]
    run_parallel(_add_residual, numbers, x.numel() // size, 10 * x.numel(), factors=(first[2], second[2]))
    return total, normed


# Returns norms for a weight and eps that differ in when they round, and in whether 1 is added to the weight.
MakeNorms = Callable[[nn.Parameter, float], Iterable[nn.Module]]


def _candidate_norms(weight: nn.Parameter, eps: float) -> Iterable[nn.Module]:
    return [FusedNorm(weight, eps, offset) for offset in (0.0, 1.0)]


def fuse_norms(model: nn.Module, make: MakeNorms = _candidate_norms) -> Iterator[Replaced]:
    """Replace each RMS norm of a model by a faster norm with the same outputs on test inputs, up to rounding.

    ``make`` returns candidates for a norm, and the candidate with the smallest error is used. If no candidate's error
    is small enough, the norm stays unchanged. Yields for each replaced norm a `Replaced` record, which can restore it.
    """
    return swap(model, lambda norm: _best_matching_norm(norm, make))


@torch.inference_mode()
def _best_matching_norm(norm: nn.Module, make: MakeNorms) -> nn.Module | None:
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if (
        not type(norm).__name__.endswith("RMSNorm")
        or not isinstance(weight, nn.Parameter)
        or not isinstance(eps, float)
        or weight.dim() != 1
        or weight.dtype not in MAX_ERROR
        or len(list(norm.parameters())) != 1
        or not has_plain_forward(norm)
    ):
        return None
    generator, least, best = torch.Generator().manual_seed(0), MAX_ERROR[weight.dtype], None
    given = [
        (scale * torch.randn(1, 3, len(weight), generator=generator)).to(weight.device, weight.dtype)
        for scale in _PROBE_SCALES
    ]
    for fused in make(weight, eps):
        pairs = [(fused(x), norm(x)) for x in given]
        if all(found.dtype == want.dtype and agrees(found, want, least) for found, want in pairs):
            best, least = (
                fused,
                max(float((found - want).float().norm() / want.float().norm()) for found, want in pairs),
            )
    return best


@kernel
def _normalise(call: int) -> None:  # pragma: no cover - compiled
    numbers, eps = numbers_of(call, 6), factors_of(call, 6, 1)[0]
    kind, rounds_first, x, weight = numbers[0], numbers[1] != 0, numbers[2], numbers[3]
    out, size = numbers[4], numbers[5]
    row_bytes = size * (2 if kind else 4)
    row = next_task(call, -1)
    while row >= 0:
        normalise(kind, rounds_first, x + row * row_bytes, weight, out + row * row_bytes, 1, size, eps)
        row = next_task(call, row)


@kernel
def _add_residual(call: int) -> None:  # pragma: no cover - compiled
    numbers, factors = numbers_of(call, 10), factors_of(call, 10, 2)
    kind, residual, x, total, normed = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    size, output_weight, output_rounds = numbers[5], numbers[6], numbers[7] != 0
    weight, rounds_first = numbers[8], numbers[9] != 0
    row = next_task(call, -1)
    while row >= 0:
        offset = row * size * (2 if kind else 4)
        added, target = x + offset, total + offset
        if output_weight:
            normalise(kind, output_rounds, added, output_weight, target, 1, size, factors[0])
            added = target
        add_numbers(kind, residual + offset, added, target, size)
        if weight:
            normalise(kind, rounds_first, target, weight, normed + offset, 1, size, factors[1])
        row = next_task(call, row)


@inlined
def normalise(  # pragma: no cover - compiled
    kind: int, rounds_first: bool, x: int, weight: int, out: int, num_rows: int, size: int, eps: float
) -> None:
    """Compute the RMS norm of rows.

    Arrays are given by their addresses. Input and output are [num_rows, size] of the dtype ``kind`` (see `KINDS`), and
    may be the same array; the weight is float32[size]. If ``rounds_first``, the normalised input is rounded to this
    dtype before it is multiplied by the weight.
    """
    row_bytes = size * (2 if kind else 4)
    for row in range(num_rows):
        given, found = x + row * row_bytes, out + row * row_bytes
        factor = np.float32(1.0 / np.sqrt(np.float64(sum_of_squares(kind, given, size)) / size + eps))
        scale_by_weights(kind, rounds_first, given, weight, found, size, factor)


ApplyRotary = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function that applies rotary position embeddings to queries and keys and returns the rotated queries and keys.

The arguments are queries and keys, [B, heads, T, dim], and the cosines and sines of the angles, [B, T, dim]. Elements i
and i + dim / 2 of a head are a pair, which is rotated by an angle (Su et al. 2021, section 3.4.2). The two products
and their sum are rounded as in torch.
"""

_NAME = "apply_rotary_pos_emb"
_HOST = torch.device("cpu")


def _rotate_both(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


class FusedRotary:
    """A replacement of transformers' function ``apply_rotary_pos_emb``, which applies rotary position embeddings.

    ``apply_rotary``, a faster function, computes queries and keys of at most ``max_elements`` elements each. ``plain``,
    the original function, computes larger inputs and those with another shape, dtype or memory layout.
    """

    def __init__(
        self, plain: Callable[..., Any], apply_rotary: ApplyRotary = _rotate_both, max_elements: int = MAX_LOOP_ELEMENTS
    ) -> None:
        self.plain, self.apply_rotary, self._max_elements = plain, apply_rotary, max_elements

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if args or kwargs or not all(self._fits(x, cos, sin) for x in (q, k)):
            return self.plain(q, k, cos, sin, *args, **kwargs)
        return self.apply_rotary(q, k, cos, sin)

    def _fits(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        return (
            x.dtype == cos.dtype == sin.dtype
            and x.dtype in MAX_ERROR
            and x.dim() == 4
            and x.numel() <= self._max_elements
            and cos.shape == sin.shape == (x.shape[0], x.shape[2], x.shape[3])
            and x.shape[3] % 2 == 0
            and x.stride(3) == 1
            and cos.is_contiguous()
            and sin.is_contiguous()
        )


def fuse_rotary(
    model: nn.Module,
    apply_rotary: ApplyRotary = _rotate_both,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _HOST,
    max_error: float = 1e-6,
    max_elements: int = MAX_LOOP_ELEMENTS,
) -> Iterator[Replaced]:
    """Make a model's attention modules apply rotary position embeddings by ``apply_rotary``, a faster function.

    ``apply_rotary`` is used only if it agrees with transformers' function on test inputs of ``dtype`` on ``device``, up
    to a relative error of ``max_error``, and only for queries and keys of at most ``max_elements`` elements each.
    Yields for each module a `Replaced` record, which can restore it.
    """
    copies: dict[FunctionType, FunctionType | None] = {}
    for module in model.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or "forward" in vars(module):
            continue
        if forward not in copies:
            plain = forward.__globals__.get(_NAME) if _NAME in forward.__code__.co_names else None
            own = None if plain is None else FusedRotary(plain, apply_rotary, max_elements)
            agree = own is not None and _rotary_agrees(own, dtype, device, max_error)
            copies[forward] = _with_rotary(forward, own) if own is not None and agree else None
        copy = copies[forward]
        if copy is not None:
            yield swap_forward(module, copy)


def _with_rotary(forward: FunctionType, rotary: FusedRotary) -> FunctionType:
    """Return a copy of ``forward`` in which the global name ``apply_rotary_pos_emb`` refers to ``rotary``."""
    names = {**forward.__globals__, _NAME: rotary}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@torch.inference_mode()
def _rotary_agrees(own: FusedRotary, dtype: torch.dtype, device: torch.device, max_error: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(*shape, generator=generator).to(device, dtype)
        for shape in ((2, 3, 5, 8), (2, 1, 5, 8), *[(2, 5, 8)] * 2)
    ]
    try:
        wanted = own.plain(*given)
    except Exception:  # it has other arguments
        return False
    return all(agrees(got, want, max_error) for got, want in zip(own(*given), wanted, strict=True))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    row, head, position, _ = [each * x.itemsize for each in x.stride()]
    rows, heads, width, dim = x.shape
    given, sizes = (x.data_ptr(), row, head, position), (rows, heads, width, dim)
    rotate_rows(KINDS[str(x.dtype)], given, sizes, cos.data_ptr(), sin.data_ptr(), out.data_ptr())
    return out


@kernel
def rotate_rows(  # pragma: no cover - compiled
    kind: int, given: tuple[int, int, int, int], sizes: tuple[int, int, int, int], cos: int, sin: int, out: int
) -> None:
    """Apply rotary position embeddings to queries or keys, [rows, heads, T, dim].

    Arrays are given by their addresses. ``given`` contains the address of the input and the number of bytes between its
    rows, heads and positions. The other arrays are contiguous. If the input is contiguous, ``out`` may be the same
    array.
    """
    x, row_bytes, head_bytes, position_bytes = given
    num_rows, num_heads, width, dim = sizes
    size = dim * (2 if kind else 4)
    for row in range(num_rows):
        for head in range(num_heads):
            for t in range(width):
                pairs = x + row * row_bytes + head * head_bytes + t * position_bytes
                angle = (row * width + t) * size
                found = out + ((row * num_heads + head) * width + t) * size
                rotate_pairs(kind, pairs, cos + angle, sin + angle, found, dim // 2)
