"""Triton's kernels compiled where there is a GPU, else interpreted; a test module that imports this is skipped without.

Import it before any module that imports triton.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU and "triton" not in sys.modules:  # read when triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")
if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
