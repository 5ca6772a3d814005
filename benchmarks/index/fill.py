"""Filling a cache as a busy server would, and what that leaves."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.index.asked import Prober
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache import CacheSet, SuffixCache
from ssd.retrieval.segment import Segment
from ssd.retrieval.snapshot import Snapshot

_TICKS = os.sysconf("SC_CLK_TCK")
_REBUILD_PROCESS = b"ssd.retrieval.merge_worker"
_INTERVAL_S = 0.01
_SAMPLING_SHARE = 0.1  # of one core: the kernel walks all pages for every sample


def trim() -> None:
    """Give freed memory back to the kernel, so that what is resident is in use. Peers' figures are taken so too."""
    gc.collect()
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries give pages back themselves
    if release is not None:
        release(0)


def resident_bytes(process: int | str = "self") -> int:
    """Proportional resident size: anonymous pages, and mapped ones divided by the processes that share them.

    0 when the process is gone.
    """
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def rebuild_process() -> int | None:
    """The process that merges segments, if this one has started it and it runs."""
    for task in Path("/proc/self/task").iterdir():
        try:
            for child in (task / "children").read_text().split():
                if _REBUILD_PROCESS in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        except OSError:  # a thread or a process that has just ended
            continue
    return None


def is_working(process: int) -> bool:
    """Whether a process runs, is ready to run, or waits for a disk: all but sleeping for its next job."""
    fields = _stat(Path(f"/proc/{process}/stat"))
    return bool(fields) and fields[0] in "RD"


def processor_s(process: int | str, thread: int | None = None) -> float:
    """Processor time used so far by a process, or by one of its threads; 0.0 when it is gone."""
    path = Path(f"/proc/{process}/stat") if thread is None else Path(f"/proc/{process}/task/{thread}/stat")
    fields = _stat(path)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _stat(path: Path) -> list[str]:
    """Fields of a stat file from the state on; none when it is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def upkeep_threads() -> list[int]:
    """Native ids of the cache's own threads in this process."""
    return [t.native_id for t in threading.enumerate() if t.name.startswith("ssd-") and t.native_id is not None]


class Growth:
    """How much more this process and the rebuild process hold than before anything was stored."""

    def __init__(self, rebuild_idle_bytes: int, snapshot: Callable[[], Snapshot], floor: int) -> None:
        """Growth counts from now on.

        ``rebuild_idle_bytes`` : what the rebuild process holds when it has nothing to do. ``snapshot`` : what is stored
        at the moment; ``floor`` : a peak counts once so many tokens are, or a nearly empty cache would decide it.
        """
        self._snapshot = snapshot
        self._floor = floor
        self._rebuild_base = rebuild_idle_bytes
        trim()
        self._own_base = resident_bytes()
        self.peak_bytes_per_token = 0.0
        """Largest growth of both processes over the tokens stored at that moment."""
        self.peak_of_rebuild = 0
        """Largest growth of the rebuild process, bytes."""
        self.largest_segment = 1
        """Of the ring, at any time since ``start``; tokens."""
        self.num_samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="growth", daemon=True)

    def now(self) -> int:
        """Growth of both processes, bytes."""
        return resident_bytes() - self._own_base + self._of_rebuild()

    def start(self) -> None:
        """Sample every ten milliseconds, or less often where that would take much of a core."""
        self._thread.start()

    def stop(self) -> None:
        """No more samples."""
        self._stop.set()
        self._thread.join()

    def _of_rebuild(self) -> int:
        process = rebuild_process()
        return 0 if process is None else max(0, resident_bytes(process) - self._rebuild_base)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.perf_counter()
            of_rebuild = self._of_rebuild()
            growth = resident_bytes() - self._own_base + of_rebuild
            snapshot = self._snapshot()
            num_tokens = snapshot.num_tokens
            sizes = [len(segment) for segment in snapshot.segments if segment.start is not None]
            self.largest_segment = max(self.largest_segment, *sizes, 1)
            self.num_samples += 1
            self.peak_of_rebuild = max(self.peak_of_rebuild, of_rebuild)
            if num_tokens >= self._floor:
                self.peak_bytes_per_token = max(self.peak_bytes_per_token, growth / num_tokens)
            took = time.perf_counter() - began
            self._stop.wait(max(_INTERVAL_S, took / _SAMPLING_SHARE))


Tokens = npt.NDArray[np.int32]

FINGERPRINT = "0" * 32
"""Of the tokenizer that nobody has: ids are made."""

LAST_COMPLETIONS = 2
"""Appended at the very end and together less than a seal, so that the tail is not empty."""

_MOST_SLOW_TOKENS = 1 << 21

_SETTLED_S = 1.5  # longer than the interval in which the cache looks for something to do
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Filled:
    """What ingest left. Bytes are the resident growth of both processes since before the first append."""

    snapshot: Snapshot
    tokens_per_s: float
    bytes_per_token: float
    """At rest, every page of every segment touched."""
    segment_bytes_per_token: float
    """Of that, the segments' arrays."""
    peak_bytes_per_token: float
    """Largest growth over the tokens stored at that moment, once half of all were."""
    merge_peak_bytes_per_token: float
    """The rebuild process alone, over the largest segment that there was in the ring."""
    num_memory_samples: int
    num_sealed: int
    num_merged: int
    merge_core_s: float
    """Processor time of the rebuild process."""


def warm_up() -> int:
    """Load and compile in this process what a cache needs; what an idle rebuild process holds, bytes.

    A small cache lives through everything: appending, sealing, merging in the rebuild process, a lookup. What kernels
    and libraries take is the same for any number of tokens and thus no part of bytes a token.
    """
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as directory:
        config = CacheConfig(index=IndexConfig(capacity_tokens=1 << 20), directory=Path(directory))
        with CacheSet(config, FINGERPRINT) as caches:
            cache = caches.get()
            for _ in range(8):  # a merge of more than 16,384 tokens is the rebuild process's
                cache.append(np.arange(8000, dtype=np.int32))
                cache.flush()
            Prober().one(np.arange(64, dtype=np.int32), cache.snapshot())
            process = rebuild_process()
            return 0 if process is None else resident_bytes(process)


def fill(
    cache: SuffixCache,
    stream: Iterator[Tokens],
    num_tokens: int,
    index: IndexConfig,
    rebuild_idle: int,
    *,
    most_extra: int = 0,
) -> Filled:
    """Append completions until ``num_tokens`` are stored, let merging come to rest, append LAST_COMPLETIONS.

    Most go in as fast as they are sealed, the last ones seal by seal as under traffic, so that small segments are there
    too. Where a size of segment is missing then, up to ``most_extra`` tokens more are appended until none is. Raises
    AssertionError when text was lost.
    """
    growth = Growth(rebuild_idle, cache.snapshot, num_tokens // 2)
    growth.start()
    began = time.perf_counter()
    slow = min(num_tokens // 8, _MOST_SLOW_TOKENS)
    stored = _append(cache, stream, num_tokens - slow, 8 * index.seal_tokens)
    took = time.perf_counter() - began
    tokens_per_s = stored / took
    _append(cache, stream, num_tokens - stored, index.seal_tokens)
    _settle(cache)
    extra = 0
    while extra < most_extra and not has_all_sizes(cache.snapshot(), index):
        extra += _append(cache, stream, index.seal_tokens, index.seal_tokens)
        if has_all_sizes(cache.snapshot(), index):
            _settle(cache)
    growth.stop()
    process = rebuild_process()
    merge_core_s = 0.0 if process is None else processor_s(process)
    for tokens in itertools.islice(stream, LAST_COMPLETIONS):
        cache.append(tokens)
    snapshot, stats = cache.snapshot(), cache.stats()
    if stats.num_dropped_tokens or stats.num_failures:
        raise AssertionError(f"ingest lost text: {stats}")
    if snapshot.tail_start == snapshot.tail_stop:
        raise AssertionError("the tail is empty: a lookup would not be what it is under traffic")
    for segment in snapshot.segments:
        _touch(segment)
    trim()
    at_rest = growth.now() / snapshot.num_tokens
    held = sum(part.nbytes for s in snapshot.segments for part in (s.text, s.order, s.fence))
    return Filled(
        snapshot=snapshot,
        tokens_per_s=tokens_per_s,
        bytes_per_token=at_rest,
        segment_bytes_per_token=held / snapshot.num_tokens,
        peak_bytes_per_token=max(at_rest, growth.peak_bytes_per_token),
        merge_peak_bytes_per_token=growth.peak_of_rebuild / growth.largest_segment,
        num_memory_samples=growth.num_samples,
        num_sealed=stats.num_sealed,
        num_merged=stats.num_merged,
        merge_core_s=merge_core_s,
    )


def _append(cache: SuffixCache, stream: Iterator[Tokens], num_tokens: int, most_unsealed: int) -> int:
    """Append whole completions until at least ``num_tokens`` are stored, separators counted; returns how many.

    Waits while the tail holds ``most_unsealed`` or more, so that nothing is dropped.
    """
    stored = 0
    while stored < num_tokens:
        tokens = next(stream)
        cache.append(tokens)
        stored += len(tokens) + 1
        while cache.stats().num_tail_tokens >= most_unsealed:
            time.sleep(0.0005)
    return stored


def num_by_size(snapshot: Snapshot, index: IndexConfig) -> list[int]:
    """How many of the ring's segments hold 1, fanout, fanout^2, ... seals or more, up to the largest there may be."""

    def size_class(num_tokens: int) -> int:
        return int(math.log(max(1.0, num_tokens / index.seal_tokens), index.merge_fanout) + 1e-9)

    counts = [0] * (size_class(max(2, index.capacity_tokens // 8)) + 1)
    for segment in snapshot.segments:
        if segment.start is not None:
            counts[min(size_class(len(segment)), len(counts) - 1)] += 1
    return counts


def has_all_sizes(snapshot: Snapshot, index: IndexConfig) -> bool:
    """Whether segments of every size are there."""
    return all(num_by_size(snapshot, index))


def _settle(cache: SuffixCache) -> None:
    """Wait until nothing is left to seal and nothing has been merged for a while."""
    generation, since = -1, time.monotonic()
    while time.monotonic() - since < _SETTLED_S:
        time.sleep(0.05)
        stats, process = cache.stats(), rebuild_process()
        if stats.generation != generation or stats.num_tail_tokens or (process is not None and is_working(process)):
            generation, since = stats.generation, time.monotonic()


def _touch(segment: Segment) -> None:
    """Bring every page into memory, as a while of lookups does."""
    for array in (segment.text, segment.order, segment.fence):
        int(array[:: _PAGE_BYTES // array.itemsize].sum())


def describe_segments(snapshot: Snapshot, index: IndexConfig) -> dict[str, Any]:
    """Sizes in tokens, largest first; how many there are of each size class, smallest first."""
    return {
        "ring": sorted((len(s) for s in snapshot.segments if s.start is not None), reverse=True),
        "static": sorted((len(s) for s in snapshot.segments if s.start is None), reverse=True),
        "ring_by_size": num_by_size(snapshot, index),
        "tail": snapshot.tail_stop - snapshot.tail_start,
        "width_bytes": sorted({s.width for s in snapshot.segments}),
    }
