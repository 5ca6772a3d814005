"""How long a proposal takes on a given structure."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.index.contexts import CONTEXT_TOKENS, DRAFT_TOKENS, sample_contexts, sample_sequences
from ssd.config import DraftConfig
from ssd.drafting import Drafter, DraftRequest, make_drafter
from ssd.retrieval.search import longest_match
from ssd.retrieval.snapshot import Snapshot

Tokens = npt.NDArray[np.int32]

ROWS = 64
_BATCHES = 8  # in a pass
_SEQUENCES, _SEQUENCE_TOKENS = 100, 300
_CHECKED_MATCH_TOKENS = DraftConfig().max_match_length
_LEAST_AGREEING = 0.9


class Prober:
    """Asks a drafter and takes the time."""

    def __init__(self) -> None:
        self.drafter: Drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=DRAFT_TOKENS))
        self._number = 0
        warm_up = getattr(self.drafter, "warm_up", None)
        if warm_up is not None:
            warm_up()

    def _request(self, tokens: Tokens, snapshot: Snapshot) -> DraftRequest:
        self._number += 1
        return DraftRequest(f"probe-{self._number}", tokens, len(tokens), snapshot, DRAFT_TOKENS)

    def one(self, tokens: Tokens, snapshot: Snapshot) -> tuple[float, Tokens]:
        """Microseconds of one proposal by a new request, and its draft."""
        requests = [self._request(tokens, snapshot)]
        began = time.perf_counter_ns()
        drafts = self.drafter.propose(requests)
        took = time.perf_counter_ns() - began
        self.drafter.finish(requests[0].request_id)
        return took / 1e3, drafts[0].token_ids

    def batch(self, contexts: Sequence[Tokens], snapshot: Snapshot) -> float:
        """Microseconds of one call for all of ``contexts``, each a new request."""
        requests = [self._request(tokens, snapshot) for tokens in contexts]
        began = time.perf_counter_ns()
        self.drafter.propose(requests)
        took = time.perf_counter_ns() - began
        for request in requests:
            self.drafter.finish(request.request_id)
        return took / 1e3

    def follow(self, text: Tokens, snapshot: Snapshot) -> list[float]:
        """Decode ``text`` from its CONTEXT_TOKENS-th token on as the target would: microseconds of each step."""
        request = self._request(text[:CONTEXT_TOKENS], snapshot)
        times, at = [], CONTEXT_TOKENS
        while at < len(text):
            request.context = text[:at]
            began = time.perf_counter_ns()
            draft = self.drafter.propose([request])[0]
            times.append((time.perf_counter_ns() - began) / 1e3)
            length = min(len(draft.token_ids), len(text) - at)
            different = np.flatnonzero(draft.token_ids[:length] != text[at : at + length])
            accepted = int(different[0]) if len(different) else length
            self.drafter.observe(request.request_id, draft, accepted)
            at += accepted + 1
        self.drafter.finish(request.request_id)
        return times


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 99th percentile of ``n`` values, rounded to a tenth."""

    p50: float
    p99: float
    n: int


def percentile(values: Sequence[float] | npt.NDArray[np.float64], q: float) -> float:
    """Rounded to a tenth; 0.0 of nothing."""
    return round(float(np.percentile(np.asarray(values), q)), 1) if len(values) else 0.0


def spread(values: Sequence[float] | npt.NDArray[np.float64]) -> Spread:
    """Of ``values``."""
    return Spread(percentile(values, 50), percentile(values, 99), len(values))


@dataclass(frozen=True, slots=True)
class Lookups:
    """Microseconds of a call from Python; percentiles of a pass, the median over passes.

    Cold: contexts that are asked for the first time, half present, half broken. Warm: the same ones once more.
    """

    propose_us_p50: float
    propose_us_p99: float
    propose64_us_p50: float
    propose64_us_p99: float
    propose64_over_propose: float
    cold_passes_p50: list[float]
    warm: Spread
    present: Spread
    """Of the cold ones."""
    broken: Spread
    follow: Spread
    """A step of a request that decodes a stored sequence."""
    follow_tokens_per_step: float
    draft_tokens_mean: float
    checked_drafts: int
    """Drafts of contexts that stand in one place ..."""
    checked_drafts_equal: int
    """... and are what follows there."""


def measure(snapshot: Snapshot, random: np.random.Generator, *, passes: int = 3, count: int = 2000) -> Lookups:
    """``passes`` times ``count`` contexts, every one new. Raises AssertionError when drafts are not what was stored."""
    prober, follower = Prober(), Prober()  # following teaches a drafter, which is no business of the others
    cold: list[list[float]] = []
    warm: list[float] = []
    present: list[float] = []
    broken: list[float] = []
    rows: list[float] = []
    lengths: list[int] = []
    unique = agreeing = 0
    gc.collect()
    gc.disable()
    try:
        for _ in range(passes):
            contexts = sample_contexts(snapshot, count, random)
            cold.append([])
            for context in contexts:
                took, draft = prober.one(context.tokens, snapshot)
                cold[-1].append(took)
                (present if context.is_present else broken).append(took)
                lengths.append(len(draft))
                if context.is_present and longest_match(snapshot, context.tokens, _CHECKED_MATCH_TOKENS).support == 1:
                    unique += 1
                    agreeing += np.array_equal(draft, context.following[: len(draft)])
            warm += [prober.one(context.tokens, snapshot)[0] for context in contexts]
            fresh = [context.tokens for context in sample_contexts(snapshot, ROWS * _BATCHES, random)]
            rows += [prober.batch(fresh[i : i + ROWS], snapshot) for i in range(0, len(fresh), ROWS)]
        sequences = sample_sequences(snapshot, _SEQUENCES, _SEQUENCE_TOKENS, random)
        steps = [follower.follow(text, snapshot) for text in sequences]
    finally:
        gc.enable()
    if agreeing < _LEAST_AGREEING * unique:
        raise AssertionError(f"of {unique} contexts that stand in one place only {agreeing} drafts are what follows")
    p50 = float(np.median([np.percentile(times, 50) for times in cold]))
    p99 = float(np.median([np.percentile(times, 99) for times in cold]))
    followed = [took for times in steps for took in times]
    return Lookups(
        propose_us_p50=round(p50, 1),
        propose_us_p99=round(p99, 1),
        propose64_us_p50=percentile(rows, 50),
        propose64_us_p99=percentile(rows, 99),
        propose64_over_propose=round(float(np.percentile(rows, 50)) / p50, 1),
        cold_passes_p50=[percentile(times, 50) for times in cold],
        warm=spread(warm),
        present=spread(present),
        broken=spread(broken),
        follow=spread(followed),
        follow_tokens_per_step=round(len(steps) * (_SEQUENCE_TOKENS - CONTEXT_TOKENS) / max(1, len(followed)), 2),
        draft_tokens_mean=round(float(np.mean(lengths)), 2),
        checked_drafts=unique,
        checked_drafts_equal=int(agreeing),
    )
