from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ssd.errors import CacheError, FormatVersion, SegmentCorrupt, TokenizerMismatch
from ssd.retrieval.segment_file import open_segment, segment_file_size, write_segment
from ssd.retrieval.snapshot import SEPARATOR, Segment
from ssd.retrieval.suffix_array import build_segment

FINGERPRINT = "0123456789abcdef" * 2
OTHER = "f" * 32


def _segment(num_tokens: int = 20, start: int | None = 1234) -> Segment:
    tokens = np.arange(num_tokens, dtype=np.int32) % 7
    tokens[-1] = SEPARATOR
    return build_segment(tokens, start=start, segment_id="some-segment")


def _write(path: Path, segment: Segment) -> None:
    write_segment(path, segment, fingerprint=FINGERPRINT, namespace="default", durable=False)


def _bytes(segment: Segment) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.seg"
        _write(path, segment)
        return path.read_bytes()


@pytest.mark.parametrize("start", [0, 1 << 50, None])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 1000])
def test_what_is_written_is_read(tmp_path: Path, num_tokens: int, start: int | None) -> None:
    path = tmp_path / "a.seg"
    written = _segment(num_tokens, start)
    write_segment(path, written, fingerprint=FINGERPRINT, namespace="default")
    assert path.stat().st_size == segment_file_size(num_tokens)
    read = open_segment(path, fingerprint=FINGERPRINT)
    assert np.array_equal(read.tokens, written.tokens) and np.array_equal(read.suffixes, written.suffixes)
    assert (read.start, read.segment_id) == (start, "some-segment")
    assert not read.tokens.flags.writeable and read.tokens.ctypes.data % 64 == 0 and read.suffixes.ctypes.data % 64 == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.seg"]


def test_the_map_outlives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.seg"
    _write(path, _segment())
    read = open_segment(path, fingerprint=FINGERPRINT)
    path.unlink()
    assert read.tokens.tolist() == _segment().tokens.tolist()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "a.seg", _segment())
    with pytest.raises(TokenizerMismatch, match=r"rebuild it"):
        open_segment(tmp_path / "a.seg", fingerprint=OTHER)


def test_another_version_is_refused(tmp_path: Path) -> None:
    content = bytearray(_bytes(_segment()))
    content[8] = 2
    (tmp_path / "a.seg").write_bytes(content)
    with pytest.raises(FormatVersion, match=r"format 2, this version reads 1"):
        open_segment(tmp_path / "a.seg", fingerprint=FINGERPRINT)


def test_a_header_that_asks_for_the_moon_is_refused(tmp_path: Path) -> None:
    content = bytearray(_bytes(_segment()))
    for num_tokens in (0, 21, (1 << 31) - 1, 1 << 31, (1 << 64) - 1):
        content[16:24] = struct.pack("<Q", num_tokens)
        content[248:256] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(content[:248])))
        (tmp_path / "a.seg").write_bytes(content)
        with pytest.raises(SegmentCorrupt, match=r"do not fit"):
            open_segment(tmp_path / "a.seg", fingerprint=FINGERPRINT)


@pytest.mark.parametrize("suffix", [-1, 20])
def test_a_suffix_outside_the_text_is_refused_though_the_checksums_match(tmp_path: Path, suffix: int) -> None:
    good = _segment()
    bad = Segment(good.tokens, np.full_like(good.suffixes, suffix), good.start, good.segment_id)
    _write(tmp_path / "a.seg", bad)
    with pytest.raises(SegmentCorrupt, match=r"suffix"):
        open_segment(tmp_path / "a.seg", fingerprint=FINGERPRINT)


@pytest.mark.parametrize("tokens", [[1, 2], [-2, SEPARATOR]])
def test_tokens_that_are_none_are_refused_though_the_checksums_match(tmp_path: Path, tokens: list[int]) -> None:
    _write(tmp_path / "a.seg", Segment(np.array(tokens, np.int32), np.array([0, 1], np.int32), 0, "a"))
    with pytest.raises(SegmentCorrupt, match=r"tokens"):
        open_segment(tmp_path / "a.seg", fingerprint=FINGERPRINT)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_segment(tmp_path / "a.seg", fingerprint=FINGERPRINT)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.seg").mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError):
        _write(tmp_path / "a.seg", _segment())
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.seg"]


GOOD = _bytes(_segment())


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(1, 255)), min_size=1, max_size=3), st.data())
def test_changed_bytes_are_noticed(changes: list[tuple[int, int]], data: st.DataObject) -> None:
    content = bytearray(GOOD)
    for offset, flip in changes:
        content[offset] ^= flip
    length = data.draw(st.sampled_from([len(GOOD), data.draw(st.integers(0, len(GOOD) + 64))]))
    content = content[:length].ljust(length, b"\0")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.seg"
        path.write_bytes(content)
        try:
            segment = open_segment(path, fingerprint=FINGERPRINT)
        except CacheError as error:
            assert str(path) in str(error)
        else:  # only padding was changed, or nothing after all
            assert segment.tokens.tobytes() == GOOD[256:336] and segment.suffixes.tobytes() == GOOD[384:]


@given(st.binary(max_size=600))
def test_arbitrary_bytes_are_no_segment(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.seg"
        path.write_bytes(content)
        with pytest.raises(CacheError):
            open_segment(path, fingerprint=FINGERPRINT)
