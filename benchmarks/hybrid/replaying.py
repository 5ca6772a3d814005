"""Recorded requests decoded one after another, each in every way; then it is in the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.hybrid.costs import pass_seconds
from benchmarks.hybrid.decoders import Decoder, Place
from benchmarks.hybrid.recordings import Recording
from ssd.config import CacheConfig
from ssd.retrieval.cache import CacheSet

_NO_FINGERPRINT = "0" * 32


class _Sums:
    """What one way adds up to."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_tokens = self.num_steps = self.num_asked = 0


def replay(recordings: Sequence[Recording], ways: Mapping[str, Decoder]) -> dict[str, Any]:
    """Speed-ups over plain decoding by way, and how often steps of "both" asked the other. Nothing is seen ahead.

    The first output token comes with the prefill and is not counted.
    """
    sums = {name: _Sums() for name in ways}
    plain = 0.0
    with CacheSet(CacheConfig(), _NO_FINGERPRINT, inline=True) as caches:
        cache = caches.get()
        for number, recording in enumerate(recordings):
            text = np.concatenate([recording.prompt, recording.output])
            snapshot = cache.snapshot()
            plain += sum(pass_seconds(1, place) for place in range(len(recording.prompt) + 1, len(text)))
            for name, decoder in ways.items():
                place = Place(str(number), recording, text, snapshot)
                _decode(place, decoder, sums[name])
            cache.append(text, prompt_length=len(recording.prompt))
            cache.maintain()
    both = sums["both"]
    return {
        "requests": len(recordings),
        **{name: plain / found.seconds if found.seconds else 1.0 for name, found in sums.items()},
        "tokens_per_step": both.num_tokens / max(1, both.num_steps),
        "other_asked_share": both.num_asked / max(1, both.num_steps),
    }


def _decode(place: Place, decoder: Decoder, sums: _Sums) -> None:
    """One request to its end; what every step emits is checked where it is found out."""
    while place.left > 0:
        took = decoder.step(place)
        if not 1 <= took.emitted <= place.left:
            raise AssertionError(f"a step emitted {took.emitted} of {place.left} tokens")
        place.known += took.emitted
        sums.seconds += took.seconds
        sums.num_tokens += took.emitted
        sums.num_steps += 1
        sums.num_asked += took.asked
    decoder.finish(place.request_id)
