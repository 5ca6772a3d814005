"""Sampling noise at keys that say which: Gumbel noise for every token of the vocabulary.

The keys are those of ``ssd/drafting/noise.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ssd.drafting.noise import GAMMA, MIX_1, MIX_2, UInt64

LOWEST_TEMPERATURE = 1e-4
"""One of 1e-6 would overflow float32; below 1e-4 the law is greedy to any measurement."""


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """What a pass needs to choose tokens itself.

    ``keys`` : uint64[B, T], of `SequenceNoise.keys`. ``temperatures`` : float32[B, T], 0 where the most probable token
    is to be chosen.
    """

    keys: UInt64
    temperatures: npt.NDArray[np.float32]


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for every token of the vocabulary at each key, on the keys' device.

    keys : int64[...], the bits of `SequenceNoise.keys`. Returns float64[..., vocab_size].

    ``-log(-log(u))`` with u = (k + 1/2) / 2**53, k the upper 53 bits: never 0 or 1.
    """
    counter = torch.arange(1, vocab_size + 1, device=keys.device)
    z = keys[..., None] + counter * _signed(GAMMA)  # int64 wraps as uint64 does
    z = (z ^ _shift_right(z, 30)) * _signed(MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(MIX_2)
    z = z ^ _shift_right(z, 31)
    uniform = (_shift_right(z, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def noisy_scores(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """What a token is chosen by where nothing but a temperature is asked for: its argmax is the token.

    logits : [N, V], any float type. keys : int64[N], the bits of `SequenceNoise.keys`. temperatures : float32[N], 0
    where the logits themselves decide. Returns float64[N, V].
    """
    scores = logits.float() / temperatures.clamp_min(LOWEST_TEMPERATURE)[:, None]
    noisy = scores.double() + gumbel_noise(keys, logits.shape[-1])
    return torch.where(temperatures[:, None] > 0, noisy, logits.double())


def _signed(constant: int) -> int:
    """A 64-bit pattern as the signed integer that torch wants."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
