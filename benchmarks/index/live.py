"""A cache under traffic: how soon new text is drafted, what upkeep costs, whom seals and merges delay."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.index.asked import Context, Prober, Spread, spread
from benchmarks.index.fill import FINGERPRINT, is_working, processor_s, rebuild_process, upkeep_threads
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache import DEFAULT_NAMESPACE, CacheSet, SuffixCache
from ssd.retrieval.merge_worker import MergeJob, MergeWorker
from ssd.retrieval.names import new_segment_id
from ssd.retrieval.segment import Segment
from ssd.retrieval.suffix_array import build_segment

Tokens = npt.NDArray[np.int32]

TOKENS_PER_S = 10_000
_PATIENCE_S = 10.0
_MARK_TOKENS = 3
_PAUSE_S = 0.001
_LOOK_FOR_PROCESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Beside:
    """What a thread saw that proposes about every millisecond."""

    propose_us: Spread
    propose_us_merging: Spread
    """While the rebuild process worked."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Ten thousand tokens a second arriving. Shares are of one core."""

    tokens_per_s: int
    freshness_ms_p99: float
    """The larger of the two below."""
    freshness_ms_same_thread: Spread
    """From just before an append until the appending thread drafts from the new text."""
    freshness_ms_other_thread: Spread
    """Until a thread that asks all the time does."""
    append_us: Spread
    maintenance_core_share: float
    """Sum of the three below."""
    rebuild_process_share: float
    cache_threads_share: float
    append_share: float
    num_completions: int
    num_sealed: int
    num_merged: int
    beside: Beside


class _Repeating:
    """A thread that does something again and again until it is told to stop; ``stop`` raises what it raised."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.turn()
        except BaseException as error:
            self._error = error

    def turn(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


class _Asker(_Repeating):
    """Proposes every millisecond or so, beside all that goes on."""

    def __init__(self, cache: SuffixCache, contexts: Sequence[Context]) -> None:
        self.resting_us: list[float] = []
        self.merging_us: list[float] = []
        self._cache = cache
        self._contexts = contexts
        self._prober = Prober()
        self._turns = 0
        self._process: int | None = None
        self._looked_at = -_LOOK_FOR_PROCESS_S
        super().__init__("asker")

    def turn(self) -> None:
        self._turns += 1
        context = self._contexts[self._turns % len(self._contexts)]
        was_merging = self._is_merging()
        took = self._prober.one(context.tokens, self._cache.snapshot())[0]
        (self.merging_us if was_merging and self._is_merging() else self.resting_us).append(took)
        time.sleep(_PAUSE_S)

    def _is_merging(self) -> bool:
        if time.monotonic() - self._looked_at > _LOOK_FOR_PROCESS_S:
            self._process, self._looked_at = rebuild_process(), time.monotonic()
        return self._process is not None and is_working(self._process)


class _Watcher(_Repeating):
    """Asks for what ``watch_for`` was given until it is drafted."""

    def __init__(self, cache: SuffixCache) -> None:
        self._cache = cache
        self._prober = Prober()
        self._wanted: tuple[Tokens, int] | None = None
        self._given = threading.Event()
        self._seen = threading.Event()
        self._seen_at = 0.0
        super().__init__("watcher")

    def watch_for(self, asked: Tokens, wanted: int) -> None:
        """Begin to ask."""
        self._seen.clear()
        self._wanted = asked, wanted
        self._given.set()

    def seen_at(self) -> float:
        """When it was drafted; waits for it. Raises AssertionError when it never is."""
        if not self._seen.wait(_PATIENCE_S):
            raise AssertionError("new text was not drafted by another thread")
        return self._seen_at

    def turn(self) -> None:
        if not self._given.wait(0.05):
            return
        assert self._wanted is not None
        if _drafts(self._prober, self._cache, *self._wanted):
            self._seen_at = time.perf_counter()
            self._given.clear()
            self._seen.set()


def _drafts(prober: Prober, cache: SuffixCache, asked: Tokens, wanted: int) -> bool:
    draft = prober.one(asked, cache.snapshot())[1]
    return len(draft) > 0 and int(draft[0]) == wanted


def _mark(tokens: Tokens, first_id: int) -> tuple[Tokens, Tokens, int]:
    """A copy with a run of ids from ``first_id`` on in its middle; a context that ends with them; what follows."""
    marked, place = tokens.copy(), len(tokens) // 2
    run = np.arange(first_id, first_id + _MARK_TOKENS, dtype=np.int32)
    marked[place : place + _MARK_TOKENS] = run
    return marked, np.concatenate([tokens[:2], run]), int(marked[place + _MARK_TOKENS])


class _ProcessorTime:
    """Of the rebuild process and the cache's threads, since it was made."""

    def __init__(self) -> None:
        self._process = rebuild_process()
        self._before = 0.0 if self._process is None else processor_s(self._process)
        self._threads = {thread: processor_s("self", thread) for thread in upkeep_threads()}

    def of_process(self) -> float:
        process = rebuild_process()
        if process is None:
            return 0.0
        return processor_s(process) - (self._before if process == self._process else 0.0)

    def of_threads(self) -> float:
        return sum(processor_s("self", thread) - self._threads.get(thread, 0.0) for thread in upkeep_threads())


def measure_traffic(
    cache: SuffixCache, stream: Iterator[Tokens], contexts: Sequence[Context], seconds: float, vocabulary: int
) -> Traffic:
    """TOKENS_PER_S for ``seconds``.

    Every completion holds three ids beyond ``vocabulary`` that no other has: what follows them can come from nowhere
    else. Raises AssertionError when it is not drafted.
    """
    asker, watcher = _Asker(cache, contexts), _Watcher(cache)
    prober = Prober()
    same_ms: list[float] = []
    other_ms: list[float] = []
    append_us: list[float] = []
    append_s, arrived = 0.0, 0
    used, before = _ProcessorTime(), cache.stats()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        tokens, asked, wanted = _mark(next(stream), vocabulary + _MARK_TOKENS * len(same_ms))
        watcher.watch_for(asked, wanted)
        at, used_before = time.perf_counter(), time.thread_time()
        cache.append(tokens)
        append_s += time.thread_time() - used_before
        append_us.append((time.perf_counter() - at) * 1e6)
        while not _drafts(prober, cache, asked, wanted):
            if time.perf_counter() - at > _PATIENCE_S:
                raise AssertionError("new text was not drafted by the thread that appended it")
        same_ms.append((time.perf_counter() - at) * 1e3)
        other_ms.append((watcher.seen_at() - at) * 1e3)
        arrived += len(tokens)
        time.sleep(max(0.0, began + arrived / TOKENS_PER_S - time.perf_counter()))
    elapsed = time.perf_counter() - began
    shares = [used.of_process() / elapsed, used.of_threads() / elapsed, append_s / elapsed]
    watcher.stop()
    asker.stop()
    stats = cache.stats()
    return Traffic(
        tokens_per_s=round(arrived / elapsed),
        freshness_ms_p99=round(max(float(np.percentile(values, 99)) for values in (same_ms, other_ms)), 3),
        freshness_ms_same_thread=spread(same_ms),
        freshness_ms_other_thread=spread(other_ms),
        append_us=spread(append_us),
        maintenance_core_share=round(sum(shares), 4),
        rebuild_process_share=round(shares[0], 4),
        cache_threads_share=round(shares[1], 4),
        append_share=round(shares[2], 4),
        num_completions=len(same_ms),
        num_sealed=stats.num_sealed - before.num_sealed,
        num_merged=stats.num_merged - before.num_merged,
        beside=Beside(spread(asker.resting_us), spread(asker.merging_us)),
    )


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
