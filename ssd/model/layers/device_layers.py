"""All faster layers that there are for a device."""

from __future__ import annotations

from functools import partial

import torch

from ssd.model.layers.fused_rotary import fuse_rotary
from ssd.model.layers.replace import MOST_ERROR, Replace


def device_layers(device: torch.device, dtype: torch.dtype) -> tuple[Replace, ...]:
    """Layers of one launch each, in place of those that model libraries write as many; none where triton is missing.

    dtype : of the model's numbers.
    """
    try:
        from ssd.model.layers.triton_gate import fuse_gates_by_triton
        from ssd.model.layers.triton_norm import fuse_norms_by_triton
        from ssd.model.layers.triton_rotary import TritonRotary
    except ImportError:  # it comes with CUDA builds of torch
        return ()
    if dtype not in MOST_ERROR:
        return ()
    turn: Replace = partial(
        fuse_rotary, make=TritonRotary, dtype=dtype, device=device, most_error=min(MOST_ERROR[dtype], 1e-3)
    )
    return fuse_norms_by_triton, turn, fuse_gates_by_triton
