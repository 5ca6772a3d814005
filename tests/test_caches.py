"""What is done with cache directories: merged, checked, compared and exported, as a user would."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_builder import opened_cache
from cache_builder.__main__ import main
from cache_builder.building.resumable import resumable_directory, working_directory
from cache_builder.commands.inspect import inspect, is_sorted
from cache_builder.commands.merge import merge
from ssd.config import CacheConfig
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.errors import CacheLocked, ConfigError, SSDError, StoreUnavailable
from ssd.retrieval import directory, prebuilt
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.directory import SegmentDirectory
from ssd.retrieval.files import MANIFEST_NAME, DirectoryLock, Manifest, new_segment_id, read_manifest, write_manifest
from ssd.retrieval.prebuilt import load_prebuilt_directory
from ssd.retrieval.ring import iter_sequences
from ssd.retrieval.segment import SEPARATOR, Segment, write_segment
from ssd.retrieval.suffix_array import build_segment, build_sparse_index
from ssd.text.codec import TextCodec
from tests.cache_files import FINGERPRINT, read_cache
from tests.cache_files import write_cache as write
from tests.reference.retrieval import naive_count, naive_order

OTHER = "f" * 32
TEXTS = [[5, 6, 7, 8] * 6, [9, 9, 9], list(range(40)), [5, 6, 7, 8] * 6]

write_cache = partial(write, segment_tokens=64)
texts = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=6)


def text_of(path: Path) -> list[int]:
    found: list[int] = []
    for segment in load_prebuilt_directory(path, fingerprint=FINGERPRINT):
        found += segment.tokens.tolist()
    return found


# merge


@given(st.lists(texts, min_size=1, max_size=3), st.data())
@settings(max_examples=15)
def test_a_merged_cache_answers_as_the_caches_together(
    tmp_path_factory: pytest.TempPathFactory, caches: list[list[list[int]]], data: st.DataObject
) -> None:
    base = tmp_path_factory.mktemp("merge")
    paths = [write_cache(base / str(number), sequences) for number, sequences in enumerate(caches)]
    merge(paths, base / "out", segment_tokens=data.draw(st.sampled_from([14, 32, 1 << 20])))
    together = [sequence for sequences in caches for sequence in sequences]
    assert read_cache(base / "out") == together
    pattern = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    assert naive_count(text_of(base / "out"), pattern) == sum(naive_count(text_of(path), pattern) for path in paths)
    segments = load_prebuilt_directory(base / "out", fingerprint=FINGERPRINT)
    assert all(segment.order.tolist() == naive_order(segment.tokens.tolist()) for segment in segments)


def test_a_servers_own_cache_and_a_built_one_become_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built = write_cache(tmp_path / "built", TEXTS)
    with CacheManager(CacheConfig(directory=tmp_path / "served"), FINGERPRINT, inline=True) as caches:
        caches.get("support").append([1, 2, 3] * 5)
    arguments = ["merge", str(built), str(tmp_path / "served/support"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--namespace", "all"]) == 0
    assert "namespace all" in capsys.readouterr().out
    assert read_cache(tmp_path / "out") == [*TEXTS, [1, 2, 3] * 5]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.namespace == "all"
    assert all(segment.start is None for segment in load_prebuilt_directory(tmp_path / "out", fingerprint=FINGERPRINT))
    assert inspect(tmp_path / "out", deep=True)["faults"] == []


def test_equal_sequences_are_stored_once_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_cache(tmp_path / name, TEXTS) for name in ("a", "b")]
    merge(paths, tmp_path / "out", unique=True)
    assert "  5 repeated sequences" in capsys.readouterr().out
    assert read_cache(tmp_path / "out") == TEXTS[:3]


def test_a_cache_is_replaced_by_force_unless_a_server_writes_it_and_what_a_killed_merge_left_goes(
    tmp_path: Path,
) -> None:
    path = write_cache(tmp_path / "a", TEXTS)
    left = resumable_directory(path) / "new"
    left.mkdir(parents=True)
    (left / "torn.seg").write_bytes(b"x")
    with closing(DirectoryLock(path)), pytest.raises(CacheLocked):
        merge([path], path, force=True)
    assert read_cache(path) == TEXTS
    merge([path, path], path, force=True)
    assert read_cache(path) == TEXTS + TEXTS
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("renames", [1, 2])
def test_a_cache_is_there_wherever_the_replacing_of_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    path, rename = write_cache(tmp_path / "a", TEXTS), Path.rename
    done: list[Path] = []

    def ended_after(self: Path, target: Path) -> None:
        done.append(rename(self, target))
        if len(done) == renames:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", ended_after)
    with pytest.raises(KeyboardInterrupt):
        merge([path, path], path, force=True)
    assert read_cache(path) == (TEXTS if renames == 1 else TEXTS + TEXTS)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("again", ["merge", "new"])
def test_what_was_taken_away_when_a_command_was_killed_is_there_for_the_next(tmp_path: Path, again: str) -> None:
    path, working = write_cache(tmp_path / "a", TEXTS), resumable_directory(tmp_path / "a")
    write_cache(working / "new", TEXTS + TEXTS)
    path.rename(working / "old")
    if again == "merge":
        merge([path, path], path, force=True)
        assert read_cache(path) == TEXTS + TEXTS
        return
    write_cache(path, TEXTS[:1])  # a server was started meanwhile
    with pytest.raises(ConfigError, match="The former content is in"):
        merge([path], path, force=True)
    assert read_cache(path) == TEXTS[:1] and read_cache(working / "old") == TEXTS


def test_force_removes_nothing_but_a_cache(tmp_path: Path) -> None:
    path = write_cache(tmp_path / "a", TEXTS)
    write_cache(path / "default", TEXTS[:1])  # of a server with this --cache-dir
    with pytest.raises(ConfigError, match=r"contains other files \(default\)"):
        merge([path], path, force=True)
    assert read_cache(path / "default") == TEXTS[:1]


def test_a_cache_is_replaced_where_a_link_leads_and_in_the_directory_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = write_cache(tmp_path / "big" / "a", TEXTS), tmp_path / "link"
    link.symlink_to(path)
    merge([link, link], link, force=True)
    assert link.is_symlink() and read_cache(path) == TEXTS + TEXTS
    monkeypatch.chdir(path)
    merge([path], Path(), force=True)
    assert read_cache(path) == TEXTS + TEXTS
    assert [each.name for each in path.parent.iterdir()] == ["a"]


def test_a_cache_that_cannot_be_put_back_is_kept_until_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = write_cache(tmp_path / "a", TEXTS), write_cache(tmp_path / "b", TEXTS[:1])
    rename = Path.rename

    def only_away(self: Path, target: Path) -> Path:
        if target == path:
            raise OSError("no")
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no"):
        patch.setattr(Path, "rename", only_away)
        merge([other], path, force=True)
    assert not path.exists()
    with working_directory(path, fresh=True):
        assert read_cache(path) == TEXTS


# directories that a server goes on writing


@pytest.mark.parametrize("times", [3, 1000])
def test_a_directory_is_read_though_a_server_merges_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    path, said = tmp_path / "default", list[list[int]]()
    overtaken = times
    with closing(SegmentDirectory(path, fingerprint=FINGERPRINT, namespace="default")) as served:

        def say_and_merge() -> None:
            said.append([len(said)] * 9)
            tokens = np.array([token for text in said for token in [*text, SEPARATOR]], np.int32)
            merged = build_segment(tokens, start=0, segment_id=new_segment_id(0))
            served.commit([served.write(merged)], next_position=len(tokens))

        def read_before_a_merge(*where: Any, **whose: Any) -> Manifest | None:
            nonlocal overtaken
            manifest = read_manifest(*where, **whose)
            if overtaken < times:
                overtaken += 1
                say_and_merge()
            return manifest

        say_and_merge()
        for module in (opened_cache, directory, prebuilt):
            monkeypatch.setattr(module, "read_manifest", read_before_a_merge)
        readers = (
            partial(load_prebuilt_directory, fingerprint=FINGERPRINT),
            lambda path: opened_cache.open_cache(path, None).segments,
        )
        for read in readers:
            overtaken = 0
            if times == 3:
                assert [found.tolist() for found in iter_sequences(read(path))] == said
            else:
                with pytest.raises(StoreUnavailable, match="is incomplete"):
                    read(path)
        overtaken = 0
        assert inspect(path, deep=True)["is_intact"] == (times == 3)


# inspect --deep


def rewritten(path: Path, segment: Segment) -> None:
    """Put a segment in the place of one in a directory, with right checksums."""
    write_segment(path / f"{segment.segment_id}.seg", segment, fingerprint=FINGERPRINT, namespace="default")


@given(texts, st.data())
@settings(max_examples=40)
def test_any_order_but_that_of_the_text_is_noticed(sequences: list[list[int]], data: st.DataObject) -> None:
    tokens = np.array([token for sequence in sequences for token in [*sequence, SEPARATOR]], np.int32)
    segment = build_segment(tokens, start=None, segment_id="s")
    assert is_sorted(segment)
    order = np.array(data.draw(st.permutations(segment.order.tolist())), np.int32)
    if data.draw(st.booleans()):
        order[data.draw(st.integers(0, len(order) - 1))] = data.draw(st.integers(1, len(order)))
    changed = Segment(segment.text, order, segment.sparse_index, segment.width, None, "s")
    assert is_sorted(changed) == (order.tolist() == naive_order(tokens.tolist()))


def test_a_sound_directory_is_called_sound(
    tmp_path: Path, model: Path, codec: TextCodec, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_cache(tmp_path / "a", TEXTS, fingerprint=codec.fingerprint)
    (path / "learned.bin").write_bytes(AcceptanceModel().to_bytes())
    assert main(["inspect", "--deep", str(path), "--tokenizer", str(model)]) == 0
    assert "FAULT" not in capsys.readouterr().out
    assert main(["inspect", "--deep", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["is_intact"], found["num_sequences"], found["learned_from"]) == (True, len(TEXTS), 0)


def test_what_checksums_cannot_see_is_a_fault_that_says_what_to_do(tmp_path: Path, model: Path) -> None:
    path = write_cache(tmp_path / "a", TEXTS)
    segment = load_prebuilt_directory(path, fingerprint=FINGERPRINT)[0]
    order = segment.order.copy()
    order[[3, 7]] = order[[7, 3]]
    unsorted = Segment(
        segment.text,
        order,
        build_sparse_index(segment.text, order, segment.width),
        segment.width,
        None,
        segment.segment_id,
    )
    rewritten(path, unsorted)
    (fault,) = inspect(path, deep=True)["faults"]
    assert "does not match its text" in fault
    assert "build the directory again" in fault
    fence = segment.sparse_index + np.uint64(1)
    rewritten(path, Segment(segment.text, segment.order.copy(), fence, segment.width, None, segment.segment_id))
    assert "does not match its text" in inspect(path, deep=True)["faults"][0]
    rewritten(path, build_segment(segment.tokens[:25], start=None, segment_id=segment.segment_id))
    assert "tokens from position" in inspect(path, deep=True)["faults"][0]
    foreign = inspect(path, deep=True, codec=TextCodec.load(str(model)))["faults"]
    assert any("made with tokenizer" in fault for fault in foreign)


def test_ids_that_the_tokenizer_has_not_are_a_fault(tmp_path: Path, model: Path, codec: TextCodec) -> None:
    path = write_cache(tmp_path / "a", [[1, codec.vocab_size]], fingerprint=codec.fingerprint)
    assert "but the tokenizer has" in inspect(path, deep=True, codec=codec)["faults"][0]
    assert main(["inspect", "--deep", str(path), "--tokenizer", str(model)]) == 1


def test_leftovers_are_named_and_what_was_learned_is_looked_at(tmp_path: Path) -> None:
    path = write_cache(tmp_path / "a", TEXTS)
    file = next(path.glob("*.seg"))
    shutil.copy(file, path / "static-00.seg")
    for name in ("manifest.json.12.tmp", "old.seg.left-out", "notes.txt"):
        (path / name).write_bytes(b"")
    (path / "learned.bin").write_bytes(AcceptanceModel().to_bytes()[:-1] + b"x")
    report = inspect(path, deep=True)
    assert len(report["notes"]) == 4
    assert "a new acceptance model is trained" in report["faults"][0]
    assert main(["inspect", "--deep", str(path)]) == 1
    (path / "learned.bin").unlink()
    file.unlink()
    assert any("is missing" in fault for fault in inspect(path, deep=True)["faults"])


def test_names_that_a_terminal_would_obey_are_shown_as_escapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_cache(tmp_path / "a", TEXTS)
    for name in (b"\x1b[2J", b"\xff\xfe"):
        (path / os.fsdecode(name)).touch()
    manifest = read_manifest(path)
    assert manifest is not None
    write_manifest(path, replace(manifest, namespace="\x1b[31m\ud800"))
    for more in ([], ["--deep"]):
        assert main(["inspect", str(path), *more]) in (0, 1)
        said = capsys.readouterr().out
        assert "\x1b" not in said
        said.encode()
    faults = inspect(path, deep=True)["faults"]
    assert any("contains text of namespace 'default'" in fault for fault in faults)


@given(st.data())
@settings(max_examples=30)
def test_a_byte_that_flips_anywhere_is_found_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = write_cache(tmp_path_factory.mktemp("flip") / "a", TEXTS)
    (path / "learned.bin").write_bytes(AcceptanceModel().to_bytes())
    files = [path / MANIFEST_NAME, path / "learned.bin", *sorted(path.glob("*.seg"))]
    file = files[data.draw(st.integers(0, len(files) - 1))]
    content = bytearray(file.read_bytes())
    for at, flipped in data.draw(st.lists(st.tuples(st.integers(0, 1 << 32), st.integers(1, 255)), max_size=3)):
        content[at % len(content)] ^= flipped
    file.write_bytes(content)
    ids = path.parent / "ids.json"
    ids.write_text("[9, 5, 6, 7]")
    for command in (["inspect", "--deep"], ["inspect", "--sequences"], ["explain", "--prompt", str(ids)]):
        assert main([*command, str(path)]) in (0, 1, 2)
    try:
        sound = not inspect(path, deep=True)["faults"]
    except SSDError:
        sound = False
    if sound:
        assert read_cache(path) == TEXTS


# inspect --sequences


def test_every_sequence_is_printed_in_order_or_as_text_where_a_tokenizer_is_given(
    tmp_path: Path, model: Path, codec: TextCodec, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_cache(tmp_path / "a", TEXTS)
    assert main(["inspect", str(path), "--sequences"]) == 0
    assert [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()] == TEXTS
    text = write_cache(tmp_path / "b", [codec.encode_completion("naïve café")], fingerprint=codec.fingerprint)
    capsys.readouterr()
    assert main(["inspect", str(text), "--sequences", "--tokenizer", str(model)]) == 0
    assert json.loads(capsys.readouterr().out) == {"text": "naïve café"}


@given(st.lists(st.lists(st.integers(5, 300), min_size=1, max_size=40), min_size=1, max_size=8))
@settings(max_examples=15)
def test_what_is_printed_is_built_again_to_the_same_sequences(
    tmp_path_factory: pytest.TempPathFactory, model: Path, codec: TextCodec, sequences: list[list[int]]
) -> None:
    base = tmp_path_factory.mktemp("trip")
    path, out = write_cache(base / "a", sequences, fingerprint=codec.fingerprint), base / "out.jsonl.gz"
    with pytest.MonkeyPatch.context() as patch, gzip.open(out, "wb") as file:
        patch.setattr("sys.stdout", io.TextIOWrapper(file))
        assert main(["inspect", str(path), "--sequences"]) == 0
    assert main(["build", str(out), "--tokenizer", str(model), "--out", str(base / "b")]) == 0
    assert read_cache(base / "b", codec.fingerprint) == sequences
