"""What seals and merges take, and whether a merge in the rebuild process slows down lookups in this one."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.index.contexts import Context
from benchmarks.index.ingest import FINGERPRINT
from benchmarks.index.lookups import Prober, Spread, spread
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache import DEFAULT_NAMESPACE, CacheSet, SuffixCache
from ssd.retrieval.merge_worker import MergeJob, MergeWorker
from ssd.retrieval.names import new_segment_id
from ssd.retrieval.segment import Segment
from ssd.retrieval.suffix_array import build_segment

Tokens = npt.NDArray[np.int32]

_SEALS = 50
_TURNS, _LONGEST_S = 8, 60.0
_REST_S = 0.5
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Seals:
    """Milliseconds to seal one tail of ``tokens`` tokens."""

    tokens: int
    sort_ms: Spread
    """The suffix array alone, in memory."""
    seal_ms: Spread
    """All of it: sort, write and sync the file, replace the manifest."""


@dataclass(frozen=True, slots=True)
class Merging:
    """Microseconds of proposals beside the largest merge that the cache's rules allow, and between such merges."""

    inputs: list[int]
    """Sizes of the segments that were merged, tokens."""
    merge_s: float
    """Median time of that merge, file synced."""
    num_merges: int
    merging: Spread
    idle: Spread
    p99_over_idle: float


def measure_seals(stream: Iterator[Tokens], seal_tokens: int) -> Seals:
    """Seal tails of a cache that does nothing by itself and never merges, in a temporary directory."""
    sort_ms: list[float] = []
    seal_ms: list[float] = []
    index = IndexConfig(capacity_tokens=4 * _SEALS * seal_tokens, seal_tokens=seal_tokens, merge_fanout=2 * _SEALS)
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as directory:
        config = CacheConfig(index=index, directory=Path(directory))
        with CacheSet(config, FINGERPRINT, inline=True) as caches:
            cache = caches.get()
            for _ in range(_SEALS):
                parts: list[Tokens] = []
                while cache.stats().num_tail_tokens < seal_tokens:
                    tokens = next(stream)
                    cache.append(tokens)
                    parts += [tokens, np.array([-1], np.int32)]
                text = np.concatenate(parts)
                began = time.perf_counter()
                build_segment(text, start=0, segment_id="0")
                sorted_at = time.perf_counter()
                cache.maintain()
                sort_ms.append((sorted_at - began) * 1e3)
                seal_ms.append((time.perf_counter() - sorted_at) * 1e3)
            if cache.stats().num_sealed != _SEALS:
                raise AssertionError(f"expected {_SEALS} seals: {cache.stats()}")
    return Seals(seal_tokens, spread(sort_ms), spread(seal_ms))


def largest_merge(segments: Sequence[Segment], max_tokens: int, fanout: int) -> list[Segment]:
    """Two to ``fanout`` of the ring's segments, as large as fit into ``max_tokens`` together, largest first.

    The two smallest where none do; none where there are no two.
    """
    by_size = sorted((segment for segment in segments if segment.start is not None), key=len, reverse=True)
    for first in range(len(by_size)):
        chosen: list[Segment] = []
        for segment in by_size[first:]:
            if len(chosen) < fanout and sum(map(len, chosen)) + len(segment) <= max_tokens:
                chosen.append(segment)
        if len(chosen) >= 2:
            return chosen
    return by_size[-2:] if len(by_size) >= 2 else []


def measure_merging(
    cache: SuffixCache, directory: Path, index: IndexConfig, contexts: Sequence[Context]
) -> Merging | None:
    """Propose all the time while a rebuild process merges segments of ``cache`` again and again, and in between.

    Merges and rests take turns, so that both meet the same machine. ``directory`` : the cache set's; the results are
    removed. None when there are no two segments.
    """
    worker, prober = MergeWorker(), Prober()
    during: list[float] = []
    between: list[float] = []
    merge_s: list[float] = []
    turns = 0

    def ask(times: list[float]) -> None:
        nonlocal turns
        turns += 1
        times.append(prober.one(contexts[turns % len(contexts)].tokens, cache.snapshot())[0])

    with tempfile.TemporaryDirectory(prefix="merge-", dir=directory.parent) as scratch:
        inputs = _hold(cache, directory / DEFAULT_NAMESPACE, Path(scratch), index)
        if len(inputs) < 2:
            return None
        try:
            worker.start().result()
            # The first merge finds the process still importing.
            worker.submit(_job(Path(scratch), inputs)).result()
            deadline = time.perf_counter() + _LONGEST_S
            while len(merge_s) < 2 or (len(merge_s) < _TURNS and time.perf_counter() < deadline):
                began = time.perf_counter()
                merge = worker.submit(_job(Path(scratch), inputs))
                while not merge.done():
                    ask(during)
                merge.result()
                merge_s.append(time.perf_counter() - began)
                rest_until = time.perf_counter() + _REST_S
                while time.perf_counter() < rest_until:
                    ask(between)
        finally:
            worker.close()
    merging, idle = spread(during), spread(between)
    return Merging(
        inputs=[len(segment) for segment in inputs],
        merge_s=round(float(np.median(merge_s)), 3),
        num_merges=len(merge_s),
        merging=merging,
        idle=idle,
        p99_over_idle=round(merging.p99 / max(0.1, idle.p99), 2),
    )


def _hold(cache: SuffixCache, directory: Path, scratch: Path, index: IndexConfig) -> list[Segment]:
    """Link the files of the largest merge into ``scratch``: the cache may remove its own at any time."""
    for _ in range(_ATTEMPTS):
        chosen = largest_merge(cache.snapshot().segments, max(2, index.capacity_tokens // 8), index.merge_fanout)
        try:
            for segment in chosen:
                os.link(directory / f"{segment.segment_id}.seg", scratch / f"{segment.segment_id}.seg")
        except (FileNotFoundError, FileExistsError):  # merged or evicted meanwhile
            for path in scratch.iterdir():
                path.unlink()
            time.sleep(0.1)
            continue
        return chosen
    raise AssertionError("the cache's segments do not stay long enough to be merged")


def _job(scratch: Path, inputs: Sequence[Segment]) -> MergeJob:
    return MergeJob(
        inputs=tuple(str(scratch / f"{segment.segment_id}.seg") for segment in inputs),
        output=str(scratch / "merged"),
        segment_id=new_segment_id(0),
        start=0,
        fingerprint=FINGERPRINT,
        namespace=DEFAULT_NAMESPACE,
        num_tokens=sum(map(len, inputs)),
        durable=True,
    )
