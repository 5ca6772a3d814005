"""The rebuild process crashes, stops, is told to end, or cannot do what it is asked: merging goes on, within bounds."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd.config import CacheConfig, IndexConfig
from ssd.errors import CacheError, StoreUnavailable
from ssd.retrieval import merge_worker, upkeep
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.merge_worker import MergeJob, MergeWorker
from ssd.retrieval.segment import SEPARATOR, Segment
from ssd.retrieval.segment_file import open_segment, write_segment
from ssd.retrieval.suffix_array import MAX_SEGMENT_TOKENS, build_segment
from tests.reference.retrieval import naive_order, sequences, snapshot_text
from tests.waiting import PATIENCE_S, wait_until

FINGERPRINT = "0123456789abcdef" * 2
ROOT = Path(__file__).resolve().parents[1]


def opened(path: Path | None, *, inline: bool = False, **settings: Any) -> CacheSet:
    index = {"capacity_tokens": 1 << 22, "seal_tokens": 1 << 13, "merge_fanout": 3, "dedup_block_tokens": 0, **settings}
    return CacheSet(CacheConfig(index=IndexConfig(**index), directory=path), FINGERPRINT, inline=inline)


def said(caches: CacheSet) -> list[int]:
    """The first token of every sequence."""
    return [sequence[0] for sequence in sequences(snapshot_text(caches.get().snapshot()))]


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def worker() -> Iterator[MergeWorker]:
    one = MergeWorker()
    yield one
    one.close()


# The process


def make_job(directory: Path, num_inputs: int = 2, num_tokens: int = 50) -> MergeJob:
    random = np.random.default_rng(0)
    inputs = []
    for i in range(num_inputs):
        tokens = random.integers(0, 4, num_tokens).astype(np.int32)
        tokens[-1] = SEPARATOR
        segment = build_segment(tokens, start=i * num_tokens, segment_id=f"in-{i}")
        inputs.append(directory / f"in-{i}.seg")
        write_segment(inputs[-1], segment, fingerprint=FINGERPRINT, namespace="default", durable=False)
    return MergeJob(
        inputs=tuple(map(str, inputs)),
        output=str(directory / "out.seg"),
        segment_id="out",
        start=0,
        fingerprint=FINGERPRINT,
        namespace="default",
        num_tokens=num_inputs * num_tokens,
        durable=False,
    )


def is_gone(process_id: int) -> bool:
    """True for a zombie too: it runs no more."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_the_process_merges_reports_errors_and_survives_kill_9(tmp_path: Path) -> None:
    worker = MergeWorker()
    try:
        job = make_job(tmp_path)
        worker.submit(job).result(timeout=PATIENCE_S)
        merged = open_segment(tmp_path / "out.seg", fingerprint=FINGERPRINT)
        assert merged.order.tolist() == naive_order(merged.tokens.tolist())
        assert len(merged) == 100 and merged.start == 0

        (tmp_path / "in-1.seg").write_bytes(b"damaged")
        with pytest.raises(CacheError, match=r"SegmentCorrupt"):
            worker.submit(job).result(timeout=PATIENCE_S)

        job = make_job(tmp_path, num_inputs=3)
        first = worker.process_id
        assert first is not None
        os.kill(first, signal.SIGKILL)
        worker.submit(job).result(timeout=PATIENCE_S)
        assert len(open_segment(tmp_path / "out.seg", fingerprint=FINGERPRINT)) == 150
        assert worker.num_restarts == 1 and worker.process_id not in (None, first)
        last = worker.process_id
    finally:
        worker.close()
    assert worker.process_id is None and last is not None and is_gone(last)
    with pytest.raises(StoreUnavailable):
        worker.submit(job).result(timeout=1)


def test_a_stopped_process_is_killed_and_another_does_the_job(
    tmp_path: Path, worker: MergeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker.start().result(timeout=PATIENCE_S)
    stopped = worker.process_id
    assert stopped is not None
    monkeypatch.setattr(merge_worker, "_PATIENCE_S", 1.0)
    os.kill(stopped, signal.SIGSTOP)
    future = worker.submit(make_job(tmp_path))
    wait_until(lambda: worker.num_restarts == 1)
    monkeypatch.setattr(merge_worker, "_PATIENCE_S", 60.0)
    future.result(timeout=PATIENCE_S)
    assert len(open_segment(tmp_path / "out.seg", fingerprint=FINGERPRINT)) == 100
    assert is_gone(stopped) and worker.process_id not in (None, stopped)
    assert any("no answer within 1 s, it is killed" in message for message in messages(caplog))


def test_after_many_crashes_jobs_are_refused_for_a_while_and_then_tried_again(
    tmp_path: Path, worker: MergeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_worker, "_FIRST_BACK_OFF_S", 0.001)
    monkeypatch.setattr(merge_worker, "_FIRST_PAUSE_S", 1.5)
    executable = sys.executable
    monkeypatch.setattr(sys, "executable", "/bin/false")
    job = make_job(tmp_path)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            worker.submit(job).result(timeout=PATIENCE_S)
    crashes = worker.num_restarts
    assert crashes == merge_worker._MAX_CRASHES
    with pytest.raises(StoreUnavailable, match="merged inside the server"):
        worker.submit(job).result(timeout=PATIENCE_S)
    assert worker.num_restarts == crashes  # nothing was started
    time.sleep(1.6)
    with pytest.raises(StoreUnavailable):
        worker.submit(job).result(timeout=PATIENCE_S)
    assert worker.num_restarts == crashes + 1  # one attempt, and then twice as long a pause
    assert worker._refused_until - time.monotonic() > 2.0
    monkeypatch.setattr(sys, "executable", executable)
    worker._refused_until = 0.0
    worker.submit(job).result(timeout=PATIENCE_S)
    assert (tmp_path / "out.seg").exists() and worker._crashes == 0


_SERVER = """
import sys, time
from pathlib import Path
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache import CacheSet
caches = CacheSet(CacheConfig(index=IndexConfig(seal_tokens=16, rebuild_interval_s=0.05)), "0123456789abcdef" * 2)
caches.get().append([1] * 40)
caches.flush()
while caches._worker.process_id is None:
    time.sleep(0.01)
print(caches._scratch[0], caches._worker.process_id, flush=True)
for line in sys.stdin:
    caches.get().append([2] * 40)
    caches.flush()
    stats = caches.get().stats()
    print(stats.num_failures, stats.num_segments, len(list(caches._scratch[0].glob("default/*.seg"))), flush=True)
caches.close()
"""


def test_a_process_that_is_told_to_end_leaves_a_living_servers_files_alone_and_removes_a_dead_ones() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        place, process_id = server.stdout.readline().split()
        scratch = Path(place)
        assert scratch.exists()
        os.kill(int(process_id), signal.SIGTERM)
        wait_until(lambda: is_gone(int(process_id)))
        assert scratch.exists()
        server.stdin.write("go on\n")
        server.stdin.flush()
        num_failures, num_segments, num_files = map(int, server.stdout.readline().split())
        assert num_failures == 0 and num_segments == num_files > 0
        server.stdin.close()
        assert server.wait(timeout=PATIENCE_S) == 0
    assert not scratch.exists()
    for number in (signal.SIGKILL, signal.SIGSEGV):
        with subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as server:
            assert server.stdout is not None
            orphaned, process_id = server.stdout.readline().split()
            server.send_signal(number)
            server.wait(timeout=PATIENCE_S)
            gone, left = int(process_id), Path(orphaned)
            wait_until(lambda gone=gone, left=left: is_gone(gone) and not left.exists())  # type: ignore[misc]


@contextmanager
def hanging_job(directory: Path) -> Iterator[tuple[MergeWorker, MergeJob]]:
    """A worker, and a job that it begins and never ends: its input is a pipe without a writer."""
    os.mkfifo(directory / "input")
    job = MergeJob(
        inputs=(str(directory / "input"),),
        output=str(directory / "out.seg"),
        segment_id="out",
        start=0,
        fingerprint=FINGERPRINT,
        namespace="default",
        num_tokens=1,
        durable=True,
    )
    worker = MergeWorker()
    try:
        yield worker, job
    finally:
        worker.close()


def next_process(worker: MergeWorker, last: int | None = None) -> int:
    """The id of the worker's process once it runs and is not ``last``."""
    wait_until(lambda: worker.process_id not in (None, last))
    found = worker.process_id
    assert found is not None
    return found


def test_a_killed_rebuild_process_leaves_no_half_written_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with hanging_job(tmp_path) as (worker, job):
        future = worker.submit(job)
        process = next_process(worker)
        (tmp_path / f"out.seg.{process}.tmp").write_bytes(b"as far as it got")
        os.kill(process, signal.SIGKILL)
        process = next_process(worker, last=process)
        assert not list(tmp_path.glob("*.tmp"))
        (tmp_path / f"out.seg.{process}.tmp").write_bytes(b"as far as it got")
        (tmp_path / "out.seg").write_bytes(b"its answer alone may be missing")
        os.kill(process, signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            future.result(timeout=PATIENCE_S)
        assert {path.name for path in tmp_path.iterdir()} == {"input"}
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_closing_while_a_merge_runs_leaves_no_half_written_file(tmp_path: Path) -> None:
    with hanging_job(tmp_path) as (worker, job):
        future = worker.submit(job)
        (tmp_path / f"out.seg.{next_process(worker)}.tmp").write_bytes(b"as far as it got")
        worker.close()
        with pytest.raises(CacheError):
            future.result(timeout=PATIENCE_S)
        assert {path.name for path in tmp_path.iterdir()} == {"input"}


# Merging goes on


@pytest.mark.slow
def test_segments_and_descriptors_stay_few_while_the_process_is_stopped(tmp_path: Path) -> None:
    """Its time-out is far away: what piles up meanwhile is merged here."""
    with opened(tmp_path, rebuild_interval_s=0.01) as caches:
        cache = caches.get()
        assert caches._worker is not None
        caches._worker.start().result(timeout=PATIENCE_S)
        process_id = caches._worker.process_id
        assert process_id is not None
        os.kill(process_id, signal.SIGSTOP)
        num_descriptors = num_open_files()
        most, text = 0, np.arange(9000) % 1009
        for _ in range(300):
            cache.append(text)
            wait_until(lambda: cache.stats().num_tail_tokens < len(text))
            most = max(most, cache.stats().num_segments)
        assert most < 80
        assert num_open_files() < num_descriptors + 10
        assert cache.stats().num_tokens == 300 * 9001 and cache.stats().num_dropped_tokens == 0
        os.kill(process_id, signal.SIGKILL)
        cache.flush()
        assert cache.stats().num_segments < 20
    with opened(tmp_path, inline=True) as caches:
        assert caches.get().stats().num_tokens == 300 * 9001


class Unsortable:
    """No memory to sort more than ``limit`` tokens at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.limit = limit
        self.num_refused = 0
        monkeypatch.setattr(upkeep, "build_segment", self._build)

    def _build(self, tokens: np.ndarray, **names: Any) -> Segment:
        if len(tokens) > self.limit:
            self.num_refused += 1
            raise MemoryError(f"no memory to sort {len(tokens)} tokens")
        return build_segment(tokens, **names)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What failed merges take for the time, in its first element."""
    now = [1000.0]
    monkeypatch.setattr("ssd.retrieval.upkeep.time.monotonic", lambda: now[0])
    return now


def test_a_merge_that_fails_is_counted_logged_once_and_tried_again_later_while_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    memory = Unsortable(monkeypatch, limit=150)
    with opened(tmp_path, inline=True, seal_tokens=16, merge_fanout=2) as caches:
        cache = caches.get()
        for number in range(60):
            cache.append([number] * 20)
            cache.maintain()
        stats = cache.stats()
        refused = memory.num_refused
        assert stats.num_failed_merges == refused and 0 < refused < 30  # each plan once, not at every maintenance
        assert stats.num_merged > 20 and stats.num_segments < 30 and said(caches) == list(range(60))
        (message,) = messages(caplog)
        assert "a merge failed" in message and "no memory to sort" in message
        directory = cache._directory
        assert directory is not None and len(directory.manifest.segment_ids) == stats.num_segments  # all are on disk
        cache.maintain()
        assert memory.num_refused == refused
        clock[0] += upkeep.FIRST_PAUSE_S + 1
        cache.maintain()
        again = memory.num_refused
        clock[0] += upkeep.FIRST_PAUSE_S + 1  # twice as long by now
        cache.maintain()
        assert refused < again == memory.num_refused
        memory.limit = 1 << 30
        clock[0] += upkeep.FIRST_PAUSE_S
        cache.maintain()
        assert cache.stats().num_segments < stats.num_segments / 2 and cache.stats().num_failed_merges == again
    with opened(tmp_path, inline=True) as caches:
        assert said(caches) == list(range(60))


def test_the_number_of_segments_is_bounded_though_every_merge_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Unsortable(monkeypatch, limit=60)
    monkeypatch.setattr(upkeep, "_MOST_SEGMENTS", 32)
    with opened(tmp_path, inline=True, seal_tokens=16, merge_fanout=2) as caches:
        cache = caches.get()
        for number in range(200):
            cache.append([number] * 50)
            cache.maintain(seal_all=True, wait=False)
        stats = cache.stats()
        assert stats.num_segments <= 33 and stats.num_failed_merges > 0
        assert said(caches) == list(range(200)) and stats.num_dropped_tokens == 0
        monkeypatch.setattr(upkeep, "build_segment", build_segment)
    with opened(tmp_path, inline=True) as caches:  # closing seals what is left
        assert said(caches) == list(range(200))


def test_no_segment_is_planned_that_is_too_long_to_be_sorted() -> None:
    index = SuffixIndex(IndexConfig(capacity_tokens=1 << 36))
    assert index.max_segment_tokens == MAX_SEGMENT_TOKENS < 1 << 29
