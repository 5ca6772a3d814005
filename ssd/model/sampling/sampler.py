"""The kernel that samples tokens on a device, and the check that it says what the formula says."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from ssd.config import SamplingParams
from ssd.drafting.noise import UInt64
from ssd.errors import first_line
from ssd.model.sampling.noise import LOWEST_TEMPERATURE, gumbel_noise, noisy_scores
from ssd.model.sampling.row_choice import choose_rows

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


_AS_IT_IS = [SamplingParams()]


def argmax_with_noise(scores: torch.Tensor, keys: UInt64) -> npt.NDArray[np.int64]:
    """The token of each row with the largest score after Gumbel noise: a sample of softmax(scores).

    scores : float32[N, V], -inf where a token is ruled out; at least one is finite in each row.
    keys : uint64[N]. Returns int64[N]; the first of equals.
    """
    if scores.device.type != "cpu":
        on_device = torch.from_numpy(keys.view(np.int64)).to(scores.device)
        best: npt.NDArray[np.int64] = device_argmax(scores, on_device, sampler_of(scores.device)).cpu().numpy()
        return best
    scores = scores.contiguous()[None]
    return host_tokens(scores, [0], [scores.shape[1]], _AS_IT_IS, np.ascontiguousarray(keys))


def device_argmax(scores: torch.Tensor, keys: torch.Tensor, sampler: Sampler | None) -> torch.Tensor:
    """As `argmax_with_noise`, by ``sampler`` or else by torch's operations: int64[N]. keys : int64[N], their bits."""
    if sampler is None:
        return (scores.double() + gumbel_noise(keys, scores.shape[-1])).argmax(-1)
    return sampler(scores, keys, torch.ones(len(scores), device=scores.device))


_ALL_TOKENS = float(1 << 62)
_LOWEST = float(np.float32(LOWEST_TEMPERATURE))


def host_tokens(
    logits: torch.Tensor, rows: Sequence[int], counts: Sequence[int], params: Sequence[SamplingParams], keys: UInt64
) -> npt.NDArray[np.int64]:
    """The argmax of `truncated_scores` and the noise of each key, of equals the first: int64[sum(counts)].

    logits : [B, T, V], any float type, on a CPU. Of row ``rows[r]`` the first ``counts[r]`` positions, under
    ``params[r]`` (temperature > 0). keys : uint64[sum(counts)]. O(V) for a position as a rule.
    """
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        logits = logits[list(rows), : max(counts)].float()
        rows = range(len(rows))
    return choose_rows(
        logits.numpy(),
        np.array(rows, np.int64),
        np.array(counts, np.int64),
        np.array([max(p.temperature, _LOWEST) for p in params], np.float32),
        np.array([(p.top_k if p.top_k > 0 else _ALL_TOKENS, p.top_p, log_min_p(p)) for p in params]),
        keys,
    )


def log_min_p(params: SamplingParams) -> float:
    """How far below the highest a score may be; -inf where there is no such bound."""
    return math.log(params.min_p) if params.min_p > 0.0 else -math.inf
