"""Whatever stands in a cache directory: what was written, one of our errors, or something that can be used."""

from __future__ import annotations

import copy
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.index.longest_match import longest_match
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.drafting import DRAFTER_NAMES, DraftRequest, make_drafter
from ssd.errors import CacheError
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.files import MANIFEST_NAME, read_manifest
from ssd.retrieval.segment import (
    HEADER_LENGTH,
    SEPARATOR,
    Segment,
    num_samples,
    open_segment,
    packed_size,
    write_segment,
)
from ssd.retrieval.snapshot import SegmentTable, Snapshot
from ssd.retrieval.suffix_array import build_segment
from tests.reference import drafting as reference
from tests.reference.retrieval import sequences, snapshot_text

FINGERPRINT = "0123456789abcdef" * 2


def _segment(num_tokens: int = 20, start: int | None = 1234) -> Segment:
    tokens = np.arange(num_tokens, dtype=np.int32) % 7
    tokens[-1] = SEPARATOR
    return build_segment(tokens, start=start, segment_id="some-segment")


def _write(path: Path, segment: Segment) -> None:
    write_segment(path, segment, fingerprint=FINGERPRINT, namespace="default")


def _bytes(segment: Segment) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.seg"
        _write(path, segment)
        return path.read_bytes()


def _signed(content: bytearray) -> bytes:
    """With every checksum made to match what the bytes are now, as far as the header says where the sections lie."""
    width, n = (min(value, 1 << 16) for value in struct.unpack_from("<IQ", content, 20))
    text, order = 256 + packed_size(n, width), 4 * n
    fence = text + -(-order // 64) * 64
    for offset, part in ((48, content[256:text]), (56, content[text : text + order]), (64, content[fence:])):
        struct.pack_into("<Q", content, offset, xxhash.xxh3_64_intdigest(bytes(part)))
    struct.pack_into("<Q", content, 248, xxhash.xxh3_64_intdigest(bytes(content[:248])))
    return bytes(content)


GOOD = _bytes(_segment(200))
changes = st.lists(
    st.tuples(st.integers(0, HEADER_LENGTH - 1) | st.integers(0, len(GOOD) - 1), st.integers(1, 255)),
    min_size=1,
    max_size=3,
)


def _changed(flips: list[tuple[int, int]], length: int) -> bytearray:
    content = bytearray(GOOD)
    for offset, flip in flips:
        content[offset] ^= flip
    return content[:length].ljust(length, b"\0")


@given(changes, st.one_of(st.just(len(GOOD)), st.integers(0, len(GOOD) + 64)))
def test_changed_bytes_are_noticed(flips: list[tuple[int, int]], length: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.seg"
        path.write_bytes(_changed(flips, length))
        try:
            segment = open_segment(path, fingerprint=FINGERPRINT)
        except CacheError as error:
            assert str(path) in str(error)
        else:  # only padding was changed, or nothing after all
            assert segment.tokens.tolist() == _segment(200).tokens.tolist()
            assert segment.order.tolist() == _segment(200).order.tolist()


@given(
    changes, st.one_of(st.just(len(GOOD)), st.integers(256, len(GOOD) + 64)), st.lists(st.integers(-1, 8), max_size=40)
)
@settings(max_examples=300)
def test_no_forged_file_leads_a_lookup_outside_it(
    flips: list[tuple[int, int]], length: int, context: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.seg"
        path.write_bytes(_signed(_changed(flips, length)))
        try:
            segment = open_segment(path, fingerprint=FINGERPRINT)
        except CacheError as error:
            assert str(path) in str(error)
            return
    n = len(segment)
    assert segment.order.min() >= 1 and segment.order.max() <= n and len(segment.sparse_index) == num_samples(n)
    assert len(segment.text) == packed_size(n, segment.width) and segment.tokens[-1] == SEPARATOR
    empty = reference.make_snapshot([])
    snapshot = Snapshot(1, SegmentTable([segment]), empty.ring, 0, 0)
    match = longest_match(snapshot, np.array(context, np.int32), 32)
    assert match.length <= len(context) and match.support <= n
    request = DraftRequest("a", np.array(context, np.int32), 0, snapshot, 16)
    for name in DRAFTER_NAMES:
        assert len(make_drafter(name, DraftConfig()).propose([request])[0].token_ids) <= 16


# Manifests

_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(1 << 70), 1 << 70),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(
            ["..", "../../etc/passwd", "a/b", "", "\0", "ü", "a" * 100, FINGERPRINT, "default", 1 << 61, 1 << 62]
        ),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    places = [path] if path else []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        places += paths_in(inner, (*path, key))
    return places


def opened(home: Path) -> CacheManager:
    index = IndexConfig(capacity_tokens=4000, flush_tokens=16, merge_fanout=2, dedup_block_tokens=0)
    return CacheManager(CacheConfig(index=index, directory=home), FINGERPRINT, inline=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile")
    with opened(path) as caches:
        caches.get().set_source({"last": "1-0"})
        for number in range(5):
            caches.get().append([number] * 20)
            caches.maintain()
    return path


def use(home: Path) -> None:
    """Open, learn, close, open again: what was learned is there, whatever the directory held before."""
    try:
        caches = opened(home)
    except CacheError as error:
        assert "\n" not in str(error)
        return
    with caches:
        caches.get().append([77] * 20)
        caches.flush()
        assert sequences(snapshot_text(caches.get().snapshot()))[-1] == [77] * 20
    with opened(home) as caches:
        assert sequences(snapshot_text(caches.get().snapshot()))[-1] == [77] * 20


@given(st.data())
@settings(max_examples=120)
def test_any_manifest_with_a_right_checksum_is_refused_or_used(home: Path, data: st.DataObject) -> None:
    outer = json.loads((home / "default" / MANIFEST_NAME).read_text())
    content = copy.deepcopy(outer["manifest"])
    for _ in range(data.draw(st.integers(1, 3))):
        places = paths_in(content)
        if not places:
            break
        *way, last = data.draw(st.sampled_from(places))
        inner = content
        for key in way:
            inner = inner[key]
        if data.draw(st.booleans()):
            inner[last] = data.draw(_VALUES)
        else:
            del inner[last]
    digest = xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
    text = json.dumps({**outer, "manifest": content, "xxh3": digest})
    with tempfile.TemporaryDirectory() as place:
        copied = Path(place) / "default"
        copied.mkdir()
        for file in (home / "default").iterdir():
            (copied / file.name).write_bytes(file.read_bytes())
        (copied / MANIFEST_NAME).write_text(text)
        use(Path(place))


@given(st.one_of(st.binary(max_size=60), _VALUES.map(lambda value: json.dumps(value).encode())))
@example(b"[" * 100_000)
@example(b'{"format": 1}')
@example(b'{"format": 1, "manifest": 3}')
def test_any_bytes_are_no_manifest_and_the_error_says_what_to_do(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("manifest")
    (path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CacheError, match=r"delete the directory|has format"):
        read_manifest(path, fingerprint=FINGERPRINT)
