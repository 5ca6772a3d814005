"""The package says which version it is, and what it is called by costs nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import ssd


def test_version_is_that_of_the_project() -> None:
    project = Path(__file__).parent.parent / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == ssd.__version__


def test_asking_for_the_version_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numba", "fastapi"}
    code = f"import sys, ssd; ssd.__version__; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
