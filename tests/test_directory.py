from __future__ import annotations

import contextlib
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.errors import CacheError, CacheLocked, SegmentCorrupt
from ssd.retrieval.directory import SegmentDirectory
from ssd.retrieval.files import MANIFEST_NAME, is_regular, is_temporary, read_manifest
from ssd.retrieval.segment import SEPARATOR, Segment
from ssd.retrieval.suffix_array import build_segment
from tests.waiting import PATIENCE_S

FINGERPRINT = "0123456789abcdef" * 2


def _open(path: Path, fingerprint: str = FINGERPRINT) -> SegmentDirectory:
    return SegmentDirectory(path, fingerprint=fingerprint, namespace="default")


def _segment(start: int, segment_id: str) -> Segment:
    return build_segment(np.array([start % 1000, SEPARATOR], np.int32), start=start, segment_id=segment_id)


def _files(path: Path) -> set[str]:
    return {entry.name for entry in path.glob("*.seg")}


def _filled(path: Path) -> Path:
    directory = _open(path)
    directory.commit([directory.write(_segment(0, "a")), directory.write(_segment(2, "b"))], next_position=4)
    directory.close()
    return path


def test_uncommitted_and_temporary_files_are_removed_at_the_next_opening(tmp_path: Path) -> None:
    directory = _open(_filled(tmp_path))
    directory.write(_segment(4, "c"))
    directory.close()
    (tmp_path / "d.seg.17.tmp").write_bytes(b"half")
    _open(tmp_path).close()
    assert _files(tmp_path) == {"a.seg", "b.seg"} and not list(tmp_path.glob("*.tmp"))


def test_a_commit_leaves_files_alone_that_are_being_written(tmp_path: Path) -> None:
    directory = _open(_filled(tmp_path))
    (tmp_path / "merged.seg").write_bytes(b"another process is at it")
    directory.commit(directory.load()[0], next_position=4)
    assert (tmp_path / "merged.seg").exists()
    directory.close()


def _try_to_open(path: Path, results: multiprocessing.Queue[str]) -> None:
    try:
        _open(path).close()
    except CacheLocked as error:
        results.put(str(error))
    else:
        results.put("")


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    directory = _open(tmp_path)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_try_to_open, args=(tmp_path, results))
    process.start()
    assert "another process" in results.get(timeout=PATIENCE_S)
    process.join()
    with pytest.raises(CacheLocked):  # within one process too
        _open(tmp_path)
    directory.close()
    _open(tmp_path).close()


def test_a_missing_or_exchanged_segment_is_left_out(tmp_path: Path) -> None:
    _filled(tmp_path)
    (tmp_path / "b.seg").replace(tmp_path / "a.seg")
    directory = _open(tmp_path)
    segments, failures = directory.load()
    assert segments == [] and len(failures) == 2
    directory.close()


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"format": 1}', "[" * 100_000, "\0\xff", '{"format":1,"manifest":3}']
)
def test_a_damaged_manifest_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(SegmentCorrupt, match=r"delete the directory"):
        read_manifest(tmp_path, fingerprint=FINGERPRINT)


@given(st.integers(0, 500), st.integers(1, 255))
def test_a_changed_manifest_is_noticed(tmp_path_factory: pytest.TempPathFactory, offset: int, flip: int) -> None:
    path = _filled(tmp_path_factory.mktemp("manifest"))
    good = read_manifest(path, fingerprint=FINGERPRINT)
    content = bytearray((path / MANIFEST_NAME).read_bytes())
    content[offset % len(content)] ^= flip
    (path / MANIFEST_NAME).write_bytes(content)
    with contextlib.suppress(CacheError):
        assert read_manifest(path, fingerprint=FINGERPRINT) == good  # white space, perhaps


def test_a_file_that_is_removed_meanwhile_is_no_file(tmp_path: Path) -> None:
    """Who opens the directory of a server that was killed may find its rebuild process still cleaning up."""
    gone = tmp_path / "000000000000-0123456789abcdef.seg.17.tmp"
    gone.touch()
    assert is_temporary(gone)
    gone.unlink()
    assert not is_temporary(gone) and not is_regular(gone)
