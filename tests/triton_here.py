"""Triton's kernels compiled where there is a GPU, else interpreted; a test module that imports this is skipped without.

`conftest.py` tells triton to interpret before anything can import it.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from ssd.model.kv.attention import KERNELS
from ssd.model.kv.kv_cache import LAYOUTS

HAS_GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")
assert HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1", "without a GPU triton's kernels need TRITON_INTERPRET=1"

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def _interprets_loops() -> bool:
    """Whether the interpreter takes the ends of a loop that a kernel computes."""
    from triton.runtime import interpreter

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            int(np.zeros(1, np.int32))
    except TypeError:  # since numpy 2.4, and triton 3.6 relies on it
        return "int(self.handle.data)" not in inspect.getsource(interpreter)
    return True


runs_loops = pytest.mark.skipif(
    not HAS_GPU and not _interprets_loops(), reason="this triton interprets no loops with a numpy as new as this"
)


@contextmanager
def caches_as_on_a_device() -> Iterator[None]:
    """Keys laid out, and torch attending, as on a GPU: a CPU has a layout and a kernel of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(LAYOUTS, "cpu", raising=False)
        patch.delitem(KERNELS, "cpu", raising=False)
        yield
