"""Files in parts: what comes out is what went in, whatever the order, and a part that is torn or foreign is refused."""

from __future__ import annotations

import hashlib
import json
import random as chance
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.offline import CHUNK_BYTES, PartError, collect, main, pack, unpack

PART_BYTES = 9 << 20


def tree(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and ".carried" not in path.parts)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def numbers_of(parts: Iterable[Path]) -> set[int]:
    return {int(part.name.split("-")[1]) for part in parts}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Weights, texts, an empty file, one of odd length, and noise that needs several parts."""
    root = tmp_path_factory.mktemp("files") / "all"
    random = np.random.default_rng(0)
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "noise").write_bytes(random.bytes(2 * PART_BYTES + 5))
    (root / "text.json").write_text("all alike\n" * 9999)
    (root / "empty").touch()
    weights = random.normal(0, 0.02, CHUNK_BYTES // 2).astype(np.float32)
    (root / "half").write_bytes((weights.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return root.parent, pack(collect(root, "all"), tmp_path_factory.mktemp("parts"), PART_BYTES)


@settings(max_examples=6)
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
        came.add(part)
        assert set(unpack(part, into)) == numbers_of(parts) - numbers_of(came)
        assert bool(tree(into)) == (len(came) == len(parts))  # nothing that is half there has its name
    assert tree(into) == tree(root)


def test_no_part_is_larger_than_it_may_be_and_bfloat16_weights_shrink(
    packed: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    root, parts = packed
    assert len(parts) >= 3 and all(part.stat().st_size <= PART_BYTES for part in parts)
    (part,) = pack([(root / "all" / "half", "half")], tmp_path, PART_BYTES)
    assert part.stat().st_size < 0.75 * CHUNK_BYTES


@settings(max_examples=30)
@given(st.data())
def test_a_part_that_is_torn_anywhere_is_refused_and_leaves_no_file(
    packed: tuple[Path, list[Path]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = packed[1][-1].read_bytes()
    at = data.draw(st.one_of(st.integers(0, 2000), st.integers(0, len(whole) - 1)))
    torn = {
        "cut": whole[:at],
        "changed": whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :],
        "longer": whole + b"x",
    }[data.draw(st.sampled_from(["cut", "changed", "longer"]))]
    directory = tmp_path_factory.mktemp("torn")
    (directory / "part").write_bytes(torn)
    with pytest.raises(PartError):
        unpack(directory / "part", directory / "into")
    assert not tree(directory / "into")


@pytest.mark.parametrize("path", ["../out", "/etc/x", "a/../../b", ".carried/x", "a\\b", "", "./a", "a//b"])
def test_a_part_that_names_a_place_outside_is_refused(path: str, tmp_path: Path) -> None:
    said = {"set": "0" * 24, "number": 1, "total": 1, "files": [{"path": path, "size": 0}], "chunks": []}
    head = json.dumps(said).encode()
    front = struct.pack("<8sI32s", b"SSDPART2", len(head), hashlib.sha256(head).digest())
    (tmp_path / "part").write_bytes(front + head)
    with pytest.raises(PartError):
        unpack(tmp_path / "part", tmp_path / "into")


def test_a_part_of_another_set_is_refused_in_one_line(
    packed: tuple[Path, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").write_text("x")
    assert main(["pack", str(tmp_path / "other"), "--out", str(tmp_path / "parts")]) == 0
    assert main(["unpack", str(packed[1][0]), "--into", str(tmp_path / "into")]) == 0
    capsys.readouterr()
    assert main(["unpack", str(tmp_path / "parts" / "part-01"), "--into", str(tmp_path / "into")]) == 1
    said = capsys.readouterr().err
    assert "another set" in said and said.count("\n") == 1
