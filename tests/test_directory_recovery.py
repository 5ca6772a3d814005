"""A directory without its manifest, with others' files in it, of another namespace, or that cannot be written."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from ssd.config import CacheConfig, IndexConfig
from ssd.errors import CacheLocked, FormatVersion, NamespaceMismatch, StoreUnavailable
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.directory import SegmentDirectory, remove_directory
from ssd.retrieval.files import DAMAGED_NAME, LOCK_NAME, MANIFEST_NAME, PREVIOUS_NAME, read_manifest, write_file
from ssd.retrieval.segment import SEPARATOR, Segment, write_segment
from ssd.retrieval.suffix_array import build_segment
from tests.reference.retrieval import sequences, snapshot_text

FINGERPRINT = "0123456789abcdef" * 2


def opened(path: Path, namespace: str = "default") -> CacheManager:
    index = IndexConfig(capacity_tokens=8000, flush_tokens=16, merge_fanout=4, dedup_block_tokens=0)
    return CacheManager(CacheConfig(index=index, directory=path), FINGERPRINT, namespace=namespace, inline=True)


def said(caches: CacheManager) -> list[int]:
    """The first token of every sequence."""
    return [sequence[0] for sequence in sequences(snapshot_text(caches.get().snapshot()))]


def learn(caches: CacheManager, numbers: range) -> None:
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


def as_writer(path: Path) -> SegmentDirectory:
    return SegmentDirectory(path, fingerprint=FINGERPRINT, namespace="default")


def committed(path: Path) -> list[Segment]:
    """Two segments, in files that a manifest names."""
    directory = as_writer(path)
    segments = [directory.write(segment(0, 1)), directory.write(segment(2, 2))]
    directory.commit(segments, next_position=4)
    directory.close()
    return segments


@pytest.mark.parametrize("damage", ["torn", "missing", "exchanged", "foreign"])
def test_a_segment_that_is_not_what_the_manifest_says_is_left_out_alone(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "default"
    one, other = (path / f"{each.segment_id}.seg" for each in committed(path))
    if damage == "torn":
        os.truncate(other, 300)
    elif damage == "missing":
        other.unlink()
    elif damage == "exchanged":
        shutil.copy(one, other)
    else:
        assert put(path, segment(2, 7), namespace="other") == other
    with opened(tmp_path) as caches:
        assert said(caches) == [1] and caches.get().stats().num_failures == 1
        learn(caches, range(5))
    if damage == "foreign":
        assert other.exists() and "namespace 'other'" in caplog.text


# A damaged manifest


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "digit": lambda file: file.write_text(file.read_text().replace('"next_position": 6', '"next_position": 7')),
    "empty": lambda file: file.write_bytes(b""),
    "half": _cut,
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "lost": Path.unlink,
    "pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "directory": _replace_by_directory,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("has_previous", [True, False])
def test_a_damaged_manifest_is_made_anew_from_the_segments(
    tmp_path: Path, damage: str, has_previous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(tmp_path)
    before = read_manifest(path)
    assert before is not None and before.next_position == 630 and (path / PREVIOUS_NAME).exists()
    if not has_previous:
        (path / PREVIOUS_NAME).unlink()
    DAMAGE[damage](path / MANIFEST_NAME)
    with opened(tmp_path) as caches:
        assert said(caches) == list(range(30)) and caches.get().stats().num_failures == 1
        assert "the manifest was rebuilt from the segments" in caplog.text
        learn(caches, range(30, 40))
    manifest = read_manifest(path)
    assert manifest is not None and (manifest.generation > before.generation or not has_previous)
    assert (path / DAMAGED_NAME).exists() == (damage != "lost")
    with opened(tmp_path) as caches:
        assert said(caches) == list(range(40)) and caches.get().stats().num_failures == 0
    remove_directory(path)
    assert not path.exists() or damage == "directory"


def test_no_flipped_bit_of_a_manifest_ends_the_start_or_loses_text(tmp_path: Path) -> None:
    committed(tmp_path / "whole" / "default")
    for offset in range((tmp_path / "whole" / "default" / MANIFEST_NAME).stat().st_size):
        home = tmp_path / str(offset)
        shutil.copytree(tmp_path / "whole", home)
        content = bytearray((home / "default" / MANIFEST_NAME).read_bytes())
        content[offset] ^= 1 << offset % 8
        (home / "default" / MANIFEST_NAME).write_bytes(content)
        with opened(home) as caches:
            assert said(caches) == [1, 2], offset


def test_of_a_merge_that_was_not_committed_result_or_inputs_count_once(tmp_path: Path) -> None:
    path = tmp_path / "default"
    committed(path)
    put(path, segment(0, 1, 2))
    (path / MANIFEST_NAME).write_bytes(b"")
    with opened(tmp_path) as caches:
        assert said(caches) == [1, 2]


def test_what_a_manifest_says_of_its_source_outlives_it(tmp_path: Path) -> None:
    path = tmp_path / "default"
    directory = as_writer(path)
    segments = [directory.write(segment(0, 1))]
    for number in range(2):
        directory.commit(segments, next_position=9, shared={"mark": {"read": number}, "position": 2})
    directory.close()
    DAMAGE["empty"](path / MANIFEST_NAME)
    directory = as_writer(path)
    assert directory.manifest.shared == {"mark": {"read": 0}, "position": 2}
    assert directory.manifest.next_position == 9
    directory.close()


# A damaged segment


def _tear(file: Path) -> None:
    os.truncate(file, 300)


def _flip_format(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[8] ^= 2
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [_tear, _flip_format])
def test_a_damaged_segment_stays_and_is_counted_at_each_opening_until_it_is_restored_or_removed(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "default"
    directory = as_writer(path)
    segments = [directory.write(segment(2 * number, number)) for number in range(3)]
    directory.commit(segments, next_position=6)
    directory.close()
    file = directory.path_of(segments[1].segment_id)
    whole = file.read_bytes()
    damage(file)
    damaged = file.read_bytes()
    for number in range(3):
        with opened(tmp_path) as caches:  # commits, merges and evicts
            assert caches.get().stats().num_failures == 1
            learn(caches, range(10 * number + 10, 10 * number + 20))
            caches.get().flush()
        assert file.read_bytes() == damaged
    file.write_bytes(whole)
    with opened(tmp_path) as caches:
        assert said(caches) == [*range(3), *range(10, 40)] and caches.get().stats().num_failures == 0
    damage(file)
    with opened(tmp_path) as caches:
        assert caches.get().stats().num_failures == 1
    file.unlink()
    for num_failures in (1, 0):  # it is missed once
        with opened(tmp_path) as caches:
            assert said(caches) == [0, 2, *range(10, 40)] and caches.get().stats().num_failures == num_failures


# Two writers


def test_a_lock_file_that_is_removed_lets_nobody_else_write(tmp_path: Path) -> None:
    with opened(tmp_path) as caches:
        learn(caches, range(5))
        (tmp_path / "default" / LOCK_NAME).unlink()
        with pytest.raises(CacheLocked):
            opened(tmp_path)
        learn(caches, range(5, 10))
        assert (tmp_path / "default" / LOCK_NAME).exists()  # for those that lock it alone
    with opened(tmp_path) as caches:
        assert said(caches) == list(range(10))


def test_no_manifest_of_another_writer_is_replaced_where_directories_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flock = fcntl.flock

    def files_only(file: BinaryIO | int, operation: int) -> None:
        if isinstance(file, int):
            raise OSError(errno.EBADF, "Bad file descriptor")  # as NFS does
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", files_only)
    with opened(tmp_path) as caches:
        learn(caches, range(5))
        (tmp_path / "default" / LOCK_NAME).unlink()
        with opened(tmp_path) as others:
            learn(others, range(100, 105))
            learn(caches, range(5, 10))
            assert "another process writes" in caplog.text and "a restart loses it" in caplog.text
        learn(caches, range(10, 15))
        assert "manifest.json was written by another process" in caches_failure(caches)
        assert said(caches) == list(range(15))  # it is searched all the same
    with opened(tmp_path) as caches:
        assert said(caches) == [*range(5), *range(100, 105)]


def caches_failure(caches: CacheManager) -> str:
    """What the next commit fails with."""
    files = caches.get()._files
    assert files is not None
    with pytest.raises(CacheLocked) as refusal:
        files._directory.commit([], next_position=0)
    return str(refusal.value)


def test_a_directory_that_was_put_in_the_place_of_ours_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as caches:
        learn(caches, range(5))
        shutil.copytree(tmp_path / "default", tmp_path / "copy")
        (tmp_path / "default").rename(tmp_path / "old")
        (tmp_path / "copy").rename(tmp_path / "default")
        before = (tmp_path / "default" / MANIFEST_NAME).read_bytes()
        learn(caches, range(5, 10))
        assert "was replaced by another directory" in caches_failure(caches)
    assert (tmp_path / "default" / MANIFEST_NAME).read_bytes() == before


def test_damaged_files_of_a_running_cache_are_written_anew_by_merges(tmp_path: Path) -> None:
    """What was read of them is in memory, and what is merged of that is right."""
    path = filled(tmp_path)
    with opened(tmp_path) as caches:
        for file in path.glob("*.seg"):
            file.write_bytes(b"overwritten")
        learn(caches, range(30, 200))
        assert caches.get().stats().num_merges > 0 and said(caches) == list(range(200))
    with opened(tmp_path) as caches:
        assert said(caches) == list(range(200))


# Strangers' files


def test_what_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    path = filled(tmp_path / "cache")
    outside = put(tmp_path, segment(1000, 1))
    others = [path / name for name in ("video.seg", "notes.tmp", "a.seg.tmp", "x.txt", "UPPER.seg", "d.seg.x.tmp")]
    for file in others:
        file.write_bytes(b"not ours")
    others.append(put(path, segment(2000, 1), namespace="other"))
    (path / "link.seg").symlink_to(outside)
    (path / "e.seg.3.tmp").symlink_to(outside)
    (path / "directory.seg").mkdir()
    ours = [put(path, segment(3000, 1)), path / "d.seg.17.tmp"]
    ours[1].write_bytes(b"half")
    for _ in range(2):
        with opened(tmp_path / "cache") as caches:
            learn(caches, range(100, 110))
    assert all(file.exists() for file in (*others, outside, path / "directory.seg"))
    assert (path / "link.seg").is_symlink() and (path / "e.seg.3.tmp").is_symlink()
    assert not any(file.exists() for file in ours)


def test_a_name_that_leads_elsewhere_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"years of work")
    (tmp_path / f"learned.bin.{os.getpid()}.tmp").symlink_to(target)
    write_file(tmp_path / "learned.bin", [b"new"], durable=True)
    assert target.read_bytes() == b"years of work" and (tmp_path / "learned.bin").read_bytes() == b"new"


# Whose it is


def test_a_directory_copied_to_another_namespace_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    shutil.copytree(tmp_path / "default", tmp_path / "other")
    before = {file.name: file.read_bytes() for file in (tmp_path / "other").iterdir()}
    with pytest.raises(NamespaceMismatch, match=r"namespace 'default', not of 'other'.*--warm"):
        opened(tmp_path, "other")
    with opened(tmp_path) as caches:  # another tenant's comes later: it begins empty, in memory
        assert caches.get("other").snapshot().num_tokens == 0
        other = caches.get("other")
        other.append([1] * 20)
        other.flush()
        assert other.snapshot().num_tokens == 21
        assert (other.stats().num_failures, caches.get().stats().num_failures) == (1, 0)
    assert {file.name: file.read_bytes() for file in (tmp_path / "other").iterdir()} == before
    with opened(tmp_path / "new", "other") as caches:
        caches.get().add_prebuilt_directory(tmp_path / "other")
        assert caches.get().stats().num_prebuilt_tokens == 30 * 21  # on purpose


# Who may read it


def test_what_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    with opened(home) as caches:
        learn(caches, range(10))
    directory = as_writer(home / "default")
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


# It is not what it was


def _raise_manifest_format(path: Path) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))


def _raise_segment_format(path: Path) -> None:
    segment = min(path.glob("*.seg"))
    content = bytearray(segment.read_bytes())
    content[8:12] = struct.pack("<I", 99)
    content[248:256] = bytes(8)  # what its checksum is then is not known here
    segment.write_bytes(content)


@pytest.mark.parametrize("raise_format", [_raise_manifest_format, _raise_segment_format])
def test_a_newer_directory_is_refused_and_left_as_it_is(tmp_path: Path, raise_format: Callable[[Path], None]) -> None:
    with opened(tmp_path) as caches:
        for i in range(3):
            caches.get().append([i] * 20)
            caches.flush()
    before = {path.name: path.read_bytes() for path in (tmp_path / "default").iterdir()}
    raise_format(tmp_path / "default")
    newer = {path.name: path.read_bytes() for path in (tmp_path / "default").iterdir()}
    assert newer.keys() == before.keys() and newer != before
    for _ in range(2):  # the lock is given back
        with pytest.raises(FormatVersion, match=r"has format 99, this version reads \d+.*version of ssd that wrote it"):
            opened(tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "default").iterdir()} == newer
    for name, content in before.items():
        (tmp_path / "default" / name).write_bytes(content)
    with opened(tmp_path) as caches:
        assert said(caches) == [0, 1, 2]


def test_a_new_directory_is_synced_into_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    path = tmp_path / "a" / "b"
    as_writer(path).close()
    assert {tmp_path, tmp_path / "a"} <= set(synced)
