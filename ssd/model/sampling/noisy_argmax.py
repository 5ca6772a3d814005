"""Sampling by an argmax: the token with the largest score after Gumbel noise (Gumbel 1954; Maddison et al. 2014)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ssd.compiled.addresses import kernel
from ssd.drafting.noise_keys import GAMMA, MIX_1, MIX_2, UInt64
from ssd.model.sampling.noise import gumbel_noise
from ssd.model.sampling.sampler import Sampler, sampler_of


def argmax_with_noise(scores: torch.Tensor, keys: UInt64) -> npt.NDArray[np.int64]:
    """The token of each row with the largest score after Gumbel noise: a sample of softmax(scores).

    scores : float32[N, V], -inf where a token is ruled out; at least one is finite in each row.
    keys : uint64[N]. Returns int64[N]; the first of equals.
    """
    if scores.device.type != "cpu":
        on_device = torch.from_numpy(keys.view(np.int64)).to(scores.device)
        best: npt.NDArray[np.int64] = device_argmax(scores, on_device, sampler_of(scores.device)).cpu().numpy()
        return best
    highest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - highest)
    chosen: npt.NDArray[np.int64] = _argmax_with_noise(
        scores.contiguous().numpy(), weights.numpy(), highest[:, 0].double().numpy(), np.ascontiguousarray(keys)
    )
    return chosen


def device_argmax(scores: torch.Tensor, keys: torch.Tensor, sampler: Sampler | None) -> torch.Tensor:
    """As `argmax_with_noise`, by ``sampler`` or else by torch's operations: int64[N]. keys : int64[N], their bits."""
    if sampler is None:
        return (scores.double() + gumbel_noise(keys, scores.shape[-1])).argmax(-1)
    return sampler(scores, keys, torch.ones(len(scores), device=scores.device))


@kernel
def _argmax_with_noise(
    scores: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    highest: npt.NDArray[np.float64],
    keys: UInt64,
) -> npt.NDArray[np.int64]:  # pragma: no cover - compiled
    """Same result as ``(scores + gumbel_noise).argmax(-1)`` with logarithms for a few tokens only.

    Token i beats the best score b so far when -log(u) < exp(score_i - b). As -log(u) >= 1 - u, no token with
    1 - u >= exp(score_i - b) can: the common case is a hash and a comparison (with a margin for float32 rounding).
    """
    num_rows, vocab_size = scores.shape
    chosen = np.zeros(num_rows, np.int64)
    for row in range(num_rows):
        best = -np.inf
        bar = 0.0  # exp(best - highest)
        state = keys[row]
        for token in range(vocab_size):
            state += np.uint64(GAMMA)
            weight = weights[row, token]
            if weight == 0.0:
                continue
            z = (state ^ (state >> np.uint64(30))) * np.uint64(MIX_1)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
            bits = np.float64((z ^ (z >> np.uint64(31))) >> np.uint64(11)) + 0.5
            if (9007199254740992.0 - bits) * 1.1102230246251565e-16 * bar > weight * 1.001:
                continue
            score = np.float64(scores[row, token]) - np.log(-np.log(bits * 1.1102230246251565e-16))
            if score > best:
                best = score
                bar = np.exp(best - highest[row])
                chosen[row] = token
    return chosen
