"""Activation functions on a CPU whose bits depend on the number alone.

torch computes most numbers by vectors and those left over at the end of a row, or of a thread's part, one by one, which
rounds otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from ssd.compiled.addresses import kernel
from ssd.compiled.functions import FUNCTIONS, apply
from ssd.compiled.spread import spread
from ssd.compiled.vectors import KINDS
from ssd.model.layers.replace import MOST_ERROR, Replaced, agrees, has_hooks, parents

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
