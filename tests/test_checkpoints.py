"""Marks come back after a restart exactly as far as the text before them had reached files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.cache_state import Checkpoint
from ssd.retrieval.directory import SegmentDirectory
from ssd.retrieval.segment import Segment
from tests.sharing_replica import FINGERPRINT, stored


def _set(path: Path, **index: Any) -> CacheSet:
    return CacheSet(CacheConfig(directory=path, index=IndexConfig(**index)), FINGERPRINT, inline=True)


def _after_crash(path: Path, copy: Path) -> CacheSet:
    """The directory opened as a process killed now would leave it."""
    shutil.copytree(path, copy)
    return _set(copy)


def test_a_mark_waits_for_the_text_before_it(tmp_path: Path) -> None:
    with _set(tmp_path / "a") as caches:
        cache = caches.get()
        assert cache.kept is None
        cache.append_all_shared([np.array([1, 2], np.int32)], source={"n": 1})
        cache.set_source({"n": 2})
        caches.flush()
        cache.append([3])
        cache.set_source({"n": 3})
        caches.maintain()  # seals nothing
        with _after_crash(tmp_path / "a", tmp_path / "b") as again:
            assert again.get().kept == Checkpoint({"n": 2}, 3)
            assert stored(again) == [[1, 2]]
    with _set(tmp_path / "a") as again:
        assert again.get().kept == Checkpoint({"n": 3}, 5)


def test_a_mark_is_kept_through_a_life_that_sets_none(tmp_path: Path) -> None:
    with _set(tmp_path / "a") as caches:
        caches.get().append_all_shared([np.array([1, 2], np.int32)], source={"n": 1})
    with _set(tmp_path / "a") as caches:
        caches.get().append([3, 4, 5])
    with _set(tmp_path / "a") as caches:
        assert caches.get().kept == Checkpoint({"n": 1}, 3)


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
    with _set(tmp_path / "a", merge_fanout=2, seal_tokens=1) as caches:
        cache = caches.get()
        cache.append_all_shared([np.array([1, 1, 1, 1], np.int32)], source={"n": 1})
        cache.maintain()
        is_full = True
        for number in range(2, 6):  # sealed, and merged with the file, in memory only
            cache.append_all_shared([np.array([number] * 4, np.int32)], source={"n": number})
            cache.maintain()
        assert len(cache.snapshot().segments) < 5
        with _after_crash(tmp_path / "a", tmp_path / "b") as again:
            assert again.get().kept == Checkpoint({"n": 1}, 5)
            assert stored(again) == [[1, 1, 1, 1]]  # the file it was merged from is still there
        is_full = False
        for number in range(6, 20):
            cache.append_all_shared([np.array([number] * 4, np.int32)], source={"n": number})
            cache.maintain()
        assert len(cache.snapshot().segments) < 5
        text = stored(caches)
    with _set(tmp_path / "a") as again:
        kept = again.get().kept
        assert kept is not None and kept.position % 5 == 0 and kept.source == {"n": kept.position // 5}
        assert (
            stored(again)[: kept.source["n"]]
            == text[: kept.source["n"]]
            == [[n] * 4 for n in range(1, 1 + kept.source["n"])]
        )
        assert kept.source["n"] == 19  # merging wrote what had only been in memory
    assert "stays in memory" in caplog.text


def test_positions_of_pieces_are_where_they_lie() -> None:
    index = IndexConfig(capacity_tokens=400, lead_in_tokens=2)
    with CacheSet(CacheConfig(index=index), FINGERPRINT, inline=True) as caches:
        cache = caches.get()
        cache.append_all_shared([np.array([9, 9, 9], np.int32)])
        heard: list[tuple[int, list[list[int]]]] = []
        cache.add_listener(lambda pieces: heard.append((pieces.position, [piece.tolist() for piece in pieces])))
        cache.append(np.arange(120))
        cache.append([7])
        (first, pieces), (second, last) = heard
        assert first == 4 and len(pieces) > 1
        assert second == first + sum(len(piece) + 1 for piece in pieces)
        assert last == [[7]]
        snapshot = cache.snapshot()
        position = first
        for piece in pieces:
            assert snapshot.ring[position : position + len(piece)].tolist() == piece
            position += len(piece) + 1
