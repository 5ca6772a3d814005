"""The real model's terms, its directory and how benchmarks find it; the model itself only where it has been made."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.models import MARKER, VARIABLE, add_model, default_directory, find_model, model_name
from benchmarks.real_model import TERMS, accepted, check
from ssd.bundled import MODEL_PATH

ROOT = Path(__file__).parent.parent


def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.real_model", command],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "ACCEPT_GEMMA_TERMS"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / MARKER).write_text(json.dumps({"name": "A model"}))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def test_terms_are_shown_on_one_screen_and_nothing_goes_on_before_they_are_accepted() -> None:
    shown = run("terms")
    assert shown.returncode == 1 and shown.stdout == TERMS
    assert "https://ai.google.dev/gemma/terms" in TERMS and "ACCEPT_GEMMA_TERMS=1" in TERMS
    assert TERMS.count("\n") <= 20 and max(map(len, TERMS.split("\n"))) <= 120
    assert run("terms", ACCEPT_GEMMA_TERMS="1").returncode == 0


@pytest.mark.parametrize("said", ["", "0", "yes", "true", "1 "])
def test_only_1_accepts_the_terms(said: str) -> None:
    assert not accepted({"ACCEPT_GEMMA_TERMS": said})


def test_the_model_is_found_by_its_variable_and_called_by_its_name(made: Path) -> None:
    assert default_directory() == find_model("real") == made
    assert model_name(made) == "A model"
    assert model_name(find_model("bundled")) == "bundled model"


@pytest.mark.parametrize("place", [["real"], ["--model", "real"], ["--json", "--model", "real"]])
def test_benchmarks_take_the_model_in_first_place_or_by_name(place: list[str], made: Path) -> None:
    parser = argparse.ArgumentParser()
    add_model(parser)
    parser.add_argument("--json", action="store_true")
    assert parser.parse_args(place).model == made
    assert parser.parse_args([]).model == MODEL_PATH


@pytest.mark.slow
@pytest.mark.skipif(not (default_directory() / MARKER).is_file(), reason="make real-model makes the model")
def test_the_real_model_says_what_everybody_knows_and_the_engine_says_the_same() -> None:
    assert "goes on with" in check(default_directory())
