"""The noise that drafting kernels foresee is the noise that the target draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from ssd.drafting.noise import gumbel_at, key_at, request_key
from ssd.model.sampling.noise import gumbel_noise
from tests.reference.noise import position_keys

VOCABULARY = 97


@njit
def gumbel_of(request: Any, position: int, token: int) -> float:
    """What a kernel foresees of one token at a position of the sequence that has this key."""
    return gumbel_at(key_at(request, position), token)


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 2**20),
    position=st.integers(0, 2**31),
    token=st.integers(0, VOCABULARY - 1),
)
def test_kernels_foresee_the_noise_of_every_token(seed: int, choice: int, position: int, token: int) -> None:
    keys = position_keys(seed, choice, np.array([position]))
    expected = gumbel_noise(torch.from_numpy(keys.view(np.int64)), VOCABULARY)[0, token].item()
    found = gumbel_of(np.uint64(request_key(seed, choice)), position, token)
    assert abs(found - expected) <= 1e-12 * (1 + abs(expected))
