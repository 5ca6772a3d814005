"""Sampling by an argmax: the token with the largest score after Gumbel noise (Gumbel 1954; Maddison et al. 2014)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ssd.config import SamplingParams
from ssd.drafting.noise_keys import UInt64
from ssd.model.sampling.noise import gumbel_noise
from ssd.model.sampling.sampled_tokens import host_tokens
from ssd.model.sampling.sampler import Sampler, sampler_of

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
