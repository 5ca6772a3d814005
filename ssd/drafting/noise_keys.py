"""The generator of sampling noise: a key is 64 bits, and gives every token of the vocabulary its noise.

Nothing is drawn from a stateful generator, so a token does not depend on how many tokens were drafted before it, on
the batch it ran in or on the steps it took: speculation on and off give the same tokens. And whoever knows the key
knows the noise before the target has spoken. What keys are made of says `sequence_noise`.

The generator is SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 15):
its state is a counter, so its n-th output is ``mix(key + (n + 1) * GAMMA)`` at once.
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

UInt = Any
"""Numba's uint64, which Python has no type for."""

_TO_UNIT: Final = 2.0**-53
_BITS: Final = 0xFFFFFFFFFFFFFFFF


def request_key(seed: int, choice_index: int) -> int:
    """What all keys of one sequence are derived from, see `key_at`: 64 bits. A microsecond."""
    return _mix_int((_mix_int((seed + GAMMA) & _BITS) ^ choice_index) + GAMMA & _BITS)


def _mix_int(z: int) -> int:
    z = (z ^ z >> 30) * MIX_1 & _BITS
    z = (z ^ z >> 27) * MIX_2 & _BITS
    return z ^ z >> 31


@inlined
def mixed(z: UInt) -> UInt:
    """For kernels: SplitMix64's output function."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return z ^ (z >> np.uint64(31))


@inlined
def key_at(request: UInt, place: UInt) -> UInt:
    """For kernels: the key of a place, 64 bits that tell it from all others of the sequence, from its `request_key`."""
    return mixed((request ^ np.uint64(place)) + np.uint64(GAMMA))


@inlined
def gumbel_at(key: UInt, token: int) -> float:
    """For kernels: the noise of one token at a key; what `ssd.model.sampling.noise.gumbel_noise` says, but for rounding
    of the logarithm.
    """
    bits = mixed(key + np.uint64(token + 1) * np.uint64(GAMMA)) >> np.uint64(11)
    return float(-math.log(-math.log((np.float64(bits) + 0.5) * _TO_UNIT)))
