"""What the rows of one call take beside one row, by their number and by the threads that look them up."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.index.contexts import DRAFT_TOKENS, sample_contexts
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.drafting.suffix.drafter import SuffixDrafter
from ssd.retrieval.snapshot import Snapshot

Tokens = npt.NDArray[np.int32]

_CONTEXTS = 4096
_REPEATS = 15
_LEAST_ROWS = 256
"""Asked for in one repeat, in as many calls as that takes: else one row would be timed in one call."""


@dataclass(frozen=True, slots=True)
class RowsFigure:
    """Medians over repeats, all sizes and threads in turn.

    ``us_per_row`` : microseconds of a call from Python, over its rows. ``times_one_row`` : the call over one row's, of
    the same repeat, on one thread.
    """

    rows: int
    threads: int
    us_per_row: float
    times_one_row: float


def measure(
    snapshot: Snapshot, sizes: Sequence[int], threads: Sequence[int], random: np.random.Generator
) -> list[RowsFigure]:
    """One figure for each size and number of threads; half of the contexts present in full, half broken, all new.

    Raises AssertionError when a draft is not what it is when its row is asked for alone.
    """
    contexts = [context.tokens for context in sample_contexts(snapshot, max(_CONTEXTS, *sizes), random)]
    drafters = {count: SuffixDrafter(lookup_threads=count) for count in {1, *threads}}
    for drafter in drafters.values():
        drafter.warm_up()
    _check(drafters, contexts[: max(sizes)], snapshot)
    fresh = itertools.cycle(contexts)
    pairs = [(1, 1), *itertools.product(sizes, threads)]
    times: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
    gc.collect()
    gc.disable()
    try:
        for _ in range(_REPEATS):
            for pair in times:
                times[pair].append(_time(drafters[pair[1]], fresh, pair[0], snapshot))
    finally:
        gc.enable()
    return [
        RowsFigure(
            size,
            count,
            round(float(np.median(times[size, count])), 2),
            round(size * float(np.median(np.divide(times[size, count], times[1, 1]))), 1),
        )
        for size, count in itertools.product(sizes, threads)
    ]


def _time(drafter: SuffixDrafter, contexts: Iterator[Tokens], size: int, snapshot: Snapshot) -> float:
    """Microseconds a row, the median of some calls."""
    took = []
    for _ in range(-(-_LEAST_ROWS // size)):
        requests = _requests(itertools.islice(contexts, size), snapshot)
        began = time.perf_counter_ns()
        drafter.propose(requests)
        took.append((time.perf_counter_ns() - began) / 1e3 / size)
        for request in requests:
            drafter.finish(request.request_id)
    return float(np.median(took))


def _requests(contexts: Iterator[Tokens], snapshot: Snapshot) -> list[DraftRequest]:
    return [
        DraftRequest(f"row-{row}", tokens, len(tokens), snapshot, DRAFT_TOKENS) for row, tokens in enumerate(contexts)
    ]


def _check(drafters: dict[int, SuffixDrafter], contexts: list[Tokens], snapshot: Snapshot) -> None:
    requests = _requests(iter(contexts), snapshot)
    alone = SuffixDrafter()
    alone.warm_up()  # which teaches, as it did the others
    expected = [alone.propose([request])[0] for request in requests]
    for count, drafter in drafters.items():
        found = drafter.propose(requests)
        if not all(map(_are_equal, found, expected)):
            raise AssertionError(f"drafts of {len(requests)} rows on {count} threads are not those of single rows")
        for request in requests:
            drafter.finish(request.request_id)


def _are_equal(one: Draft, other: Draft) -> bool:
    if not len(one.token_ids) and not len(other.token_ids):
        return True
    assert one.probabilities is not None and other.probabilities is not None
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.probabilities, other.probabilities)
