"""Compiled kernels are kept on disk while that is safe, and always run."""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numba
import pytest
from llvmlite import binding
from numba.core import caching

from ssd.jit import code_cache
from ssd.jit.addresses import inlined, kernel
from ssd.jit.code_cache import kernel_counts

ROOT = Path(__file__).resolve().parents[1]
TWICE = "def twice(number):\n    return 2 * number\n"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A fresh dispatcher of the same small function at every call, as a process that starts has it."""
    source = tmp_path / "twice.py"
    source.write_text(TWICE)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(code_cache, "_warned", set())

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
    code_cache._imports_of.cache_clear()
    code_cache._text_of.cache_clear()
    return code_cache.source_stamp(package / name, package)


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


@pytest.mark.parametrize(
    ("suffix", "left"),
    [
        *product((".nbi", ".nbc"), (0, 10)),
        (".nbi", pickle.dumps(numba.__version__) + b"cssd\nTypeThatIsGone\n."),
    ],
)
def test_a_torn_file_or_one_for_a_type_that_is_gone_is_compiled_over(
    compiled: Callable[[], Any], tmp_path: Path, suffix: str, left: bytes | int
) -> None:
    assert num_compiled(compiled()) == 1
    for path in (tmp_path / "kept").rglob(f"*{suffix}"):
        path.write_bytes(path.read_bytes()[:left] if isinstance(left, int) else left)
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
    assert len(caplog.records) <= 2 and "machine code of kernels cannot be read" in caplog.text


# Prebuilt machine code


PREBUILD = """
import sys
from pathlib import Path
from ssd.jit import code_cache
code_cache.PREBUILT = Path(sys.argv[1])
assert code_cache.prebuild()
from ssd.jit.addresses import kernel
import twice
assert kernel(twice.twice)(21) == 42
"""
IS_X86 = binding.get_process_triple().startswith("x86_64")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the prebuilt code of `twice`, compiled from a file at another path than the one under test."""
    source, directory = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("package") / "prebuilt"
    (source / "twice.py").write_text(TWICE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(source)))}
    subprocess.run([sys.executable, "-c", PREBUILD, str(directory)], env=environment, check=True)
    return directory


@pytest.fixture
def prebuilt(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that directory, in which this process looks."""
    copy = shutil.copytree(built, tmp_path / "prebuilt")
    monkeypatch.setattr(code_cache, "PREBUILT", copy)
    return copy


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def kept_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "kept").rglob("twice.*.nb?"))


def counted(work: Callable[[], Any]) -> tuple[float, ...]:
    """What ``work`` adds to the kernels compiled, cached and prebuilt, and to the seconds spent compiling."""
    before = kernel_counts()
    work()
    return tuple(new - old for new, old in zip(kernel_counts(), before, strict=True))


def test_prebuilt_code_is_loaded_and_nothing_is_compiled_or_kept(
    compiled: Callable[[], Any], tmp_path: Path, prebuilt: Path
) -> None:
    assert counted(lambda: num_compiled(compiled())) == (0, 0, 1, 0.0)
    assert num_compiled(compiled()) == 0 and not kept_files(tmp_path)


def test_prebuilt_code_is_loaded_where_nothing_can_be_written(
    compiled: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, prebuilt: Path
) -> None:
    _nowhere_to_write(monkeypatch)
    assert num_compiled(compiled()) == 0


def test_the_counts_tell_what_was_compiled_from_what_was_kept(compiled: Callable[[], Any]) -> None:
    first, second = (counted(lambda: num_compiled(compiled())) for _ in range(2))
    assert first[:3] == (1, 0, 0) and first[3] > 0
    assert second == (0, 1, 0, 0.0)


@pytest.mark.skipif(not IS_X86, reason="elsewhere every processor runs the baseline")
@pytest.mark.parametrize("feature", ["avx2", "fma", "bmi2"])
def test_a_processor_without_a_feature_of_the_baseline_refuses_prebuilt_code(
    compiled: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, prebuilt: Path, feature: str
) -> None:
    features = dict(binding.get_host_cpu_features()) | {feature: False}
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: features)
    assert counted(lambda: num_compiled(compiled()))[:3] == (1, 0, 0)
    assert not code_cache.prebuild()


def test_a_processor_that_numba_was_told_refuses_prebuilt_code(
    compiled: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, prebuilt: Path
) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", "another")
    assert num_compiled(compiled()) == 1


def _truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _foreign(content: bytes) -> bytes:
    return content.replace(numba.__version__.encode(), b"9.99.9", 1)


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        *product(
            (".nbi", ".nbc"), (_truncated, lambda _: b"", lambda content: random.Random(0).randbytes(len(content)))
        ),
        (".nbi", _foreign),
        (".nbi", lambda _: pickle.dumps(numba.__version__) + b"cssd\nTypeThatIsGone\n."),
    ],
)
def test_torn_or_foreign_prebuilt_files_are_left_alone_and_the_kernel_is_compiled(
    compiled: Callable[[], Any],
    tmp_path: Path,
    prebuilt: Path,
    caplog: pytest.LogCaptureFixture,
    suffix: str,
    change: Callable[[bytes], bytes],
) -> None:
    for path in prebuilt.glob(f"*{suffix}"):
        before = path.read_bytes()
        path.write_bytes(change(before))
        assert path.read_bytes() != before
    left = contents(prebuilt)
    assert [num_compiled(compiled()), num_compiled(compiled())] == [1, 0]
    for path in kept_files(tmp_path):  # flushes the user's cache
        path.write_bytes(b"torn")
    assert [num_compiled(compiled()), num_compiled(compiled())] == [1, 0]
    assert contents(prebuilt) == left and not caplog.records


def test_prebuilt_code_of_other_sources_is_not_loaded(
    compiled: Callable[[], Any], tmp_path: Path, prebuilt: Path
) -> None:
    with (tmp_path / "twice.py").open("a") as file:
        file.write("# changed\n")
    assert num_compiled(compiled()) == 1


def test_inlined_kernels_are_not_prebuilt(compiled: Callable[[], Any]) -> None:
    dispatcher = compiled()
    assert dispatcher._cache._prebuilt is not None
    assert inlined(dispatcher.py_func)._cache._prebuilt is None


def test_kernels_that_are_made_of_vectors_are_not_prebuilt(compiled: Callable[[], Any], tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(f"from ssd.model.cpu.simd import LANES\n{TWICE}")
    assert compiled()._cache._prebuilt is None


# Addresses are checked where that is asked for


WRONG = """
import numpy as np
from ssd.jit.addresses import Int64s, address, int64_array, kernel, load_uint32, load_uint64
from ssd.jit.addresses import Int64, Record, Records, view_of, views_of

class Pair(Record):
    one: Int64
    other: Int64

pair_at, pairs_at = view_of(Pair), views_of(Pair)

@kernel
def load(at: int) -> int:
    return load_uint64(at)

@kernel
def load_half(at: int) -> int:
    return load_uint32(at)

@kernel
def item(at: int, length: int, index: int) -> int:
    return int64_array(at, length)[index]

@kernel
def other(at: int) -> int:
    return pair_at(at).other

@kernel
def other_of(at: int, length: int, index: int) -> int:
    return pairs_at(at, length)[index].other

def is_refused(kernel, *arguments):
    try:
        kernel(*arguments)
    except IndexError:
        return True
    return False

numbers, pairs = np.arange(10), Records(Pair, 3)
begin, first = address(numbers[2:]) - 16, pairs.address
assert [load(begin), load(begin + 72), item(begin, 10, 9), other(first), other_of(first, 3, 2)] == [0, 9, 9, 0, 0]
assert load_half(begin + 76) == 0
for refused in (
    (load, begin - 1), (load, begin + 73), (load, 0), (load_half, begin + 77), (item, begin, 11, 0),
    (item, begin, 9, 9), (item, begin, -1, 0), (other, first + 40), (other_of, first, 4, 0), (other_of, first, 3, 3),
):
    assert is_refused(*refused), refused
mapped = np.frombuffer(bytearray(64), np.uint8)[8:16]
assert load(address(mapped) - 8) == 0 and is_refused(load, address(mapped) + 49)
del numbers
assert is_refused(load, begin), "it is freed"
"""

KERNELS = (
    "tests/test_search.py",
    "tests/test_rows.py",
    "tests/test_follow.py",
    "tests/test_acceptance.py",
    "tests/test_drafting.py",
    "tests/test_sample_cache.py",
)


def run_checked(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SSD_CHECK_ADDRESSES": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_wrong_addresses_and_indices_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    done = run_checked(str(script))
    assert done.returncode == 0, done.stderr


STARTED = """
import sys
from contextlib import ExitStack
from ssd.jit.code_cache import PREBUILT, kernel_counts
from tests.server.bundled_engine import load_bundled

assert PREBUILT.is_relative_to(sys.argv[1]), PREBUILT
with ExitStack() as resources:
    engine = load_bundled(resources)
    engine.target.warm_up()
    native = kernel_counts()  # attention, the other layers and the most probable tokens
    engine.warm_up()
    counts = kernel_counts()
assert counts.prebuilt > 30 and counts.compiled == native.compiled, (native, counts)
"""


@pytest.mark.slow
def test_a_package_with_prebuilt_kernels_starts_without_compiling_what_drafts_and_drafts_as_the_twins_do(
    tmp_path: Path,
) -> None:
    """It is moved after it was built, as an installed wheel is."""
    built, package = tmp_path / "built", tmp_path / "package"
    for name in ("ssd", "server", "cache_builder", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, built / name, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    shutil.copy(ROOT / "pyproject.toml", built)

    def run_in(directory: Path, *arguments: str) -> None:
        kept = {"NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": str(directory)}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=directory, env=os.environ | kept, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    run_in(built, "-m", "server.command.prebuild")
    built.rename(package)
    before = {path: path.read_bytes() for path in (package / "ssd" / "jit" / "prebuilt").rglob("*.nb?")}
    run_in(package, "-c", STARTED, str(package))
    run_in(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", *KERNELS)
    assert before and all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.slow
def test_kernels_that_search_and_draft_stay_within_what_they_were_given() -> None:
    done = run_checked("-m", "pytest", "-q", "-p", "no:cacheprovider", *KERNELS)
    assert done.returncode == 0, done.stdout[-3000:]
