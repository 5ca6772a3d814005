"""What happened in an engine, as plain counts, which the server exports: requests, tokens, times and sizes, faults."""

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
from ssd.engine.request import Request, RequestStats, by_source_name
from ssd.errors import require_fault

log = logging.getLogger(__name__)
T = TypeVar("T")


class Faults:
    """Counts faults by where they happened, and logs the 1st, 2nd, 4th, 8th ... of each place with its traceback."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, where: str, error: BaseException, consequence: str) -> None:
        """``consequence`` : what it meant, for the log."""
        self.counts[where] += 1
        count = self.counts[where]
        if count.bit_count() == 1:
            log.error("%s failed (%d times so far): %s", where, count, consequence, exc_info=error)


class BestEffort:
    """Best-effort calls into a drafter or a cache: a failure is a count and a log line, never a failed request."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._faults = Faults()

    def __call__(self, call: Callable[[], T]) -> T | None:
        """What ``call`` returns, None where it raises."""
        try:
            return call()
        except BaseException as error:
            self.note(error)
            return None

    def note(self, error: BaseException) -> None:
        """Count and log what a call raised; raises it again where it is no fault but tells the program to end."""
        require_fault(error)
        self.num_failures += 1
        self._faults.note("drafting or caching", error, "requests go on without")


_SECONDS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240,
    480, 960,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
    20, 40, 80,
)  # fmt: skip
_TOKENS = tuple(factor * 10**exponent for exponent in range(6) for factor in (1, 2, 5))
_FEW = 16
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

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count many numbers. O(n log bounds)."""
        if len(values) < _FEW:
            for value in values.tolist():
                self.observe(value)
            return
        places, counts = np.unique(np.searchsorted(self.bounds, values), return_counts=True)
        for place, count in zip(places.tolist(), counts.tolist(), strict=True):
            self.counts[place] += count
        self.total += float(values.sum())


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


@dataclass(slots=True)
class SourceCounts:
    """Drafted and emitted tokens of one source of drafts."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class EngineMetrics:
    """Written by the thread that steps the engine, read by any; every count only grows, except the last three.

    ``num_drafts`` counts drafts that were not empty. ``num_accepted_tokens`` and ``accepted_per_position`` count
    draft tokens that were emitted; entry i is token i of the draft, or of a tree's path.
    """

    num_verify_steps: int = 0
    """Rows verified: one per running sequence and forward pass, with or without a draft."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    by_source: dict[str, SourceCounts] = field(default_factory=dict)
    """By ``Draft.source``."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafter_failures: int = 0
    """Times the drafter or the cache failed and the step went on without."""
    prefix_cache_queries: int = 0
    """Prompt tokens of requests that may use what was computed for others, counted once the prompt is computed."""
    prefix_cache_hits: int = 0
    """How many of them did not have to be computed."""
    num_preemptions: int = 0
    """Times a running sequence made room for a more urgent one."""
    num_failed_passes: int = 0
    """Forward passes that failed; the requests in them were computed again, each alone."""
    integrity_violations: int = 0
    """What ``Engine.check`` found while the engine was idle; 0 unless this program has a fault."""
    num_requests_finished: dict[str, int] = field(default_factory=dict)
    """By finish reason."""
    num_coupled_requests: int = 0
    """How many of them were drawn with noise that others share."""
    histograms: EngineHistograms = field(default_factory=EngineHistograms)

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV cache's positions in use, 0..1."""

    def count_rows(self, batch: Batch) -> None:
        """Add what was counted of a pass."""
        frame = batch.frame
        self.num_verify_steps += frame.num_taken
        self.generation_tokens += frame.num_tokens
        self.histograms.inter_token.observe_all(batch.gaps[: frame.num_gaps])
        if not frame.num_drafts:
            return
        self.num_drafts += frame.num_drafts
        for name, drafted, accepted in by_source_name(frame.by_source[0], frame.by_source[1]):
            counts = self.by_source.setdefault(name, SourceCounts())
            counts.num_draft_tokens += drafted
            counts.num_accepted_tokens += accepted
            self.num_draft_tokens += drafted
            self.num_accepted_tokens += accepted
        self.accepted_per_position += [0] * (frame.num_positions - len(self.accepted_per_position))
        for position in range(frame.num_positions):
            self.accepted_per_position[position] += int(frame.positions[position])
        for b in batch.noted:
            steps = batch.sequences[b].stats.steps
            if batch.taken[b] > 0 and batch.drafted[b] and steps is not None:
                steps.append((int(batch.drafted[b]), int(batch.accepted[b])))

    def count_prompt(self, stats: RequestStats, *, queried: bool) -> None:
        """One prompt that has been computed; ``queried`` : where reuse was possible."""
        self.prompt_tokens += stats.num_prompt_tokens
        if queried:
            self.prefix_cache_queries += stats.num_prompt_tokens
            self.prefix_cache_hits += stats.num_cached_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """Output tokens per verify step, steps without a draft included."""
        return self.generation_tokens / self.num_verify_steps if self.num_verify_steps else 0.0
