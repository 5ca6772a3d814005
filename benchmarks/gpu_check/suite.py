"""The tests that do more where there is a GPU: the same claims on compiled kernels and recorded passes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from benchmarks.gpu_check.scene import Found, Keep, Scene

FILES: Final = (
    "test_triton_attention.py",
    "test_triton_sampling.py",
    "test_static_steps.py",
    "test_pass_noise.py",
    "test_triton_layers.py",
    "test_taps.py",
    "test_take_weights.py",
)
"""Each in a process of its own, all at once: what they wait for is a compiler."""

_TESTS = Path(__file__).parent.parent.parent / "tests"
_KEPT_CHARACTERS = 600


def suite(scene: Scene, keep: Keep) -> Found:
    """How many passed, failed and were skipped, by file, and what the failures said."""
    names = FILES if scene.device != "cpu" else FILES[3:4]
    found: Found = {"passed": True, "files": {}}
    with tempfile.TemporaryDirectory() as directory:
        running = {name: _start(name, scene, Path(directory)) for name in names}
        for name, process in running.items():
            status = process.wait()
            said = (Path(directory) / f"{name}.log").read_text(errors="replace")
            found["files"][name] = counts = _read(Path(directory) / f"{name}.xml")
            if status:
                found["passed"] = False
                counts.setdefault("failures", [said[-_KEPT_CHARACTERS:]])
            print(f"tests {name}: {said.strip().splitlines()[-1] if said.strip() else 'nothing said'}", flush=True)
            keep(found)
    return found


def _start(name: str, scene: Scene, directory: Path) -> subprocess.Popen[bytes]:
    # Warnings of versions that the project is not developed with shall fail nothing here.
    options = ("-q", "-p", "no:cacheprovider", "-W", "default", f"--junitxml={directory / name}.xml")
    # Where there is a device, kernels are compiled, whatever tells the tests so.
    compiled = {"TRITON_INTERPRET": "0"} if scene.device != "cpu" else {}
    with (directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, str(_TESTS / name)],
            cwd=_TESTS.parent,
            env=os.environ | compiled,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _read(path: Path) -> Found:
    """Counts of a file of results, and what failures said; of what does not exist, nothing."""
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {}
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    texts = [f"{case.get('name')}: {_text(case)}" for case in failed]
    return {
        "passed": len(cases) - len(failed) - (skipped := sum(case.find("skipped") is not None for case in cases)),
        "skipped": skipped,
        "failed": len(failed),
    } | ({"failures": texts} if texts else {})


def _text(case: ElementTree.Element) -> str:
    found = case.find("failure")
    found = case.find("error") if found is None else found
    return ("" if found is None else found.get("message") or found.text or "")[:_KEPT_CHARACTERS]
