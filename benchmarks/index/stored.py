"""A cache filled as a busy server would, what it holds then, and what goes on in it under traffic."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.index.asked import Context, Prober, percentile
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache import CacheSet, SuffixCache
from ssd.retrieval.snapshot import Snapshot

Tokens = npt.NDArray[np.int32]

FINGERPRINT: Final = "0" * 32
"""Of the tokenizer that nobody has: ids are made."""
LAST_COMPLETIONS: Final = 2
"""Appended at the very end and together less than a seal, so that the tail is not empty."""
TOKENS_PER_S: Final = 10_000
_REBUILD_PROCESS: Final = b"ssd.retrieval.merge_worker"
_SLOW_TOKENS: Final = 1 << 21
_SETTLED_S: Final = 1.5  # longer than the interval in which the cache looks for something to do
_PAGE_BYTES: Final = 4096
_PATIENCE_S: Final = 10.0
_MARK_TOKENS: Final = 3
_LOOK_FOR_PROCESS_S: Final = 0.5


def resident_bytes(process: int | str = "self") -> int:
    """Proportional resident size: anonymous pages, and mapped ones divided by the processes that share them; 0 of none.

    Of this process with freed memory given back to the kernel, so that what is resident is in use.
    """
    if process == "self":
        gc.collect()
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give pages back themselves
        if release is not None:
            release(0)
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


def _stat(*place: object) -> list[str]:
    """Fields of a process' or a thread's stat file from the state on; none when it is gone."""
    try:
        return Path("/proc", *map(str, place), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_working(process: int | None) -> bool:
    """Whether it runs, is ready to run, or waits for a disk: all but sleeping for its next job."""
    fields = _stat(process) if process is not None else []
    return bool(fields) and fields[0] in "RD"


def _upkeep_s() -> tuple[float, float]:
    """Processor time used so far by the rebuild process, and by the cache's threads in this one."""

    def used(*place: object) -> float:
        fields = _stat(*place)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0

    threads = [t.native_id for t in threading.enumerate() if t.name.startswith("ssd-") and t.native_id is not None]
    return used(rebuild_process()), sum(used("self", "task", thread) for thread in threads)


def warm_up() -> tuple[int, int]:
    """Load and compile what a cache needs, as that is the same for any number of tokens.

    Returns what this process and an idle rebuild process hold, bytes.
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
            of_rebuild = 0 if process is None else resident_bytes(process)
    return resident_bytes(), of_rebuild


def fill(
    cache: SuffixCache, stream: Iterator[Tokens], num_tokens: int, index: IndexConfig, idle: tuple[int, int]
) -> tuple[Snapshot, dict[str, Any]]:
    """Append completions until ``num_tokens`` are stored, let merging come to rest, append LAST_COMPLETIONS.

    Most go in as fast as they are sealed, the last ones seal by seal as under traffic, so that small segments are there
    too. ``idle`` : of `warm_up`. Returns what is stored, and how much memory a token takes at rest, every page of every
    segment touched. Raises AssertionError when text was lost.
    """
    began = time.perf_counter()
    stored = _append(cache, stream, num_tokens - min(num_tokens // 8, _SLOW_TOKENS), 8 * index.seal_tokens)
    tokens_per_s = stored / (time.perf_counter() - began)
    _append(cache, stream, num_tokens - stored, index.seal_tokens)
    _settle(cache)
    for _ in range(LAST_COMPLETIONS):
        cache.append(next(stream))
    snapshot, stats = cache.snapshot(), cache.stats()
    if stats.num_dropped_tokens or stats.num_failures:
        raise AssertionError(f"ingest lost text: {stats}")
    if snapshot.tail_start == snapshot.tail_stop:
        raise AssertionError("the tail is empty: a lookup would not be what it is under traffic")
    for segment in snapshot.segments:
        for array in (segment.text, segment.order, segment.fence):
            int(array[:: _PAGE_BYTES // array.itemsize].sum())
    process = rebuild_process()
    grown = resident_bytes() - idle[0] + (0 if process is None else max(0, resident_bytes(process) - idle[1]))
    held = sum(part.nbytes for s in snapshot.segments for part in (s.text, s.order, s.fence))
    return snapshot, {
        "segments": len(snapshot.segments),
        "ingest_tokens_per_s": round(tokens_per_s),
        "bytes_per_token": round(grown / snapshot.num_tokens, 2),
        "segment_bytes_per_token": round(held / snapshot.num_tokens, 2),
        "num_sealed": stats.num_sealed,
        "num_merged": stats.num_merged,
    }


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


def _settle(cache: SuffixCache) -> None:
    """Wait until nothing is left to seal and nothing has been merged for a while."""
    generation, since = -1, time.monotonic()
    while time.monotonic() - since < _SETTLED_S:
        time.sleep(0.05)
        stats = cache.stats()
        if stats.generation != generation or stats.num_tail_tokens or _is_working(rebuild_process()):
            generation, since = stats.generation, time.monotonic()


def watch_traffic(
    cache: SuffixCache, stream: Iterator[Tokens], contexts: Sequence[Context], seconds: float, vocabulary: int
) -> dict[str, Any]:
    """`TOKENS_PER_S` for ``seconds``: until when new text is drafted, what upkeep takes of a core, whom it delays.

    Every completion holds three ids beyond ``vocabulary`` that no other has: what follows them can come from nowhere
    else. Between two completions ``contexts`` are asked for, one a millisecond or so. Raises AssertionError where new
    text is not drafted.
    """
    prober = Prober()
    fresh_ms, resting_us, merging_us = list[float](), list[float](), list[float]()
    append_s, arrived, marked, turns = 0.0, 0, 0, 0
    before, stats = _upkeep_s(), cache.stats()
    process, looked_at, began = rebuild_process(), time.monotonic(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        tokens = next(stream).copy()
        place, run = len(tokens) // 2, np.arange(_MARK_TOKENS, dtype=np.int32) + vocabulary + _MARK_TOKENS * marked
        tokens[place : place + _MARK_TOKENS] = run
        marked += 1
        asked, wanted = np.concatenate([tokens[:2], run]), int(tokens[place + _MARK_TOKENS])
        at, used = time.perf_counter(), time.thread_time()
        cache.append(tokens)
        append_s += time.thread_time() - used
        while prober.one(asked, cache.snapshot())[1][:1].tolist() != [wanted]:
            if time.perf_counter() - at > _PATIENCE_S:
                raise AssertionError("new text was not drafted")
        fresh_ms.append((time.perf_counter() - at) * 1e3)
        arrived += len(tokens)
        while time.perf_counter() < began + arrived / TOKENS_PER_S:
            if time.monotonic() - looked_at > _LOOK_FOR_PROCESS_S:
                process, looked_at = rebuild_process(), time.monotonic()
            turns += 1
            was_working = _is_working(process)
            took = prober.one(contexts[turns % len(contexts)].tokens, cache.snapshot())[0]
            (merging_us if was_working and _is_working(process) else resting_us).append(took)
            time.sleep(0.001)
    elapsed = time.perf_counter() - began
    shares = [(now - then) / elapsed for now, then in zip(_upkeep_s(), before, strict=True)] + [append_s / elapsed]
    return {
        "tokens_per_s": round(arrived / elapsed),
        "freshness_ms_p99": round(float(np.percentile(fresh_ms, 99)), 3),
        "maintenance_core_share": round(sum(shares), 4),
        "rebuild_process_share": round(shares[0], 4),
        "num_completions": marked,
        "num_merged": cache.stats().num_merged - stats.num_merged,
        "propose_us_p99_resting": percentile(resting_us, 99),
        "propose_us_p99_merging": percentile(merging_us, 99),
    }
