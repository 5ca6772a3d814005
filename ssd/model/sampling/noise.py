"""Sampling noise that is a pure function of (seed, choice, position, token id), and of the stream it is drawn for.

Nothing is drawn from a stateful generator, so a token does not depend on how many tokens were drafted before it, on
the batch it ran in or on the steps it took: speculation on and off give the same tokens for the same seed.

The generator is SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 15):
its state is a counter, so its n-th output is ``mix(key + (n + 1) * GAMMA)`` at once. The key of a position is
derived from seed, choice and position by the same mixing function.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
"""SplitMix64's increment and multipliers."""

LOWEST_TEMPERATURE = 1e-4
"""One of 1e-6 would overflow float32; below 1e-4 the law is greedy to any measurement."""

UInt64 = npt.NDArray[np.uint64]

CHOICE, DRAFT, ACCEPT, RECOVER = range(4)
"""Independent streams of one request: the target's own choices; and where drafts are verified by rejection, what the
draft model draws, whether a token is accepted, and what replaces a rejected one."""


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """What a pass needs to choose tokens itself.

    ``keys`` : uint64[B, T], of `position_keys`. ``temperatures`` : float32[B, T], 0 where the most probable token is
    to be chosen.
    """

    keys: UInt64
    temperatures: npt.NDArray[np.float32]


def _mix(z: UInt64) -> UInt64:
    """SplitMix64's output function, elementwise."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return z ^ (z >> np.uint64(31))


def position_keys(seed: int, choice_index: int, positions: npt.NDArray[np.int64], stream: int = CHOICE) -> UInt64:
    """One generator key per absolute position: uint64, the shape of ``positions``."""
    seeds = np.full(positions.shape, seed & 0xFFFFFFFFFFFFFFFF, np.uint64)
    return keys_of(seeds, np.full(positions.shape, choice_index, np.uint64), positions, stream)


def keys_of(seeds: UInt64, choices: UInt64, positions: npt.NDArray[np.int64], stream: int = CHOICE) -> UInt64:
    """Generator keys of many sequences at once, see `position_keys`: arguments broadcast, uint64 of their shape."""
    gamma = np.uint64(GAMMA)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        key = _mix(seeds + gamma)
        key = _mix((key ^ (choices | np.uint64(stream << 32))) + gamma)
        return _mix((key ^ positions.astype(np.uint64)) + gamma)


def uniform_noise(keys: UInt64) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each key: float64, the shape of ``keys``."""
    with np.errstate(over="ignore"):
        bits = _mix(keys + np.uint64(GAMMA)) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def gumbel_noise_of(keys: UInt64, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """As `gumbel_noise`, for a few tokens: keys uint64[N, 1], token_ids int64[N, M] to float64[N, M]."""
    with np.errstate(over="ignore"):
        at_token = keys + token_ids.astype(np.uint64) * np.uint64(GAMMA)
    return -np.log(-np.log(uniform_noise(at_token)))


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for every token of the vocabulary at each key, on the keys' device.

    keys : int64[...], the bits of ``position_keys``. Returns float64[..., vocab_size].

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

    logits : [N, V], any float type. keys : int64[N], the bits of ``position_keys``. temperatures : float32[N], 0 where
    the logits themselves decide. Returns float64[N, V].
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
