"""A directory without its manifest, with others' files in it, of another namespace, or that cannot be written."""

from __future__ import annotations

import logging
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from cache_builder.__main__ import main as ssd_cache
from ssd.config import CacheConfig, IndexConfig
from ssd.errors import CacheLocked, NamespaceMismatch, StoreUnavailable
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.directory import SegmentDirectory
from ssd.retrieval.files import MANIFEST_NAME, make_directory, make_scratch, write_file
from ssd.retrieval.segment import SEPARATOR, Segment
from ssd.retrieval.segment_file import write_segment
from ssd.retrieval.static import StaticWriter
from ssd.retrieval.suffix_array import build_segment
from tests.reference.retrieval import sequences, snapshot_text

FINGERPRINT = "0123456789abcdef" * 2


def opened(path: Path, namespace: str = "default") -> CacheSet:
    index = IndexConfig(capacity_tokens=8000, seal_tokens=16, merge_fanout=4, dedup_block_tokens=0)
    return CacheSet(CacheConfig(index=index, directory=path), FINGERPRINT, namespace=namespace, inline=True)


def said(caches: CacheSet) -> list[int]:
    """The first token of every sequence."""
    return [sequence[0] for sequence in sequences(snapshot_text(caches.get().snapshot()))]


def learn(caches: CacheSet, numbers: range) -> None:
    for number in numbers:
        caches.get().append([number] * 20)
        caches.maintain()


def filled(home: Path, numbers: range = range(30)) -> Path:
    """The directory of the default namespace, with many segments."""
    with opened(home) as caches:
        learn(caches, numbers)
    assert len(list((home / "default").glob("*.seg"))) > 3
    return home / "default"


def segment(start: int, *numbers: int) -> Segment:
    tokens = [token for number in numbers for token in (number, SEPARATOR)]
    return build_segment(np.array(tokens, np.int32), start=start, segment_id=f"{start:04d}-{len(numbers)}")


def put(path: Path, one: Segment, namespace: str = "default") -> Path:
    file = path / f"{one.segment_id}.seg"
    write_segment(file, one, fingerprint=FINGERPRINT, namespace=namespace)
    return file


# Without a manifest


def test_a_lost_manifest_is_made_anew_from_the_segments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path)
    files = {file.name for file in path.glob("*.seg")}
    (path / MANIFEST_NAME).unlink()
    with opened(tmp_path) as caches:
        assert said(caches) == list(range(30)) and {file.name for file in path.glob("*.seg")} == files
        (line,) = [record.getMessage() for record in caplog.records]
        assert f"{len(files)} of the ring are kept, {30 * 21} tokens; 0 are left out" in line
        learn(caches, range(30, 40))
    with opened(tmp_path) as caches:
        assert said(caches) == list(range(40)) and len(caplog.records) == 1


def test_of_segments_that_overlap_the_merged_one_is_kept_and_nothing_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "default"
    make_directory(path)
    parts = [put(path, segment(0, 1)), put(path, segment(2, 2)), put(path, segment(4, 3))]
    put(path, segment(0, 1, 2))
    other = put(path, segment(6, 4), namespace="other")
    damaged = put(path, segment(8, 5))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    with opened(tmp_path) as caches:
        assert said(caches) == [1, 2, 3]
    with opened(tmp_path) as caches:
        assert said(caches) == [1, 2, 3]
    assert other.exists() and parts[2].exists()
    assert {file.name for file in path.glob("*.left-out")} == {
        f"{file.name}.left-out" for file in (*parts[:2], damaged)
    }


def test_static_segments_are_kept_without_a_manifest_too(tmp_path: Path) -> None:
    with StaticWriter(tmp_path / "default", fingerprint=FINGERPRINT, segment_tokens=4) as writer:
        for number in range(5):
            writer.append([number])
    (tmp_path / "default" / MANIFEST_NAME).unlink()
    with StaticWriter(tmp_path / "default", fingerprint=FINGERPRINT) as writer:
        writer.append([5])
    for _ in range(2):
        with opened(tmp_path) as caches:
            assert caches.get().stats().num_static_tokens == 12
            learn(caches, range(100, 110))  # beside them
            assert caches.get().stats().num_merged > 0


# Strangers' files


@pytest.mark.parametrize("has_manifest", [True, False])
def test_what_is_not_ours_is_never_removed(tmp_path: Path, has_manifest: bool) -> None:
    path = filled(tmp_path / "cache")
    if not has_manifest:
        (path / MANIFEST_NAME).unlink()
    outside = put(tmp_path, segment(1000, 1))
    others = [path / name for name in ("video.seg", "notes.tmp", "a.seg.tmp", "x.txt", "UPPER.seg", "d.seg.x.tmp")]
    for file in others:
        file.write_bytes(b"not ours")
    others.append(put(path, segment(2000, 1), namespace="other"))
    (path / "link.seg").symlink_to(outside)
    (path / "e.seg.3.tmp").symlink_to(outside)
    (path / "directory.seg").mkdir()
    ours = put(path, segment(3000, 1)) if has_manifest else None
    for _ in range(2):
        with opened(tmp_path / "cache") as caches:
            learn(caches, range(100, 110))
    assert all(file.exists() for file in (*others, outside, path / "directory.seg"))
    assert (path / "link.seg").is_symlink() and (path / "e.seg.3.tmp").is_symlink()
    assert ours is None or not ours.exists()


def test_a_directory_that_is_a_link_to_anothers_files_loses_none(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in ("a.seg", "b.tmp", "thesis.txt"):
        (home / name).write_bytes(b"years of work")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "default").symlink_to(home)
    for _ in range(2):
        with opened(tmp_path / "cache") as caches:
            learn(caches, range(40))
    assert {"a.seg", "b.tmp", "thesis.txt"} <= {file.name for file in home.iterdir()}


def test_a_name_that_leads_elsewhere_is_not_written_through(tmp_path: Path) -> None:
    import os

    target = tmp_path / "precious"
    target.write_bytes(b"years of work")
    (tmp_path / f"learned.bin.{os.getpid()}.tmp").symlink_to(target)
    write_file(tmp_path / "learned.bin", [b"new"], durable=True)
    assert target.read_bytes() == b"years of work" and (tmp_path / "learned.bin").read_bytes() == b"new"


def test_a_cache_that_lies_among_scratch_directories_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``ssd-cache build --out /tmp/ssd-cache-warm`` wrote an hour ago: a lock that nobody holds."""
    monkeypatch.setattr("ssd.retrieval.files._MEMORY", tmp_path)
    monkeypatch.setattr("ssd.retrieval.files._STARTING_S", -1.0)
    for name in ("ssd-cache-warm", "ssd-scratch-warm"):
        with StaticWriter(tmp_path / name, fingerprint=FINGERPRINT) as writer:
            writer.append([1, 2])
    abandoned = make_scratch(1000)
    assert abandoned is not None
    abandoned[1].close()  # as if killed
    scratch = make_scratch(1000)
    assert scratch is not None and scratch[0].parent == tmp_path
    assert not abandoned[0].exists()
    assert (tmp_path / "ssd-cache-warm" / MANIFEST_NAME).exists()
    assert (tmp_path / "ssd-scratch-warm" / MANIFEST_NAME).exists()
    scratch[1].close()


# Whose it is


def test_a_directory_copied_to_another_namespace_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    shutil.copytree(tmp_path / "default", tmp_path / "other")
    before = {file.name: file.read_bytes() for file in (tmp_path / "other").iterdir()}
    with pytest.raises(NamespaceMismatch, match=r"namespace 'default', not of 'other'.*--warm"):
        opened(tmp_path, "other")
    with opened(tmp_path) as caches:  # another tenant's comes later: it begins empty, in memory
        assert caches.get("other").snapshot().num_tokens == 0
        caches.get("other").append([1] * 20)
        caches.get("other").flush()
    assert {file.name: file.read_bytes() for file in (tmp_path / "other").iterdir()} == before
    with opened(tmp_path / "new", "other") as caches:
        caches.get().add_static_directory(tmp_path / "other")
        assert caches.get().stats().num_static_tokens == 30 * 21  # on purpose


def test_a_segment_of_another_namespace_is_left_out_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "default"
    directory = SegmentDirectory(path, fingerprint=FINGERPRINT, namespace="default")
    directory.commit([directory.write(segment(0, 1)), directory.write(segment(2, 2))], next_position=4)
    directory.close()
    foreign = put(path, segment(2, 7), namespace="other")
    with opened(tmp_path) as caches:
        assert said(caches) == [1]
        learn(caches, range(5))
    assert foreign.exists() and "namespace 'other'" in caplog.text


# Who may read it


def test_what_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    with opened(home) as caches:
        learn(caches, range(10))
    directory = SegmentDirectory(home / "default", fingerprint=FINGERPRINT, namespace="default")
    directory.write_learned(b"learned")
    directory.close()
    for path in (home.parent, home, home / "default"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    files = list((home / "default").iterdir())
    assert {file.suffix for file in files} == {".seg", ".json", ".bin", ".lock"}
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


# What stops the start


def test_a_directory_that_cannot_be_used_stops_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "default").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "parent"):
        with pytest.raises(StoreUnavailable, match=r"cannot be used: .*Not a directory") as refusal:
            opened(path)
        assert "\n" not in str(refusal.value)
    with opened(tmp_path / "busy"), pytest.raises(CacheLocked):
        opened(tmp_path / "busy")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("command", [["inspect"], ["push", "--redis", "redis://127.0.0.1:1"]])
def test_the_builder_says_in_one_line_what_is_wrong_with_a_directory(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / MANIFEST_NAME).mkdir()
    for path, hint in (("file", "is no directory"), ("none", "holds no cache"), ("dir", "cannot be read")):
        assert ssd_cache([command[0], str(tmp_path / path), *command[1:]]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("ssd-cache: error: ") and hint in line
