"""How long requests and steps took, and how large they were: plain counts by bounds; the server exports them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ssd.engine.request import Request, RequestStats

_SECONDS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240,
    480, 960,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
    20, 40, 80,
)  # fmt: skip
_TOKENS = tuple(factor * 10**exponent for exponent in range(6) for factor in (1, 2, 5))
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Numbers counted by the bounds they are not above. Written by one thread, read by any."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` : ascending; numbers above the last are counted, too."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one number. O(log bounds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class EngineHistograms:
    """Times in seconds, sizes in tokens. Written by the thread that steps the engine, read by any.

    All but ``inter_token`` and ``step_tokens`` are observed when a request ends, cancelled ones included, as far as it
    got: one that never had a slot has no time in one.
    """

    def __init__(self) -> None:
        self.queue = Histogram(_SECONDS)
        """From submission to the first slot."""
        self.prefill = Histogram(_SECONDS)
        """From the first slot to the first token."""
        self.decode = Histogram(_SECONDS)
        """From the first token to the last."""
        self.inference = Histogram(_SECONDS)
        """From the first slot to the last token."""
        self.inter_token = Histogram(_TOKEN_SECONDS)
        """Between two passes that gave a request tokens: one observation a pass, however many tokens it gave."""
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.max_tokens = Histogram(_TOKENS)
        """The limit of the request, what is left of the context where it brings none."""
        self.step_tokens = Histogram(_STEP_TOKENS)
        """Prompt tokens computed and tokens generated in one step."""

    def count_tokens(self, stats: RequestStats, now: float) -> None:
        """A pass gave a request tokens at time ``now``."""
        if stats.first_token_s:
            self.inter_token.observe(now - stats.last_token_s)
        else:
            stats.first_token_s = now
        stats.last_token_s = now

    def count_ended(self, request: Request, stats: RequestStats) -> None:
        """A request has ended, however it did."""
        self.prompt_tokens.observe(stats.num_prompt_tokens)
        self.generation_tokens.observe(stats.num_output_tokens)
        if request.sampling.max_tokens is not None:
            self.max_tokens.observe(request.sampling.max_tokens)
        if stats.started_s:
            self.queue.observe(stats.started_s - stats.submitted_s)
        if stats.first_token_s:
            self.prefill.observe(stats.first_token_s - stats.started_s)
            self.decode.observe(stats.last_token_s - stats.first_token_s)
            self.inference.observe(stats.last_token_s - stats.started_s)
