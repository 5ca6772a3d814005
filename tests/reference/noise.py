"""Keys of sampling noise as they are written down: of positions, and of contexts counted one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = 0xFFFFFFFFFFFFFFFF


def mix(z: int) -> int:
    """SplitMix64's output function."""
    z = (z ^ z >> 30) * MIX_1 & _BITS
    z = (z ^ z >> 27) * MIX_2 & _BITS
    return z ^ z >> 31


def key_of(seed: int, number: int, place: int) -> int:
    """The key of a place of one sequence."""
    of_seed = mix(((seed & _BITS) + GAMMA) & _BITS)
    return mix((mix((of_seed ^ number) + GAMMA & _BITS) ^ place) + GAMMA & _BITS)


def gumbel(key: int, token: int) -> float:
    """Noise of one token."""
    bits = mix((key + (token + 1) * GAMMA) & _BITS) >> 11
    return -math.log(-math.log((bits + 0.5) * 2.0**-53))


def position_keys(seed: int, choice_index: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The keys of a seed's noise: uint64, the shape of ``positions``."""
    keys = [key_of(seed, choice_index, position) for position in positions.ravel().tolist()]
    return np.array(keys, np.uint64).reshape(positions.shape)


def coupled_key(secret: int, stream: int, text: Sequence[int], window: int) -> int:
    """The key of the token that follows ``text``."""

    def hash_of(end: int) -> int:
        found = 0
        for token in reversed(text[max(0, end - window) : end]):
            found = mix((found ^ token) + GAMMA & _BITS)
        return max(found, 1)

    here = hash_of(len(text))
    times = sum(hash_of(end) == here for end in range(len(text)))
    return key_of(secret, stream, mix(here + (times + 1) * GAMMA & _BITS))
