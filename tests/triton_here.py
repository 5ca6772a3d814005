"""Triton's kernels compiled where there is a GPU, else interpreted; a test module that imports this is skipped without.

`conftest.py` tells triton to interpret before anything can import it.
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")
assert HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1", "without a GPU triton's kernels need TRITON_INTERPRET=1"

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
