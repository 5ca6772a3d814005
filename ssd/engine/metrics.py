"""Counters and histograms of an engine, which the server exports as metrics."""

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
    """Counts exceptions by the operation that failed, and logs an operation's 1st, 2nd, 4th, 8th ... exception."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def record(self, where: str, error: BaseException, consequence: str) -> None:
        """Count an exception in the operation ``where``; ``consequence`` says in the log message what happens next."""
        self.counts[where] += 1
        count = self.counts[where]
        if count.bit_count() == 1:
            log.error("%s failed (%d times so far): %s", where, count, consequence, exc_info=error)


class BestEffort:
    """Calls functions of drafters and caches. Their exceptions are counted and logged, but never fail a request."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._faults = FaultLog()

    def __call__(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except BaseException as error:
            self.record(error)
            return None

    def record(self, error: BaseException) -> None:
        """Count and log an exception of a drafter or cache; raise it again if it is meant to end the program."""
        reraise_exits(error)
        self.num_failures += 1
        self._faults.record("drafting or caching", error, "requests continue without it")


_SECONDS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8),
    *(1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
)
_TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_TOKENS = tuple(factor * 10**exponent for exponent in range(6) for factor in (1, 2, 5))
_MIN_VECTORISED = 16
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """A histogram with fixed buckets. One thread writes it, and any thread may read it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Create an empty histogram with ascending upper ``bounds``; one more bucket counts all larger values."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        if len(values) < _MIN_VECTORISED:
            for value in values.tolist():
                self.observe(value)
            return
        buckets, counts = np.unique(np.searchsorted(self.bounds, values), return_counts=True)
        for bucket, count in zip(buckets.tolist(), counts.tolist(), strict=True):
            self.counts[bucket] += count
        self.total += float(values.sum())


class EngineHistograms:
    """Histograms of latencies in seconds and of sizes in tokens.

    When a request ends or is cancelled, its values are added once, for the phases that it reached. Two histograms are
    filled earlier: ``inter_token`` after each forward pass, for every sequence in it, and ``step_tokens`` after each
    engine step.
    """

    def __init__(self) -> None:
        self.queue = Histogram(_SECONDS)  # the time from submission to admission
        self.prefill = Histogram(_SECONDS)  # the time from admission to the first token
        self.decode = Histogram(_SECONDS)  # the time from the first token to the last
        self.inference = Histogram(_SECONDS)  # the time from admission to the last token
        self.inter_token = Histogram(_TOKEN_SECONDS)  # between two passes that added tokens to a request
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.max_tokens = Histogram(_TOKENS)  # of the requests that set it
        self.step_tokens = Histogram(_STEP_TOKENS)  # the prompt tokens computed and the tokens generated in one step

    def observe_finished(self, request: Request, stats: RequestStats) -> None:
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
    """The number of draft tokens from one source, e.g. the prompt or the cache, and how many of them were accepted."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class EngineMetrics:
    """Counters of an engine, written by the thread that steps it and readable by any thread.

    Empty drafts are not counted. Accepted tokens are draft tokens that became output; ``accepted_per_position[i]``
    counts the drafts of which at least i + 1 tokens were accepted.
    """

    num_verify_steps: int = 0  # a forward pass counts once per sequence in it
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    by_source: dict[str, SourceCounts] = field(default_factory=dict)  # by ``Draft.source``
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafter_failures: int = 0  # failures of the drafter or the cache
    prefix_cache_queries: int = 0  # prompt tokens of requests that may reuse cached prefixes
    prefix_cache_hits: int = 0  # prompt tokens whose KV cache was reused
    num_preemptions: int = 0
    num_failed_passes: int = 0  # batched passes only; their sequences were retried alone
    integrity_violations: int = 0  # found by ``Engine.check``; 0 unless this program has a bug
    num_requests_finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    num_coupled_requests: int = 0  # finished requests that were sampled with shared noise
    histograms: EngineHistograms = field(default_factory=EngineHistograms)

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # the used share of the KV cache, 0..1

    def count_pass(self, batch: Batch) -> None:
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
        """Count the prompt tokens of a request when its prefill is complete.

        ``queried`` is whether the request may reuse cached prefixes. Only then its tokens count as prefix cache
        queries.
        """
        self.prompt_tokens += stats.num_prompt_tokens
        if queried:
            self.prefix_cache_queries += stats.num_prompt_tokens
            self.prefix_cache_hits += stats.num_cached_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """The mean number of output tokens per forward pass of a sequence, including passes without a draft."""
        return self.generation_tokens / self.num_verify_steps if self.num_verify_steps else 0.0
