"""Files in parts: what comes out is what went in, whatever the order, and a part that is torn or foreign is refused."""

from __future__ import annotations

import random as chance
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.offline import PartError, main, pack, unpack

PART_BYTES = 1 << 20


def tree(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and ".carried" not in path.parts)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def half_weights(number: int) -> bytes:
    weights = np.random.default_rng(0).normal(0, 0.02, number).astype(np.float32)
    return (weights.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Weights, texts, an empty file, and noise that needs several parts."""
    root = tmp_path_factory.mktemp("files") / "all"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "noise").write_bytes(np.random.default_rng(0).bytes(2 * PART_BYTES + 5))
    (root / "text.json").write_text("all alike\n" * 9999)
    (root / "empty").touch()
    (root / "half").write_bytes(half_weights(1 << 16))
    return root.parent, pack([(root, "all")], tmp_path_factory.mktemp("parts"), PART_BYTES)


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
        assert len(unpack(part, into)) == len(parts) - len(came)
        assert bool(tree(into)) == (len(came) == len(parts))  # nothing that is half there has its name
    assert tree(into) == tree(root)


def test_no_part_is_larger_than_it_may_be_and_bfloat16_weights_shrink(
    packed: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    assert len(packed[1]) >= 3 and all(part.stat().st_size <= PART_BYTES for part in packed[1])
    (tmp_path / "half").write_bytes(half_weights(1 << 19))
    parts = pack([(tmp_path / "half", "half")], tmp_path / "parts", PART_BYTES)
    assert sum(part.stat().st_size for part in parts) < 0.75 * (1 << 20)


@settings(max_examples=30)
@given(st.data())
def test_a_part_that_is_torn_anywhere_is_refused_and_leaves_no_file(
    packed: tuple[Path, list[Path]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = packed[1][-1].read_bytes()
    at = data.draw(st.one_of(st.integers(0, 63), st.integers(64, len(whole) - 1)))
    directory = tmp_path_factory.mktemp("torn")
    changed = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    (directory / "part").write_bytes(data.draw(st.sampled_from([whole[:at], changed, whole + b"x"])))
    for part in (*packed[1][:-1], directory / "part"):
        try:
            unpack(part, directory / "into")
        except PartError:
            assert part == directory / "part"
    assert not tree(directory / "into")


def test_a_part_that_names_a_place_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (part,) = pack([(tmp_path / "file", "../out")], tmp_path / "parts", PART_BYTES)
    with pytest.raises(PartError, match="must not be written"):
        unpack(part, tmp_path / "deep" / "into")
    assert not tree(tmp_path / "deep")


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
