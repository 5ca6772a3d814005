"""Lookups in what was built, against a slow count in what it was built from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ssd.config import CacheConfig
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.files import read_manifest
from ssd.retrieval.search import longest_match

_LENGTHS = (1, 2, 4, 8, 16, 32)


def check(directory: Path, tokens: Path, num_samples: int, seed: int) -> int:
    """How many contexts were looked up; raises AssertionError where one is not found as often as it is there."""
    text = np.load(tokens, mmap_mode="r")
    random = np.random.default_rng(seed)
    manifest = read_manifest(directory)
    assert manifest is not None
    checked = 0
    with CacheSet(CacheConfig(), manifest.fingerprint, inline=True) as caches:
        caches.get().add_static_directory(directory)
        snapshot = caches.get().snapshot()
        if snapshot.num_tokens != len(text):
            raise AssertionError(f"{snapshot.num_tokens} tokens are stored of {len(text)}")
        while checked < num_samples:
            length = _LENGTHS[checked % len(_LENGTHS)]
            start = int(random.integers(len(text) - length))
            context = np.array(text[start : start + length], np.int32)
            if (context < 0).any():
                continue
            found = longest_match(snapshot, context, length)
            expected = count(text, context)
            if (found.length, found.support) != (length, expected):
                raise AssertionError(f"a context of {length} tokens is there {expected} times, found: {found}")
            checked += 1
    return checked


def count(text: npt.NDArray[np.int32], context: npt.NDArray[np.int32]) -> int:
    """How often ``context`` stands in ``text``. O(text)."""
    places = np.flatnonzero(text[: len(text) - len(context) + 1] == context[0])
    for offset in range(1, len(context)):
        places = places[text[places + offset] == context[offset]]
    return len(places)
