"""A directory that stops taking writes, merges that cannot be done, a cache that is closed while others append."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.index.longest_match import longest_match
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval import directory, namespace_cache
from ssd.retrieval import directory as directories
from ssd.retrieval import files as manifests
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.directory import SegmentDirectory
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.namespace_cache import NamespaceCache
from ssd.retrieval.segment import Segment
from ssd.retrieval.suffix_array import MAX_SEGMENT_TOKENS, build_segment
from tests.reference.retrieval import sequences, snapshot_text

FINGERPRINT = "0123456789abcdef" * 2


def config(path: Path | None, **settings: Any) -> CacheConfig:
    index = IndexConfig(
        **{"capacity_tokens": 4096, "flush_tokens": 16, "merge_fanout": 2, "dedup_block_tokens": 0, **settings}
    )
    return CacheConfig(index=index, directory=path)


def opened(path: Path, **settings: Any) -> CacheManager:
    return CacheManager(config(path, **settings), FINGERPRINT, inline=True)


def said(caches: CacheManager) -> list[int]:
    """The first token of every sequence."""
    return [sequence[0] for sequence in sequences(snapshot_text(caches.get().snapshot()))]


def learn(caches: CacheManager, numbers: range) -> None:
    for number in numbers:
        caches.get().append([number] + [number % 3] * 9)
        caches.maintain()


class ReadOnly:
    """Every function that writes raises as on a read-only file system, while ``is_on``; reading goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on = False
        self.num_refused = 0
        writers = ((directories, "write_segment"), (directories, "write_file"), (manifests, "write_file"))
        for module, name in (*writers, (Path, "unlink")):
            monkeypatch.setattr(module, name, self._refusing(getattr(module, name)))

    def _refusing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def write(path: Path, *arguments: Any, **settings: Any) -> Any:
            if self.is_on:
                self.num_refused += 1
                raise OSError(errno.EROFS, "Read-only file system", str(path))
            return function(path, *arguments, **settings)

        return write


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadOnly]:
    disk = ReadOnly(monkeypatch)
    yield disk
    disk.is_on = False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What upkeep takes for the time, in its first element."""
    now = [1000.0]
    monkeypatch.setattr("ssd.retrieval.namespace_cache.time.monotonic", lambda: now[0])
    return now


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_what_is_sealed_while_nothing_can_be_written_is_searched_and_written_later(
    tmp_path: Path, read_only: ReadOnly, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as caches:
        learn(caches, range(20))
        assert caches.get().stats().num_failures == 0
        read_only.is_on = True
        learn(caches, range(20, 60))
        stats = caches.get().stats()
        assert said(caches) == list(range(60))
        assert stats.num_failures > 1 and stats.num_merges > 2 and stats.num_dropped_tokens == 0
        for number in (5, 25, 55):
            assert longest_match(caches.get().snapshot(), np.array([number, number % 3, number % 3]), 32).length == 3
        (level, message), *others = messages(caplog)
        assert not others and level == logging.ERROR
        assert "namespace=default" in message and "Read-only file system" in message and "served as before" in message

        read_only.is_on = False
        caches.maintain()
        assert len(caplog.records) == 1  # too soon
        clock[0] += directory.RETRY_S
        caches.maintain()
        assert caches.get().stats().num_failures == stats.num_failures
        assert [level for level, _ in messages(caplog)] == [logging.ERROR, logging.WARNING]
        assert "can be written again" in caplog.text
        kept = caches.get()._files
        assert kept is not None and all(map(kept.has, caches.get().snapshot().segments))
        kept.close()  # as if killed
    with opened(tmp_path) as caches:
        assert said(caches) == list(range(60))
        assert caches.get().stats().num_failures == 0


def test_an_outage_is_told_once_and_a_second_one_again(
    tmp_path: Path, read_only: ReadOnly, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, capacity_tokens=400) as caches:  # evictions want files removed meanwhile
        for first in (0, 100):
            read_only.is_on = True
            learn(caches, range(first, first + 60))
            for _ in range(5):
                clock[0] += directory.RETRY_S
                caches.maintain()
            caches.flush()
            read_only.is_on = False
            clock[0] += directory.RETRY_S
            caches.flush()
            caches.maintain()
        assert [level for level, _ in messages(caplog)] == [logging.ERROR, logging.WARNING] * 2
        expected = said(caches)
    with opened(tmp_path, capacity_tokens=400) as caches:
        assert said(caches) == expected
        files = {path.stem for path in (tmp_path / "default").glob("*.seg")}
        assert files == {segment.segment_id for segment in caches.get().snapshot().segments}


def test_an_outage_lasts_while_anything_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is nearly full: small files fit, merged ones do not."""
    written, largest = SegmentDirectory.write, 25

    def write(self: SegmentDirectory, segment: Segment) -> Segment:
        if len(segment) > largest:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(self, segment)

    monkeypatch.setattr(SegmentDirectory, "write", write)
    with opened(tmp_path) as caches:
        learn(caches, range(60))
        clock[0] += directory.RETRY_S
        learn(caches, range(60, 80))
        assert [level for level, _ in messages(caplog)] == [logging.ERROR]
        largest = 1 << 30
        clock[0] += directory.RETRY_S
        caches.flush()
    assert [level for level, _ in messages(caplog)] == [logging.ERROR, logging.WARNING]
    with opened(tmp_path) as caches:
        assert said(caches) == list(range(80))


# Merges that cannot be done


class Unsortable:
    """No memory to sort more than ``limit`` tokens at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.limit = limit
        self.num_refused = 0
        monkeypatch.setattr(namespace_cache, "build_segment", self._build)

    def _build(self, tokens: np.ndarray, **names: Any) -> Segment:
        if len(tokens) > self.limit:
            self.num_refused += 1
            raise MemoryError(f"no memory to sort {len(tokens)} tokens")
        return build_segment(tokens, **names)


def test_a_merge_that_fails_is_counted_logged_once_and_tried_again_later_while_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    memory = Unsortable(monkeypatch, limit=150)
    with opened(tmp_path, capacity_tokens=1 << 22) as caches:
        cache = caches.get()
        for number in range(60):
            cache.append([number] * 20)
            cache.maintain()
        stats = cache.stats()
        refused = memory.num_refused
        assert stats.num_failed_merges == refused and 0 < refused < 30  # each plan once, not at every maintenance
        assert stats.num_merges > 20 and stats.num_segments < 30 and said(caches) == list(range(60))
        ((_, message),) = messages(caplog)
        assert "a merge failed" in message and "no memory to sort" in message
        assert cache._files is not None
        assert all(map(cache._files.has, cache.snapshot().segments))
        cache.maintain()
        assert memory.num_refused == refused
        clock[0] += namespace_cache.FIRST_BACKOFF_S + 1
        cache.maintain()
        again = memory.num_refused
        clock[0] += namespace_cache.FIRST_BACKOFF_S + 1  # twice as long by now
        cache.maintain()
        assert refused < again == memory.num_refused
        memory.limit = 1 << 30
        clock[0] += namespace_cache.FIRST_BACKOFF_S
        cache.maintain()
        assert cache.stats().num_segments < stats.num_segments / 2 and cache.stats().num_failed_merges == again
    with opened(tmp_path, capacity_tokens=1 << 22) as caches:
        assert said(caches) == list(range(60))


def test_the_number_of_segments_is_bounded_though_every_merge_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Unsortable(monkeypatch, limit=60)
    monkeypatch.setattr(namespace_cache, "_MAX_SEGMENTS", 32)
    with opened(tmp_path, capacity_tokens=1 << 22) as caches:
        cache = caches.get()
        for number in range(200):
            cache.append([number] * 50)
            cache.maintain(flush_all=True, wait=False)
        stats = cache.stats()
        assert stats.num_segments <= 33 and stats.num_failed_merges > 0
        assert said(caches) == list(range(200)) and stats.num_dropped_tokens == 0
        monkeypatch.setattr(namespace_cache, "build_segment", build_segment)
    with opened(tmp_path, capacity_tokens=1 << 22) as caches:  # closing seals what is left
        assert said(caches) == list(range(200))


def test_no_segment_is_planned_that_is_too_long_to_be_sorted() -> None:
    index = SuffixIndex(IndexConfig(capacity_tokens=1 << 36))
    assert index.max_segment_tokens == MAX_SEGMENT_TOKENS < 1 << 29


# Closing while others append


def test_closing_and_flushing_do_not_wait_for_what_is_appended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a replica that reads a long log does: another sequence arrives during every sort."""
    sorted_, num_sorts, numbers = build_segment, 0, itertools.count()
    caches = opened(tmp_path, merge_fanout=100)
    cache = caches.get()

    def sort(*arguments: Any, **settings: Any) -> Segment:
        nonlocal num_sorts
        num_sorts += 1
        if num_sorts < 1000:  # or else what is tested would not end
            cache.append_replicated([np.array([next(numbers)] * 20, np.int32)])
        return sorted_(*arguments, **settings)

    monkeypatch.setattr(namespace_cache, "build_segment", sort)
    for call in (cache.maintain, cache.flush, cache.close):
        cache.append_replicated([np.array([next(numbers)] * 20, np.int32)])
        before = num_sorts
        call()
        assert num_sorts == before + 1
    assert cache.stats().num_memtable_tokens > 0  # the last one, in memory
    cache.append_replicated([np.array([next(numbers)], np.int32)])
    assert cache.stats().num_failures == 0
    learned = next(numbers) - 2
    caches.close()
    with opened(tmp_path) as again:
        assert said(again) == list(range(learned))


@pytest.mark.timeout(300)
def test_appends_of_a_log_do_not_wait_for_room_in_a_cache_that_is_being_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespace_cache, "_ROOM_WAIT_S", 1e6)
    settings = IndexConfig(capacity_tokens=64, flush_tokens=16)
    cache = NamespaceCache("a", settings, fingerprint=FINGERPRINT, wake=lambda: None)
    piece = [1] * 6
    for _ in range(5):
        cache.append(piece)
    entered = threading.Event()

    def read_log() -> None:
        entered.set()
        for _ in range(20):
            cache.append_replicated([np.array(piece, np.int32)])

    reader = threading.Thread(target=read_log)
    reader.start()
    entered.wait()
    cache.close()
    reader.join()
    assert cache.stats().num_appended_tokens == 25 * len(piece)


def test_maintenance_ends_with_the_segment_it_is_at_when_the_cache_is_being_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sorted_, num_merged = build_segment, 0
    cache = NamespaceCache(
        "a", IndexConfig(capacity_tokens=4096, flush_tokens=4, merge_fanout=2), fingerprint=FINGERPRINT
    )
    with monkeypatch.context() as patch:
        patch.setattr(NamespaceCache, "_merge", lambda _, wait: None)
        for number in range(16):
            cache.append([number] * 8)
            cache.maintain()

    def sort(*arguments: Any, **settings: Any) -> Segment:
        nonlocal num_merged
        num_merged += 1
        cache.begin_close()
        return sorted_(*arguments, **settings)

    monkeypatch.setattr(namespace_cache, "build_segment", sort)
    cache.maintain()
    cache.close()
    assert num_merged == 1
    assert cache.snapshot().num_tokens == 16 * 9
