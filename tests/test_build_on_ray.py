"""Builds on a Ray cluster: the same directory as one made here, whatever is lost on the way."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import ssd
from cache_builder.__main__ import main
from cache_builder.building.block import BuildOptions
from cache_builder.building.build import build
from ssd.retrieval.files import read_manifest
from tests.ray_build import BLOCK_BYTES
from tests.tokenizers_for_tests import write_model_directory
from tests.waiting import START_S

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ssd-serving[ray]'")

ROOT = Path(ssd.__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    drawn = random.Random(0)
    path = tmp_path_factory.mktemp("logs") / "logs.jsonl"
    words = ["hello", "there", "how", "are", "you", "def", "return", "import", "path"]
    path.write_text("".join(json.dumps({"text": " ".join(drawn.choices(words, k=40))}) + "\n" for _ in range(1_500)))
    return path


def segments_of(directory: Path) -> list[str]:
    manifest = read_manifest(directory)
    assert manifest is not None
    return list(manifest.segment_ids)


def segments_on_ray(logs: Path, model: Path, out: Path, lost: str) -> list[str]:
    command = [sys.executable, "-m", "tests.ray_build", str(logs), str(model), str(out), lost]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr[-2_000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["none", "worker", "node"])
def test_a_cluster_builds_what_is_built_here_whoever_is_lost(
    lost: str, logs: Path, model: Path, tmp_path: Path
) -> None:
    options = BuildOptions(namespace="default", tokenizer=str(model), block_bytes=BLOCK_BYTES)
    build([str(logs)], tmp_path / "here", options)
    assert segments_on_ray(logs, model, tmp_path / "there", lost) == segments_of(tmp_path / "here")


def test_what_a_cluster_cannot_read_is_said(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["build", "-", "--tokenizer", str(model), "--out", str(tmp_path / "out"), "--executor", "ray"]
    assert main(command) == 2
    assert "standard input" in capsys.readouterr().err
    assert main([*command[:-2], "--ray-address", "somewhere:1"]) == 2
    assert "--ray-address is for --executor ray" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
