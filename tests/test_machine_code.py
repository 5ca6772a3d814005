"""Compiled kernels are kept on disk while that is safe, and always run."""

from __future__ import annotations

import importlib.util
import logging
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching

from ssd.compiled import machine_code
from ssd.compiled.addresses import kernel

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A fresh dispatcher of the same small function at every call, as a process that starts has it."""
    source = tmp_path / "twice.py"
    source.write_text("def twice(number):\n    return 2 * number\n")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(machine_code, "_complained", set())

    def make() -> Any:
        spec = importlib.util.spec_from_file_location("twice", source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # where numba looks for what a function belongs to
        spec.loader.exec_module(module)
        return kernel(module.twice)

    return make


def num_compiled(dispatcher: Any) -> int:
    """How often the dispatcher compiled; loading what was kept does not count."""
    assert dispatcher(21) == 42
    return sum(dispatcher._cache_misses.values())


def test_what_one_process_compiled_another_only_loads(compiled: Callable[[], Any], tmp_path: Path) -> None:
    assert [num_compiled(compiled()), num_compiled(compiled())] == [1, 0]
    assert list((tmp_path / "kept").rglob("twice.*.nbc"))


def stamp_of(package: Path, name: str = "a.py") -> str:
    """As a process that starts finds it."""
    machine_code._imports_of.cache_clear()
    machine_code._text_of.cache_clear()
    return machine_code.source_stamp(package / name, package)


@pytest.mark.parametrize(
    "statement",
    [
        "from house.room.b import X",
        "from house.room import b",
        "from house.room import other as c, b as d",
        "from house.room import (\n    b,\n)",
        "import house.room.b",
        "import os, house.room.b as c",
        "def f():\n    from house.room.b import X",
        "from house.between import X",
    ],
)
def test_the_stamp_follows_what_the_files_hold_that_a_kernel_is_made_of(tmp_path: Path, statement: str) -> None:
    package = tmp_path / "house"
    (package / "room").mkdir(parents=True)
    (package / "between.py").write_text("from house.room.b import X")
    (package / "unrelated.py").write_text("from house.a import f")
    (package / "room" / "b.py").write_text("X = 1")
    (package / "a.py").write_text(statement)
    first = stamp_of(package)
    (package / "room" / "b.py").write_text("X = 1")
    (package / "unrelated.py").write_text("X = 1")
    assert stamp_of(package) == first
    stamps = [first]
    (package / "room" / "b.py").write_text("X = 2")  # as long as before
    stamps.append(stamp_of(package))
    (package / "a.py").write_text(statement + " ")
    stamps.append(stamp_of(package))
    assert len(set(stamps)) == len(stamps) == 3


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("left", [0, 10])
def test_a_torn_file_is_compiled_over(compiled: Callable[[], Any], tmp_path: Path, suffix: str, left: int) -> None:
    assert num_compiled(compiled()) == 1
    for path in (tmp_path / "kept").rglob(f"*{suffix}"):
        path.write_bytes(path.read_bytes()[:left])
    assert [num_compiled(compiled()), num_compiled(compiled())] == [1, 0]


def test_code_for_a_type_that_is_gone_is_compiled_over(compiled: Callable[[], Any], tmp_path: Path) -> None:
    assert num_compiled(compiled()) == 1
    for path in (tmp_path / "kept").rglob("*.nbi"):
        path.write_bytes(pickle.dumps(numba.__version__) + b"cssd\nTypeThatIsGone\n.")
    assert [num_compiled(compiled()), num_compiled(compiled())] == [1, 0]


class _OtherStamp(caching.FunctionCache):
    """As numba's, with another name for the stamp."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._stamp = self._cache_file.__dict__.pop("_source_stamp")


def _gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba.core.caching", None)


def _other_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "FunctionCache", _OtherStamp)


def _nowhere_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a container without a home whose file system is read-only: numba raises where it is asked to keep code.
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")


@pytest.mark.parametrize("change", [_gone, _other_stamp, _nowhere_to_write])
def test_a_numba_that_keeps_code_in_another_way_compiles_in_every_process(
    compiled: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    assert num_compiled(compiled()) == 1
    change(monkeypatch)
    with caplog.at_level(logging.WARNING):
        # Never what lies there: nothing says that it was made from these sources.
        assert [num_compiled(compiled()), num_compiled(compiled())] == [1, 1]
    assert len(caplog.records) == 1 and "NUMBA_CACHE_DIR" in caplog.text


def test_a_directory_that_becomes_unusable_costs_a_warning(
    compiled: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher = compiled()
    for path in (tmp_path / "kept").iterdir():
        path.rmdir()
        path.write_text("a file where the directory was")
    assert num_compiled(dispatcher) == 1
    assert len(caplog.records) <= 2 and "compiled kernels" in caplog.text
