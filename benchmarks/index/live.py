"""A cache under traffic: how soon new text is drafted, what upkeep costs, whom it delays."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.index.contexts import Context
from benchmarks.index.lookups import Prober, Spread, spread
from benchmarks.index.processes import is_working, processor_s, rebuild_process, upkeep_threads
from ssd.retrieval.cache import SuffixCache

Tokens = npt.NDArray[np.int32]

TOKENS_PER_S = 10_000
_PATIENCE_S = 10.0
_MARK_TOKENS = 3
_PAUSE_S = 0.001
_LOOK_FOR_PROCESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Late:
    """By how many milliseconds a thread that sleeps one woke too late."""

    p99: float
    p99_9: float
    max: float
    n: int


@dataclass(frozen=True, slots=True)
class Beside:
    """What two threads saw that propose and sleep, each about every millisecond."""

    propose_us: Spread
    propose_us_merging: Spread
    """While the rebuild process worked."""
    stall_ms: Late


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
    beside_no_traffic: Beside
    """The same two threads for as long, before the first completion arrives."""


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


class _Sleeper(_Repeating):
    """Sleeps a millisecond and notes how late it woke: what a Python thread is delayed by."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        super().__init__("sleeper")

    def turn(self) -> None:
        began = time.perf_counter()
        time.sleep(_PAUSE_S)
        self.late_ms.append((time.perf_counter() - began - _PAUSE_S) * 1e3)

    def late(self) -> Late:
        values = np.array(self.late_ms or [0.0])
        p99, p99_9, most = (round(float(v), 2) for v in (*np.percentile(values, (99, 99.9)), values.max()))
        return Late(p99, p99_9, most, len(self.late_ms))


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


def _beside(asker: _Asker, sleeper: _Sleeper) -> Beside:
    asker.stop()
    sleeper.stop()
    return Beside(spread(asker.resting_us), spread(asker.merging_us), sleeper.late())


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


def measure(
    cache: SuffixCache, stream: Iterator[Tokens], contexts: Sequence[Context], seconds: float, vocabulary: int
) -> Traffic:
    """No traffic for ``seconds``, then TOKENS_PER_S for ``seconds``.

    Every completion holds three ids beyond ``vocabulary`` that no other has: what follows them can come from nowhere
    else. Raises AssertionError when it is not drafted.
    """
    asker, sleeper = _Asker(cache, contexts), _Sleeper()
    time.sleep(seconds)
    without = _beside(asker, sleeper)

    asker, sleeper, watcher = _Asker(cache, contexts), _Sleeper(), _Watcher(cache)
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
    during, stats = _beside(asker, sleeper), cache.stats()
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
        beside=during,
        beside_no_traffic=without,
    )
