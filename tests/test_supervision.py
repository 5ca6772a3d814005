"""The rebuild process crashes, stops, is told to end, or cannot do what it is asked: merging goes on, within bounds."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd.config import CacheConfig, IndexConfig
from ssd.errors import StoreUnavailable
from ssd.retrieval import merge_worker, upkeep
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.merge_worker import MergeWorker
from ssd.retrieval.segment import Segment
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


def text(num_tokens: int = 50) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 4, num_tokens).astype(np.int32)


def is_gone(process_id: int) -> bool:
    """True for a zombie too: it runs no more."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_the_process_sorts_survives_kill_9_and_a_stop_and_ends_with_its_owner(
    worker: MergeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = worker.submit(text()).result(timeout=PATIENCE_S)
    assert order.tolist() == naive_order(text().tolist())
    first = worker.process_id
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert len(worker.submit(text(150)).result(timeout=PATIENCE_S)) == 150
    second = worker.process_id
    assert worker.num_restarts == 1 and second not in (None, first)
    monkeypatch.setattr(merge_worker, "_PATIENCE_S", 1.0)
    os.kill(second or 0, signal.SIGSTOP)
    future = worker.submit(text(150))
    wait_until(lambda: worker.num_restarts == 2)
    assert future.result(timeout=PATIENCE_S).tolist() == naive_order(text(150).tolist())
    last = worker.process_id
    assert is_gone(second or 0) and last not in (None, second)
    os.kill(last or 0, signal.SIGSTOP)
    monkeypatch.setattr(merge_worker, "_PATIENCE_S", 60.0)
    future = worker.submit(text())
    worker.close()
    assert worker.process_id is None and is_gone(last or 0)
    for one in (future, worker.submit(text())):
        with pytest.raises(StoreUnavailable):
            one.result(timeout=PATIENCE_S)


def test_after_a_text_ended_two_processes_others_are_refused_for_a_while_and_then_tried_again(
    worker: MergeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = sys.executable
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="merged inside the server"):
            worker.submit(text()).result(timeout=PATIENCE_S)
        assert worker.num_restarts == 2  # for the second nothing was started
    worker._refused_until = 0.0
    with pytest.raises(StoreUnavailable):
        worker.submit(text()).result(timeout=PATIENCE_S)
    assert worker.num_restarts == 4 and worker._refused_until - time.monotonic() > 15.0  # twice as long a pause
    monkeypatch.setattr(sys, "executable", executable)
    worker._refused_until = 0.0
    assert len(worker.submit(text()).result(timeout=PATIENCE_S)) == 50


_SERVER = """
import sys
import numpy as np
from ssd.retrieval.merge_worker import MergeWorker
worker = MergeWorker()
worker.submit(np.zeros(9, np.int32)).result()
print(worker.process_id, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_process_dies_with_the_server_that_is_killed(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        assert server.stdout is not None
        process_id = int(server.stdout.readline())
        server.send_signal(number)
        server.wait(timeout=PATIENCE_S)
        wait_until(lambda: is_gone(process_id))


# Merging goes on


@pytest.mark.slow
def test_segments_and_descriptors_stay_few_while_the_process_is_stopped(tmp_path: Path) -> None:
    """Its time-out is far away: what piles up meanwhile is merged here."""
    with opened(tmp_path, rebuild_interval_s=0.01) as caches:
        cache = caches.get()
        assert caches._worker is not None
        caches._worker.submit(text()).result(timeout=PATIENCE_S)
        process_id = caches._worker.process_id
        assert process_id is not None
        os.kill(process_id, signal.SIGSTOP)
        num_descriptors = num_open_files()
        most, said_text = 0, np.arange(9000) % 1009
        for _ in range(300):
            cache.append(said_text)
            wait_until(lambda: cache.stats().num_tail_tokens < len(said_text))
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
