"""Texts that every replica can foresee, so that it can ask for those it was not told yet; and where they go."""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.retrieval.packed import Tokens

FINGERPRINT: Final = "0123456789abcdef" * 2
LOOKED_UP: Final = "default"
"""The namespace whose texts are looked up."""

VOCABULARY: Final = 32_000
KEY_TOKENS: Final = 16
"""A text's first tokens, which no other text has: what a lookup knows of it."""

MEAN_TOKENS: Final = 400


def text_of(writer: int, number: int) -> Tokens:
    """int32[n], the ``number``-th text that ``writer`` says; 200 <= n <= 600."""
    random = np.random.default_rng([writer, number])
    return random.integers(0, VOCABULARY, random.integers(200, 601)).astype(np.int32)
