from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import CacheConfig, IndexConfig
from ssd.errors import ConfigError, TokenizerMismatch
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.cache_state import Checkpoint
from ssd.retrieval.directory import SegmentDirectory
from ssd.retrieval.namespace_cache import NamespaceCache
from ssd.retrieval.segment import Segment
from tests.reference.retrieval import naive_count, sequences, snapshot_count, snapshot_text
from tests.sharing_replica import stored
from tests.waiting import wait_until

FINGERPRINT = "0123456789abcdef" * 2
ROOT = Path(__file__).resolve().parents[1]


def _config(directory: Path | None = None, **index: float) -> CacheConfig:
    settings: dict[str, float] = {
        "capacity_tokens": 8000,
        "flush_tokens": 16,
        "dedup_block_tokens": 4,
        "lead_in_tokens": 2,
    }
    return CacheConfig(index=IndexConfig(**{**settings, **index}), directory=directory)  # type: ignore[arg-type]


def _said(caches: CacheManager, namespace: str = "default") -> list[list[int]]:
    return sequences(snapshot_text(caches.get(namespace).snapshot()))


def _wait_until_sealed(caches: CacheManager) -> None:
    wait_until(lambda: not caches.get().stats().num_memtable_tokens)


# Learning


@pytest.mark.parametrize(
    "bad", [[-1], [1 << 31], [1 << 70], [1.5], ["a"], None, 3, [[1, 2]], [[1], [2, 3]], [None], object()]
)
def test_what_is_no_sequence_is_counted_and_never_raised(bad: object, caplog: pytest.LogCaptureFixture) -> None:
    with CacheManager(_config(), FINGERPRINT, inline=True) as caches:
        caches.get().append(bad)  # type: ignore[arg-type]
        caches.get().append([])
        assert caches.get().stats().num_failures == 1
        assert _said(caches) == []
    assert len(caplog.records) == 1


def test_listeners_hear_local_pieces_only_and_may_fail() -> None:
    def fails(_: list[np.ndarray]) -> None:
        raise RuntimeError("listener")

    with CacheManager(_config(), FINGERPRINT, inline=True) as caches:
        cache = caches.get()
        heard: list[list[list[int]]] = []
        cache.add_listener(fails)
        cache.add_listener(lambda pieces: heard.append([piece.tolist() for piece in pieces]))
        cache.append([1, 2, 3, 4, 5], prompt_length=5)
        cache.append_replicated([np.array([7, 8], np.int32)])
        cache.append([1, 2, 3, 4, 6], prompt_length=5)
        cache.append([1, 2, 3, 4], prompt_length=4)  # nothing new
        assert heard == [[[1, 2, 3, 4, 5]], [[3, 4, 6]]]
        assert all(piece in _said(caches) for pieces in heard for piece in pieces)
        stats = cache.stats()
        assert (stats.num_failures, stats.num_appended_tokens, stats.num_skipped_tokens) == (2, 16, 2 + 4)


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a/b", "a\0", "ä", "a" * 65, "a b"])
def test_names_that_could_leave_the_directory_are_refused(name: str) -> None:
    with CacheManager(_config(), FINGERPRINT, inline=True) as caches, pytest.raises(ConfigError):
        caches.get(name)


# Maintenance


def test_threads_keep_what_several_threads_say() -> None:
    random_tokens = np.random.default_rng(1)
    texts = [random_tokens.integers(0, 50, 200).tolist() for _ in range(400)]
    with CacheManager(_config(capacity_tokens=1 << 20, flush_tokens=2048, dedup_block_tokens=0), FINGERPRINT) as caches:
        cache = caches.get()
        stop = threading.Event()
        torn: list[object] = []

        def read() -> None:
            while not stop.is_set():
                snapshot = cache.snapshot()
                if snapshot.num_tokens % 201:
                    torn.append(snapshot)

        def append(part: int) -> None:
            for i, text in enumerate(texts[part::3]):
                cache.append(text)
                if i % 10 == 0:
                    cache.flush()

        threads = [threading.Thread(target=append, args=(part,)) for part in range(3)]
        reader = threading.Thread(target=read)
        for thread in [reader, *threads]:
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        reader.join()
        caches.flush()
        stats = cache.stats()
        assert not torn and stats.num_failures == stats.num_dropped_tokens == 0
        assert stats.num_memtable_tokens == 0 and stats.num_merges > 0 and stats.num_segments < 10
        assert sorted(_said(caches)) == sorted(texts)
        pattern = texts[0][:3]
        assert snapshot_count(cache.snapshot(), pattern) == naive_count(snapshot_text(cache.snapshot()), pattern)


def test_the_tail_is_sealed_after_the_interval() -> None:
    with CacheManager(_config(rebuild_interval_s=0.02), FINGERPRINT) as caches:
        caches.get().append([1, 2])
        _wait_until_sealed(caches)
        assert caches.get().stats().num_segments == 1


def test_a_shared_log_does_not_outrun_the_sealing() -> None:
    with CacheManager(_config(capacity_tokens=1 << 15, flush_tokens=256), FINGERPRINT) as caches:
        for i in range(200):
            caches.get().append_replicated([np.array([i % 100] * 120, np.int32)])
        assert caches.get().stats().num_dropped_tokens == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12), st.integers(1, 5), st.integers(20, 200))
def test_pieces_shared_together_are_stored_as_one_by_one(ids: list[list[int]], together: int, capacity: int) -> None:
    pieces = [np.array(each, np.int32) for each in ids]
    config = IndexConfig(capacity_tokens=capacity, flush_tokens=16, dedup_block_tokens=4, lead_in_tokens=2)
    one, other = (NamespaceCache("a", config, fingerprint=FINGERPRINT) for _ in range(2))
    for piece in pieces:
        one.append_replicated([np.array(piece, np.int32)], source={"n": 1})
    for start in range(0, len(pieces), together):
        other.append_replicated(pieces[start : start + together], source={"n": 1})
    assert snapshot_text(one.snapshot()) == snapshot_text(other.snapshot())
    for cache in (one, other):
        for each in ids:
            cache.append(each, prompt_length=len(each))  # what is stored of it says what is known
    assert snapshot_text(one.snapshot()) == snapshot_text(other.snapshot())
    assert replace(one.stats(), generation=0) == replace(other.stats(), generation=0)


# Files


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with CacheManager(_config(tmp_path), FINGERPRINT) as caches:
        caches.get().append([1])
    with pytest.raises(TokenizerMismatch):
        CacheManager(_config(tmp_path), "f" * 32)
    with pytest.raises(ConfigError):
        CacheManager(_config(), "not a fingerprint", inline=True)


# Marks come back after a restart exactly as far as the text before them had reached files


def _set(path: Path, **index: Any) -> CacheManager:
    return CacheManager(CacheConfig(directory=path, index=IndexConfig(**index)), FINGERPRINT, inline=True)


def _after_crash(path: Path, copy: Path) -> CacheManager:
    """The directory opened as a process killed now would leave it."""
    shutil.copytree(path, copy)
    return _set(copy)


# Where files cannot be written


def test_what_could_not_be_written_holds_the_mark_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = SegmentDirectory.write
    is_full = False

    def write(self: SegmentDirectory, segment: Segment) -> Segment:
        if is_full:
            raise OSError(28, "No space left on device")
        return written(self, segment)

    monkeypatch.setattr(SegmentDirectory, "write", write)
    with _set(tmp_path / "a", merge_fanout=2, flush_tokens=1) as caches:
        cache = caches.get()
        cache.append_replicated([np.array([1, 1, 1, 1], np.int32)], source={"n": 1})
        cache.maintain()
        is_full = True
        for number in range(2, 6):  # sealed, and merged with the file, in memory only
            cache.append_replicated([np.array([number] * 4, np.int32)], source={"n": number})
            cache.maintain()
        assert len(cache.snapshot().segments) < 5
        with _after_crash(tmp_path / "a", tmp_path / "b") as again:
            assert again.get().checkpoint == Checkpoint({"n": 1}, 5)
            assert stored(again) == [[1, 1, 1, 1]]  # the file it was merged from is still there
        is_full = False
        for number in range(6, 20):
            cache.append_replicated([np.array([number] * 4, np.int32)], source={"n": number})
            cache.maintain()
        assert len(cache.snapshot().segments) < 5
        text = stored(caches)
    with _set(tmp_path / "a") as again:
        kept = again.get().checkpoint
        assert kept is not None and kept.position % 5 == 0 and kept.source == {"n": kept.position // 5}
        assert (
            stored(again)[: kept.source["n"]]
            == text[: kept.source["n"]]
            == [[n] * 4 for n in range(1, 1 + kept.source["n"])]
        )
        assert kept.source["n"] == 19  # merging wrote what had only been in memory
    assert "stays in memory" in caplog.text
