"""Streams of requests that repeat much, little and not at all."""

from __future__ import annotations

from benchmarks.streams import Stream, made_stream, recorded_stream
from benchmarks.workloads import MIXED, NO_REPEATS, Mix
from ssd.text.codec import TextCodec

MADE = {
    "mixed": MIXED,
    "new": NO_REPEATS,
    "often": Mix(name="often", recurring=0.9, variant=0.05, pool_size=8),
    "variants": Mix(name="variants", recurring=0.0, variant=0.9, pool_size=6),
}
"""Made of the standard library, by their names."""


def open_workload(name: str, codec: TextCodec, num_requests: int, seed: int, most_tokens: int) -> Stream:
    """A made stream, or that of a recorded trace. Raises ConfigError where there is none of this name."""
    if name in MADE:
        return made_stream(MADE[name], codec, num_requests, seed, most_tokens)
    return recorded_stream(name, codec, num_requests, most_tokens)
