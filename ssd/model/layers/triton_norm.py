"""Root mean square layer normalisation on a device in one launch: a Triton kernel.

Model libraries write it as half a dozen tensor operations. Each is a launch of a microsecond or two even in a recorded
step, which are more of a step than a layer's share of the weights. Import this module only where triton is installed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import nn

from ssd.model.layers.fused_norm import fuse_norms, weight_and_eps
from ssd.model.layers.replace import MOST_ERROR, Replaced, agrees

_PROBE_SCALES = (1.0, 30.0, 1e-3)
"""Of inputs: with the last one what is added to the mean square shows."""


class TritonNorm(nn.Module):
    """``weight * x / sqrt(mean(x ** 2) + eps)`` over the last axis (Zhang and Sennrich 2019, section 3).

    Computed in float32, in and out in the type of the numbers.
    """

    def __init__(self, weight: nn.Parameter, eps: float, *, offset: float, rounds_first: bool) -> None:
        """``weight`` : [n]. ``offset`` : what the model adds to it. ``rounds_first`` : x is rounded before the product
        with the weight, too.
        """
        super().__init__()
        self.weight, self.eps = weight, eps
        self._offset, self._rounds_first, self._block = offset, rounds_first, triton.next_power_of_2(len(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x : [..., n]. Returns the same shape, contiguous."""
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _normalise[(len(rows),)](
                rows, self.weight, out, rows.stride(0), x.shape[-1], self.eps, self._offset,
                ROUNDS_FIRST=self._rounds_first, BLOCK=self._block, num_warps=min(8, max(1, self._block // 512)),
            )  # fmt: skip
        return out

    __call__ = forward  # without torch's search for hooks


def fuse_norms_by_triton(model: nn.Module) -> Iterator[Replaced]:
    """Put `TritonNorm` in the place of layers that compute the same on a few numbers; what was replaced, as it goes."""
    return fuse_norms(model, _fused)


@torch.inference_mode()
def _fused(norm: nn.Module) -> TritonNorm | None:
    """The one that comes nearest to ``norm``, if that is such a layer. They differ in when libraries round."""
    found = weight_and_eps(norm)
    if found is None or found[0].dtype not in MOST_ERROR:
        return None
    weight, eps = found
    generator = torch.Generator().manual_seed(0)
    given = [
        (scale * torch.randn(1, 3, len(weight), generator=generator)).to(weight.device, weight.dtype)
        for scale in _PROBE_SCALES
    ]
    expected = [norm(x) for x in given]
    best: TritonNorm | None = None
    least = MOST_ERROR[weight.dtype]
    for offset in (0.0, 1.0):
        for rounds_first in (True, False):
            fused = TritonNorm(weight, eps, offset=offset, rounds_first=rounds_first)
            pairs = [(fused(x), want) for x, want in zip(given, expected, strict=True)]
            if all(found.dtype == want.dtype and agrees(found, want, least) for found, want in pairs):
                best = fused
                least = max(float((found - want).float().norm() / want.float().norm()) for found, want in pairs)
    return best


@triton.jit
def _normalise(  # type: ignore[no-untyped-def]
    x, weight, out, row_stride, size, eps, offset, ROUNDS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of x, [rows, size], to one of out, which is contiguous. Grid (rows,)."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    given = tl.load(x + row * row_stride + at, mask=at < size, other=0.0).to(tl.float32)
    weights = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32) + offset
    kind = out.dtype.element_ty
    found = given * tl.rsqrt(tl.sum(given * given, 0) / size + eps)
    if ROUNDS_FIRST:
        found = found.to(kind).to(tl.float32)
    tl.store(out + row * size + at, (found * weights).to(kind), mask=at < size)
