"""The kernel that samples tokens on a device, and the check that it says what the formula says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from ssd.errors import first_line
from ssd.model.sampling.noise import noisy_scores

log = logging.getLogger(__name__)

Sampler = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits [N, V], keys int64[N] and temperatures float32[N] to tokens int64[N]: the argmax of `noisy_scores`."""

_MOST_ERROR = 1e-12
"""Relative, of float64 scores: what two logarithms may differ by."""

_PROBE_ROWS, _PROBE_TOKENS = 24, 5000


@cache
def sampler_of(device: torch.device) -> Sampler | None:
    """Our kernel on CUDA, where triton is installed and it runs; None where torch's operations must do."""
    if device.type != "cuda":
        return None
    try:
        from ssd.model.sampling.triton_sampling import triton_sampler
    except ImportError:  # it comes with CUDA builds of torch
        return None
    return triton_sampler if samples_rightly(triton_sampler, device) else None


def samples_rightly(sampler: Sampler, device: torch.device) -> bool:
    """Whether ``sampler`` runs on the device and chooses among random logits as the formula does; a warning if not."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (_PROBE_ROWS, _PROBE_TOKENS)).astype(np.float32))
    keys, temperatures = (each.to(device) for each in random_noise(_PROBE_ROWS))
    try:
        for dtype in (torch.float32, torch.float16):
            cast = logits.to(device, dtype)
            check_tokens(sampler(cast, keys, temperatures), cast, keys, temperatures)
    # A driver or a compiler that does not play along: torch's operations are right in any case.
    except Exception as failure:
        log.warning("tokens are sampled by torch: %s", first_line(failure))
        log.debug("tokens are sampled by torch", exc_info=True)
        return False
    return True


def random_noise(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, int64[count], and temperatures, float32[count], to check a sampler with: 0, low and high ones."""
    random = np.random.default_rng(1)
    keys = random.integers(-(2**63), 2**63 - 1, count)
    return torch.from_numpy(keys), torch.from_numpy(random.choice(np.array([0, 1e-6, 0.7, 1, 9], np.float32), count))


def check_tokens(tokens: torch.Tensor, logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor) -> None:
    """Raise ValueError unless each token is the formula's, or scores as much but for rounding. As `Sampler` has them.

    The formula takes some dozen times the memory of the logits.
    """
    scores = noisy_scores(logits, keys, temperatures)
    best, found = scores.amax(-1), scores.gather(-1, tokens[:, None])[:, 0]
    is_right = best - found <= _MOST_ERROR * (1 + best.abs())
    if not bool(is_right.all()):
        raise ValueError(f"{int((~is_right).sum())} of {len(tokens)} tokens are not those of logits and noise")
