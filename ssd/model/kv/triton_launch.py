"""Kernels that are launched while the one before them ends: programmatic dependent launch, which Hopper has.

Of a pass of few positions a tenth goes into beginning kernels. Import this module only where triton is installed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_gdc = getattr(tl.extra.cuda, "gdc_wait", None)


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Options of the launch of a kernel that calls `take_turn` before it reads what others wrote, or writes."""
    can = device.type == "cuda" and _gdc is not None and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"IS_EARLY": True, "launch_pdl": True} if can else {"IS_EARLY": False}


@triton.jit
def take_turn(IS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the end of the kernel before; the one behind may be launched, and waits here in its turn."""
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
