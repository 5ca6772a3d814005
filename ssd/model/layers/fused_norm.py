"""Root mean square layer normalisation on a CPU as one loop.

Model libraries write it as half a dozen tensor operations. For the few positions of a decode or verify pass each of
them costs more to launch than to compute, see ``benchmarks.layers``; and here a row's bits depend on no other row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from ssd.compiled.addresses import kernel
from ssd.compiled.functions import norm, sum_of_squares
from ssd.compiled.spread import spread
from ssd.compiled.vectors import KINDS
from ssd.model.layers.replace import MOST_ERROR, Replaced, agrees, has_hooks, parents

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
        if _agree(norm, fused):
            return fused
    return None


@torch.inference_mode()
def _agree(norm: nn.Module, fused: FusedNorm) -> bool:
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
