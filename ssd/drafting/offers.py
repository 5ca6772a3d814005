"""What costlier sources propose, as it is handed to the drafter that judges all candidates together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

HEAD: Final = 0
"""A draft head, reading the target's hidden states."""
MODEL: Final = 1
"""A draft model."""
GUESS: Final = 2
"""The target itself, at positions behind a token that was wrong."""
KINDS: Final = 3

MAX_OFFERED: Final = 64
"""Tokens offered for one draft; what is more is left out."""


@dataclass(frozen=True, slots=True, eq=False)
class Offers:
    """A forest of proposed tokens.

    ``token_ids`` : int32[n], n <= MAX_OFFERED. ``parents`` : int32[n], of each the index of the one it goes on from,
    smaller than its own; -1 after the context. ``chances`` : float64[n], the chance that its source gives each once
    those before it came; the acceptance model learns what that is worth. ``kinds`` : int32[n], who says so.
    """

    token_ids: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    chances: npt.NDArray[np.float64]
    kinds: npt.NDArray[np.int32]
