"""Builds in blocks: the same on any number of cores, and after any end."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ssd
from cache_builder.__main__ import main
from cache_builder.building.build import (
    Block,
    BlockResult,
    BuildOptions,
    build,
    build_block,
    load_codec,
    plan_blocks,
)
from cache_builder.building.resumable import resumable_directory
from cache_builder.commands import options
from cache_builder.inputs.record import InputError
from cache_builder.inputs.sources import find_sources
from cache_builder.workers import map_items
from ssd.errors import ConfigError, SSDError
from ssd.retrieval.files import read_manifest
from tests.cache_files import read_cache
from tests.ray_build import BLOCK_BYTES
from tests.waiting import PATIENCE_S, START_S

ROOT = Path(ssd.__file__).parent.parent
SEGMENT_TOKENS = 4000


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Some 60,000 tokens: token ids in lines, a few texts, and prompts that repeat."""
    random = np.random.default_rng(1)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        with (folder / name).open("w") as file:
            for _ in range(250):
                ids = random.integers(5, 400, int(random.integers(1, 200))).tolist()
                file.write(json.dumps({"token_ids": ids}) + "\n")
    prompt = "a prompt of many requests, which is rather long. " * 12
    with (folder / "c.jsonl").open("w") as file:
        for number in range(80):
            file.write(json.dumps({"prompt": prompt, "completion": f"answer {number % 60}"}) + "\n")
    (folder / "d.txt").write_text("a document\n" * 300)
    return folder


def options_for(model: Path, **changes: Any) -> BuildOptions:
    small = BuildOptions(
        namespace="default", tokenizer=str(model), segment_tokens=SEGMENT_TOKENS, block_bytes=20_000, jobs=1
    )
    return replace(small, **changes)


def ids_of(directory: Path) -> tuple[str, ...]:
    manifest = read_manifest(directory)
    assert manifest is not None
    return manifest.segment_ids


def test_blocks_are_the_same_and_hold_everything_once(corpus: Path) -> None:
    sources = find_sources([str(corpus)])
    assert plan_blocks(sources, "how", 20_000) == plan_blocks(sources, "how", 20_000)
    for size in (3_000, 20_000, 1 << 30):
        blocks = plan_blocks(sources, "how", size)
        assert [block.number for block in blocks] == list(range(len(blocks)))
        assert len({block.key for block in blocks}) == len({block.place for block in blocks}) == len(blocks)
        parts = [part for block in blocks for part in block.parts]
        for source in sources:
            bounds = [(part.start, part.stop) for part in parts if part.name == source.name]
            assert bounds[0][0] == 0 and bounds[-1][1] is None
            assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
    (corpus / "d.txt").write_text("changed")
    changed = plan_blocks(find_sources([str(corpus)]), "how", 20_000)
    assert changed[0].key == plan_blocks(sources, "how", 20_000)[0].key, "a block of files that did not change stays"
    assert changed[-1].key != plan_blocks(sources, "how", 20_000)[-1].key
    assert plan_blocks(sources, "other", 20_000)[0].key != plan_blocks(sources, "how", 20_000)[0].key


def test_one_process_and_several_make_the_same_cache(corpus: Path, model: Path, tmp_path: Path) -> None:
    result = build([str(corpus)], tmp_path / "one", options_for(model))
    again = build([str(corpus)], tmp_path / "two", options_for(model, jobs=2))
    assert result == again
    assert ids_of(tmp_path / "one") == ids_of(tmp_path / "two")
    assert len(ids_of(tmp_path / "one")) == result.num_segments
    whole = build([str(corpus)], tmp_path / "whole", options_for(model, block_bytes=1 << 30, segment_tokens=1 << 20))
    assert whole.num_segments == 1 and whole.num_records == result.num_records
    fingerprint = load_codec(str(model), None).fingerprint
    found = read_cache(tmp_path / "one", fingerprint)
    assert len(found) == result.num_sequences and sum(map(len, found)) == result.num_tokens
    ids = [sequence for sequence in found if len(sequence) < 201][:499]
    assert ids[:100] == read_cache(tmp_path / "whole", fingerprint)[:100], "in the order of the inputs"


def test_segments_hold_no_more_than_they_may_and_few_are_small(corpus: Path, model: Path, tmp_path: Path) -> None:
    build([str(corpus)], tmp_path / "out", options_for(model, block_bytes=2_000))
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    sizes = [segment["num_tokens"] for segment in manifest.segments]
    assert max(sizes) <= SEGMENT_TOKENS
    pairs = itertools.pairwise(sizes)
    assert all(one + other > SEGMENT_TOKENS or min(one, other) * 4 >= SEGMENT_TOKENS for one, other in pairs)


def test_a_block_of_a_batch_is_another_where_its_requests_have_changed(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    answer = {"choices": [{"message": {"role": "assistant", "content": "hi"}}]}
    lines = {
        "in": {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body},
        "out": {"custom_id": "1", "response": {"status_code": 200, "body": answer}},
    }
    for name, line in lines.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line))
    (before,), (same,) = (plan_blocks(find_sources([str(tmp_path)]), "how") for _ in range(2))
    os.utime(tmp_path / "in.jsonl", (1, 1))
    (after,) = plan_blocks(find_sources([str(tmp_path)]), "how")
    assert before.key == same.key != after.key
    assert before.place == after.place


def test_a_long_build_tells_its_rate_and_the_time_left(
    corpus: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["build", str(corpus), "--tokenizer", str(model), "--out", str(tmp_path / "out"), "--force"]
    assert main(command) == 0
    assert capsys.readouterr().err == "", "it was short"
    monkeypatch.setattr(options, "_SECONDS_BETWEEN_LINES", 1e-6)
    assert main(command) == 0
    assert re.search(r"ssd-cache: [0-9.]+[kM] of [0-9.]+[kM], [0-9.]+[kM]?B/s, [0-9:]+ left\n", capsys.readouterr().err)
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


# -- ends -------------------------------------------------------------------------------------------------------------


def _fail_at(number: int, block: Block, options: BuildOptions, progress: Callable[[int, int], None]) -> BlockResult:
    if block.number == number:
        raise KeyboardInterrupt
    return build_block(block, options, progress)


def test_a_build_that_ended_goes_on_without_doing_a_block_again(corpus: Path, model: Path, tmp_path: Path) -> None:
    options = options_for(model)
    build([str(corpus)], tmp_path / "undisturbed", options)
    executor: Any = lambda blocks, block_options, progress: map_items(  # noqa: E731
        functools.partial(_fail_at, 3), blocks, block_options, progress, jobs=1
    )
    out = tmp_path / "out"
    for damaged in (False, True):
        with pytest.raises(KeyboardInterrupt):
            build([str(corpus)], out, replace(options, force=damaged), executor=executor)
        left = {path.name: path.stat().st_ino for path in (resumable_directory(out) / "new").glob("*.seg")}
        assert len(left) >= 3 and out.exists() == damaged
        notes = [*(resumable_directory(out) / "journal").iterdir()]
        if damaged:  # a finished segment, or what was noted of a block, which is then made again
            file = next((resumable_directory(out) / "new").glob("*.seg"))
            file.write_bytes(file.read_bytes()[:-9])
            notes[0].write_bytes(b"[" + notes[0].read_bytes()[:-9])
        result = build([str(corpus)], out, replace(options, force=damaged))
        assert len(notes) == 3 and 0 < result.num_reused_tokens < result.num_tokens
        assert ids_of(out) == ids_of(tmp_path / "undisturbed")
        kept = {path.name: path.stat().st_ino for path in out.glob("*.seg")}
        assert any(kept.get(name) == inode for name, inode in left.items()), "the very files"
        assert not resumable_directory(out).exists()
    assert build([str(corpus)], out, replace(options, force=True)).num_reused_tokens == 0


def test_a_sequence_longer_than_a_segment_is_begun_again(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"token_ids": [7] * size}) + "\n" for size in (9, 9000, 50)))
    result = build([str(tmp_path / "in.jsonl")], tmp_path / "out", options_for(model))
    assert result.num_records == 3
    found = read_cache(tmp_path / "out", load_codec(str(model), None).fingerprint)
    assert len(found[0]) == 9 and len(found[-1]) == 50 and sum(map(len, found)) >= 9059
    assert max(map(len, found)) < SEGMENT_TOKENS


def test_a_directory_that_cannot_be_written_is_named(corpus: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"/proc/out cannot be written \(/proc: .*\): give another directory"):
        build([str(corpus / "d.txt")], Path("/proc/out"), options_for(model))


def test_what_is_finished_is_kept_where_a_later_line_is_wrong(corpus: Path, model: Path, tmp_path: Path) -> None:
    (corpus / "z.jsonl").write_text("{broken")
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"z\.jsonl:1: the line is not JSON"):
        build([str(corpus)], out, options_for(model))
    (corpus / "z.jsonl").write_text('{"text": "mended"}')
    assert build([str(corpus)], out, options_for(model)).num_reused_tokens > 10_000


def _fail(block: Block, options: BuildOptions, progress: Callable[[int, int], None]) -> BlockResult:
    if block.number == 0:
        time.sleep(1)
    raise InputError(f"block {block.number}")


def test_of_several_errors_the_first_in_order_is_told(corpus: Path, model: Path, tmp_path: Path) -> None:
    """Whichever worker is faster: the same inputs give the same error."""
    blocks = plan_blocks(find_sources([str(corpus)]), "how", 20_000)
    options = options_for(model, directory=tmp_path, fingerprint="ab" * 16)
    assert len(blocks) > 2
    with pytest.raises(InputError, match="block 0"):
        list(map_items(_fail, blocks, options, lambda num_bytes, num_tokens: None, jobs=2))


def _end_hard(block: Block, options: BuildOptions, progress: Callable[[int, int], None]) -> BlockResult:
    if block.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return build_block(block, options, progress)


def test_a_worker_that_is_killed_ends_the_build_with_one_line(corpus: Path, model: Path, tmp_path: Path) -> None:
    executor: Any = lambda blocks, options, progress: map_items(_end_hard, blocks, options, progress, jobs=2)  # noqa: E731
    with pytest.raises(SSDError, match="a worker process was killed"):
        build([str(corpus)], tmp_path / "out", options_for(model, jobs=2), executor=executor)


SCRIPT = f"""
import sys
from pathlib import Path
from cache_builder.building.build import BuildOptions, build
from ssd.text.load_tokenizer import hide_torch
if __name__ == "__main__":
    hide_torch()
    corpus, out, model, jobs = sys.argv[1:]
    build([corpus], Path(out), BuildOptions(
        namespace="default", tokenizer=str(model), segment_tokens={SEGMENT_TOKENS}, block_bytes=5_000, jobs=int(jobs)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_build_killed_at_any_moment_ends_as_if_it_was_not(
    jobs: int, corpus: Path, model: Path, tmp_path: Path
) -> None:
    build([str(corpus)], tmp_path / "undisturbed", options_for(model, block_bytes=5_000))
    random = np.random.default_rng(jobs)
    out = tmp_path / "out"
    program = tmp_path / "program.py"
    program.write_text(SCRIPT)
    command = [sys.executable, str(program), str(corpus), str(out), str(model), str(jobs)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    inodes: dict[str, int] = {}
    for _ in range(4):
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        segments = resumable_directory(out) / "new"
        begun = len([*segments.glob("*.seg")]) if segments.exists() else 0
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            if segments.exists() and len([*segments.glob("*.seg")]) > begun:
                break
            time.sleep(0.01)
        time.sleep(float(random.random()) * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if out.exists():
            break
        assert not out.exists()
        for name, inode in inodes.items():
            assert not (segments / name).exists() or (segments / name).stat().st_ino == inode
        # What was written and not noted yet is done again.
        notes = [path for path in (resumable_directory(out) / "journal").iterdir() if path.suffix != ".tmp"]
        noted = b"".join(path.read_bytes() for path in notes)
        inodes |= {path.name: path.stat().st_ino for path in segments.glob("*.seg") if path.stem.encode() in noted}
    assert subprocess.run(command, env=environment).returncode == 0 or out.exists()
    assert ids_of(out) == ids_of(tmp_path / "undisturbed")
    assert len(inodes) > 2


# Builds on a Ray cluster: the same directory as one made here, whatever is lost on the way


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    drawn = random.Random(0)
    path = tmp_path_factory.mktemp("logs") / "logs.jsonl"
    words = ["hello", "there", "how", "are", "you", "def", "return", "import", "path"]
    path.write_text("".join(json.dumps({"text": " ".join(drawn.choices(words, k=40))}) + "\n" for _ in range(1_500)))
    return path


def segments_on_ray(logs: Path, model: Path, out: Path, lost: str) -> tuple[str, ...]:
    command = [sys.executable, "-m", "tests.ray_build", str(logs), str(model), str(out), lost]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr[-2_000:]
    return tuple(json.loads(done.stdout.splitlines()[-1]))


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'ssd-serving[ray]'")


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("lost", ["none", "worker", "node"])
def test_a_cluster_builds_what_is_built_here_whoever_is_lost(
    lost: str, logs: Path, model: Path, tmp_path: Path
) -> None:
    options = BuildOptions(namespace="default", tokenizer=str(model), block_bytes=BLOCK_BYTES)
    build([str(logs)], tmp_path / "here", options)
    assert segments_on_ray(logs, model, tmp_path / "there", lost) == ids_of(tmp_path / "here")


@needs_ray
def test_what_a_cluster_cannot_read_is_said(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["build", "-", "--tokenizer", str(model), "--out", str(tmp_path / "out"), "--executor", "ray"]
    assert main(command) == 2
    assert "standard input" in capsys.readouterr().err
    assert main([*command[:-2], "--ray-address", "somewhere:1"]) == 2
    assert "--ray-address requires --executor ray" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
