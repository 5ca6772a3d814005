"""The keys of sampling noise: a pure function of (seed, choice, position), and of the stream it is drawn for.

Nothing is drawn from a stateful generator, so a token does not depend on how many tokens were drafted before it, on
the batch it ran in or on the steps it took: speculation on and off give the same tokens for the same seed. And whoever
knows the key knows the noise before the target has spoken.

The generator is SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 15):
its state is a counter, so its n-th output is ``mix(key + (n + 1) * GAMMA)`` at once. The key of a position is
derived from seed, choice and position by the same mixing function.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import inlined

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
"""SplitMix64's increment and multipliers."""

UInt64 = npt.NDArray[np.uint64]

CHOICE, DRAFT, ACCEPT, RECOVER = range(4)
"""Independent streams of one request: the target's own choices; and where drafts are verified by rejection, what the
draft model draws, whether a token is accepted, and what replaces a rejected one."""


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
        return _mix((_of_choice(seeds, choices, stream) ^ positions.astype(np.uint64)) + gamma)


def _of_choice(seeds: UInt64, choices: UInt64, stream: int) -> UInt64:
    gamma = np.uint64(GAMMA)
    return _mix((_mix(seeds + gamma) ^ (choices | np.uint64(stream << 32))) + gamma)


def uniform_noise(keys: UInt64) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each key: float64, the shape of ``keys``."""
    with np.errstate(over="ignore"):
        bits = _mix(keys + np.uint64(GAMMA)) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


UInt = Any
"""Numba's uint64, which Python has no type for."""

_TO_UNIT: Final = 2.0**-53
_BITS: Final = 0xFFFFFFFFFFFFFFFF


def request_key(seed: int, choice_index: int, stream: int = CHOICE) -> int:
    """What the keys of all positions of one sequence are derived from, for `key_at`: 64 bits. A microsecond."""
    return _mix_int((_mix_int((seed + GAMMA) & _BITS) ^ (choice_index | stream << 32)) + GAMMA & _BITS)


def _mix_int(z: int) -> int:
    z = (z ^ z >> 30) * MIX_1 & _BITS
    z = (z ^ z >> 27) * MIX_2 & _BITS
    return z ^ z >> 31


@inlined
def _mixed(z: UInt) -> UInt:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return z ^ (z >> np.uint64(31))


@inlined
def key_at(request: UInt, position: int) -> UInt:
    """For kernels: the key of a position, from the `request_key` of its sequence."""
    return _mixed((request ^ np.uint64(position)) + np.uint64(GAMMA))


@inlined
def gumbel_at(key: UInt, token: int) -> float:
    """For kernels: the noise of one token at a key; what `ssd.model.sampling.noise.gumbel_noise` says, but for rounding
    of the logarithm.
    """
    bits = _mixed(key + np.uint64(token + 1) * np.uint64(GAMMA)) >> np.uint64(11)
    return float(-math.log(-math.log((np.float64(bits) + 0.5) * _TO_UNIT)))
