"""Files in parts: what comes out is what went in, whatever the order, and a part that is torn or foreign is refused."""

from __future__ import annotations

import hashlib
import json
import random as chance
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.offline.command import main
from benchmarks.offline.grids import from_grids, to_grids
from benchmarks.offline.packing import collect, pack
from benchmarks.offline.parts import CHUNK_BYTES
from benchmarks.offline.planes import GRIDS, decode, encode
from benchmarks.offline.streams import PartError
from benchmarks.offline.unpacking import unpack

PART_BYTES = 9 << 20


def safetensors(path: Path, dtype: str, numbers: bytes) -> None:
    width = {"F32": 4, "BF16": 2}[dtype]
    head = json.dumps(
        {"w": {"dtype": dtype, "shape": [len(numbers) // width], "data_offsets": [0, len(numbers)]}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + numbers)


def tree(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and ".carried" not in path.parts
    }


def numbers_of(parts: Iterable[Path]) -> set[int]:
    return {int(part.name.split("-")[1]) for part in parts}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A model, texts, an empty file and noise that needs several parts."""
    root = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(0)
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "noise").write_bytes(random.bytes(2 * PART_BYTES + 5))
    (root / "text.json").write_text("all alike\n" * 9999)
    (root / "empty").touch()
    weights = random.normal(0, 0.02, CHUNK_BYTES // 2).astype(np.float32)
    safetensors(root / "half.safetensors", "BF16", (weights.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    out = tmp_path_factory.mktemp("parts")
    return root, pack(collect(root, ""), out, PART_BYTES)


@settings(max_examples=8)
@given(st.randoms(use_true_random=False))
def test_parts_in_any_order_and_more_than_once_give_the_files_back(
    packed: tuple[Path, list[Path]], tmp_path_factory: pytest.TempPathFactory, random: chance.Random
) -> None:
    root, parts = packed
    into = tmp_path_factory.mktemp("into")
    order = [*parts, parts[0]]
    random.shuffle(order)
    came: set[Path] = set()
    for part in order:
        state = unpack(part, into, threads=2)
        came.add(part)
        assert set(state.missing_parts) == numbers_of(parts) - numbers_of(came)
        assert bool(tree(into)) == (len(came) == len(parts))  # nothing that is half there has its name
    assert tree(into) == tree(root)


def test_no_part_is_larger_than_it_may_be_and_bfloat16_weights_shrink(packed: tuple[Path, list[Path]]) -> None:
    root, parts = packed
    assert len(parts) >= 3 and all(part.stat().st_size <= PART_BYTES for part in parts)
    half = (root / "half.safetensors").read_bytes()[-CHUNK_BYTES:]
    _, written = encode(half, 2)
    assert len(written) < 0.75 * len(half)


@settings(max_examples=40)
@given(st.data())
def test_a_part_that_is_torn_anywhere_is_refused_and_leaves_no_file(
    packed: tuple[Path, list[Path]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    _, parts = packed
    whole = parts[-1].read_bytes()
    at = data.draw(st.one_of(st.integers(0, 2000), st.integers(0, len(whole) - 1)))
    torn = data.draw(st.sampled_from(["cut", "changed", "longer"]))
    made = {
        "cut": whole[:at],
        "changed": whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :],
        "longer": whole + b"x",
    }[torn]
    directory = tmp_path_factory.mktemp("torn")
    (directory / "part").write_bytes(made)
    with pytest.raises(PartError):
        unpack(directory / "part", directory / "into", threads=1)
    assert not tree(directory / "into")


@pytest.mark.parametrize("path", ["../out", "/etc/x", "a/../../b", ".carried/x", "a\\b", "", "./a", "a//b"])
def test_a_part_that_names_a_place_outside_is_refused(path: str, tmp_path: Path) -> None:
    said = {
        "set_id": "0" * 24,
        "number": 1,
        "total": 1,
        "files": [{"path": path, "size": 0}],
        "chunks": [],
    }
    head = json.dumps(said).encode()
    front = struct.pack("<8sI32s", b"SSDPART1", len(head), hashlib.sha256(head).digest())
    (tmp_path / "part").write_bytes(front + head)
    with pytest.raises(PartError):
        unpack(tmp_path / "part", tmp_path / "into")


def test_a_part_of_another_set_is_refused_in_one_line(
    packed: tuple[Path, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, parts = packed
    (tmp_path / "other").write_text("x")
    assert main(["pack", str(tmp_path / "other"), "--out", str(tmp_path / "parts")]) == 0
    assert main(["unpack", str(parts[0]), "--into", str(tmp_path / "into")]) == 0
    capsys.readouterr()
    assert main(["unpack", str(tmp_path / "parts" / "part-01"), "--into", str(tmp_path / "into")]) == 1
    said = capsys.readouterr().err
    assert "another set" in said and said.count("\n") == 1


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([16, 32]),
    st.sampled_from([15, 16, 31, 127]),
    st.booleans(),
    st.integers(0, 40),
)
def test_weights_that_were_quantised_once_come_back_to_the_last_bit(
    seed: int, block: int, most: int, is_affine: bool, num_others: int
) -> None:
    random = np.random.default_rng(seed)
    scale = (random.normal(0, 0.01, (24, 1)).astype(np.float16).astype(np.float32)) * np.float32(random.integers(1, 63))
    q = random.integers(0 if is_affine else -most, most + 1, (24, block)).astype(np.float32)
    least = random.normal(0, 0.1, (24, 1)).astype(np.float16).astype(np.float32) if is_affine else np.float32(0)
    others = random.normal(0, 1, num_others).astype(np.float32)
    values = np.concatenate([(scale * q - least if is_affine else scale * q).reshape(-1), others]).astype(np.float32)
    way, written = encode(values.tobytes(), 4)
    assert decode(way, written, values.nbytes) == values.tobytes()


def test_quantised_weights_take_little_more_than_their_integers() -> None:
    random = np.random.default_rng(0)
    scale = np.abs(random.normal(0, 0.01, (8192, 1))).astype(np.float16).astype(np.float32)
    q = np.clip(np.rint(random.normal(0, 5, (8192, 32))), -15, 15) + 0.0  # no -0.0: integers have none
    q[:, 0] = -16
    values = (scale * q.astype(np.float32)).astype(np.float32)
    way, written = encode(values.tobytes(), 4)
    assert way == GRIDS and 8 * len(written) / values.size < 6


@settings(max_examples=40)
@given(st.lists(st.floats(width=32, allow_nan=True), max_size=200))
def test_any_floats_come_back(values: list[float]) -> None:
    data = np.array(values, np.float32)
    way, written = encode(data.tobytes(), 4)
    assert decode(way, written, data.nbytes) == data.tobytes()
    if (grids := to_grids(data)) is not None:
        assert from_grids(*grids).tobytes() == data.tobytes()


@settings(max_examples=100)
@given(st.sampled_from(["bytes", "planes-2", "planes-4", "grids", "other"]), st.binary(max_size=300))
def test_bytes_that_nobody_wrote_are_refused_or_have_the_size_that_was_asked_for(way: str, data: bytes) -> None:
    with suppress(PartError):
        assert len(decode(way, data, 64)) == 64
