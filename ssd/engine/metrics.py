"""Counters of an engine, which the server exports: requests, tokens, latencies, sizes and faults."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ssd.engine.batch import Batch
from ssd.engine.request import Request, RequestStats, counts_by_source
from ssd.errors import reraise_exits

log = logging.getLogger(__name__)
T = TypeVar("T")


class FaultLog:
    """Counts faults by location, and logs the 1st, 2nd, 4th, 8th ... fault of each location with its traceback."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def record(self, where: str, error: BaseException, consequence: str) -> None:
        """Count a fault of the location ``where``; ``consequence`` describes its effect in the log."""
        self.counts[where] += 1
        count = self.counts[where]
        if count.bit_count() == 1:
            log.error("%s failed (%d times so far): %s", where, count, consequence, exc_info=error)


class BestEffort:
    """Calls into drafters and caches whose failures are counted and logged, and never fail a request."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._faults = FaultLog()

    def __call__(self, call: Callable[[], T]) -> T | None:
        """Return the result of ``call``, or None if it raises."""
        try:
            return call()
        except BaseException as error:
            self.record(error)
            return None

    def record(self, error: BaseException) -> None:
        """Count and log an error; raise it again if it is meant to end the program."""
        reraise_exits(error)
        self.num_failures += 1
        self._faults.record("drafting or caching", error, "requests continue without it")


_SECONDS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240,
    480, 960,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
    20, 40, 80,
)  # fmt: skip
_TOKENS = tuple(factor * 10**exponent for exponent in range(6) for factor in (1, 2, 5))
_MIN_VECTORISED = 16
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """A histogram with fixed buckets. Written by one thread, read by any."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Create an empty histogram; ``bounds`` are ascending upper bounds, and larger values are counted too."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value. O(log bounds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count several values. O(n log bounds)."""
        if len(values) < _MIN_VECTORISED:
            for value in values.tolist():
                self.observe(value)
            return
        buckets, counts = np.unique(np.searchsorted(self.bounds, values), return_counts=True)
        for bucket, count in zip(buckets.tolist(), counts.tolist(), strict=True):
            self.counts[bucket] += count
        self.total += float(values.sum())


class EngineHistograms:
    """Latencies in seconds and sizes in tokens. Written by the thread that steps the engine, read by any.

    All but ``inter_token`` and ``step_tokens`` are observed when a request ends, cancelled requests included. Only the
    phases that the request has reached are observed.
    """

    def __init__(self) -> None:
        self.queue = Histogram(_SECONDS)
        """The time from submission to admission."""
        self.prefill = Histogram(_SECONDS)
        """The time from admission to the first token."""
        self.decode = Histogram(_SECONDS)
        """The time from the first token to the last."""
        self.inference = Histogram(_SECONDS)
        """The time from admission to the last token."""
        self.inter_token = Histogram(_TOKEN_SECONDS)
        """The time between two passes that gave a request tokens: one observation per pass, however many tokens it
        gave.
        """
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.max_tokens = Histogram(_TOKENS)
        """The ``max_tokens`` of the request; if it has none, the tokens that are left in the context."""
        self.step_tokens = Histogram(_STEP_TOKENS)
        """The prompt tokens computed and the tokens generated in one step."""

    def observe_finished(self, request: Request, stats: RequestStats) -> None:
        """Observe a request that has ended for any reason."""
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


@dataclass(slots=True)
class SourceCounts:
    """The drafted and the accepted tokens of one source of drafts."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class EngineMetrics:
    """Counters of an engine. Written by the thread that steps it, read by any; all but the last three only grow.

    ``num_drafts`` counts drafts that were not empty. ``num_accepted_tokens`` and ``accepted_per_position`` count draft
    tokens that were emitted; entry i is token i of a chain, or of the accepted path of a tree.
    """

    num_verify_steps: int = 0
    """The number of rows of all forward passes, with or without a draft."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    by_source: dict[str, SourceCounts] = field(default_factory=dict)
    """The counts of each ``Draft.source``."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafter_failures: int = 0
    """The number of failures of the drafter or the cache; the step continued without it."""
    prefix_cache_queries: int = 0
    """The number of prompt tokens of requests that may reuse cached prefixes, counted when the prompt is computed."""
    prefix_cache_hits: int = 0
    """The number of prompt tokens whose KV cache was reused."""
    num_preemptions: int = 0
    """The number of times that a running sequence was preempted by a more urgent one."""
    num_failed_passes: int = 0
    """The number of batched passes that failed; each of their requests was retried alone."""
    integrity_violations: int = 0
    """The number of inconsistencies that ``Engine.check`` found in the idle engine; 0 unless this program has a bug."""
    num_requests_finished: dict[str, int] = field(default_factory=dict)
    """The number of finished requests by finish reason."""
    num_coupled_requests: int = 0
    """The number of finished requests that were sampled with shared noise."""
    histograms: EngineHistograms = field(default_factory=EngineHistograms)

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """The used share of the KV cache, 0..1."""

    def count_pass(self, batch: Batch) -> None:
        """Add the counts of a forward pass."""
        record = batch.record
        self.num_verify_steps += record.num_committed_rows
        self.generation_tokens += record.num_tokens
        self.histograms.inter_token.observe_all(batch.gaps[: record.num_gaps])
        if not record.num_drafts:
            return
        self.num_drafts += record.num_drafts
        for name, drafted, accepted in counts_by_source(record.by_source[0], record.by_source[1]):
            counts = self.by_source.setdefault(name, SourceCounts())
            counts.num_draft_tokens += drafted
            counts.num_accepted_tokens += accepted
            self.num_draft_tokens += drafted
            self.num_accepted_tokens += accepted
        self.accepted_per_position += [0] * (record.max_accepted - len(self.accepted_per_position))
        for position in range(record.max_accepted):
            self.accepted_per_position[position] += int(record.accepted_by_position[position])
        for b in batch.traced:
            steps = batch.sequences[b].stats.steps
            if batch.committed[b] > 0 and batch.num_drafted[b] and steps is not None:
                steps.append((int(batch.num_drafted[b]), int(batch.num_accepted[b])))

    def count_prompt(self, stats: RequestStats, *, queried: bool) -> None:
        """Count a prompt that has been computed; ``queried`` is True if it was allowed to reuse cached prefixes."""
        self.prompt_tokens += stats.num_prompt_tokens
        if queried:
            self.prefix_cache_queries += stats.num_prompt_tokens
            self.prefix_cache_hits += stats.num_cached_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """The output tokens per verify step, steps without a draft included."""
        return self.generation_tokens / self.num_verify_steps if self.num_verify_steps else 0.0
