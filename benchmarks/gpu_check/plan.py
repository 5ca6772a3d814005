"""Which parts there are, in which order and call they run, how long each should take; each in a process of its own.

What a fault on the device leaves behind ends with its process, and so does what hangs.

The order is that of their worth: a machine may be taken away at any time. What a part should take is added up from what
it must do at least, at the rates of a GPU with 3 TB/s.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu_check.outputs import exactness, growth, growth_real, kernels, soak, suite
from benchmarks.gpu_check.right import attention, passes
from benchmarks.gpu_check.scene import Found, Keep, Scene
from benchmarks.gpu_check.speed import (
    overhead_large,
    overhead_small,
    profiles,
    speed_large,
    speed_small,
    speed_variants,
)

Run = Callable[[Scene, Keep], Found]

_GRACE_S = 5.0


def run_here(run: Run, scene: Scene, keep: Keep) -> Found:
    """What the part found, or how it failed beside what it had found."""
    known: Found = {}

    def note(found: Found) -> None:
        known.clear()
        known.update(found)
        keep(found)

    try:
        return run(scene, note)
    except Exception as failure:  # the next parts may still tell something
        traceback.print_exc()
        return {**known, "passed": False, "failure": f"{type(failure).__name__}: {failure}"[:2000]}


class Child:
    """A part under way in a process of its own, which leads a group: what it starts ends with it."""

    def __init__(self, run: Run, scene: Scene) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="gpu-check-")
        self._path = Path(self._directory.name) / "found.json"
        # A forked child could not use the device once its parent has.
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_write_down, args=(run, scene, self._path))
        self._process.start()
        self._began = time.monotonic()

    def result(self, seconds: float) -> Found:
        """What was found within ``seconds`` from now; a part that takes longer is cut."""
        self._process.join(max(0.0, seconds))
        is_cut = self._process.is_alive()
        if is_cut:
            self._end()
        try:
            found: Found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            found = {}
        self._directory.cleanup()
        taken = round(time.monotonic() - self._began, 1)
        if is_cut:
            found |= {"passed": False, "cut": f"its time was over after {taken} s; what it had found stands"}
        elif self._process.exitcode:
            found |= {"passed": False, "failure": f"its process ended with status {self._process.exitcode}"}
        return {**found, "seconds": taken}

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid or 0, number)
            except PermissionError:
                pass
            except ProcessLookupError:  # it has no group of its own yet: it has not begun
                self._process.kill()
            self._process.join(_GRACE_S)
            if not self._process.is_alive():
                return


def _write_down(run: Run, scene: Scene, path: Path) -> None:
    """The child: run, and replace the file whenever something new is known."""
    os.setsid()

    def keep(found: Found) -> None:
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(found))
        scratch.replace(path)

    keep(run_here(run, scene, keep))


_START_S: Final = 12.0
"""Of a process: torch, transformers and the device's context."""

_COMPILED_S: Final = 5.0
"""Of one variant of a kernel in Triton."""

_BYTES_PER_S: Final = 3e12

_LAUNCH_S: Final = 6e-6
"""Of one kernel launched from Python, some 15 of them a layer."""

_RECORDED_LAUNCHES: Final = 6
"""Passes that recording a shape takes: the first, two to warm up, the recording, the comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a part does at least. ``gb`` : read or written on the device. ``recorded`` : shapes, each of ``layers``.

    ``plain`` : passes launched kernel by kernel. ``compiled`` : Triton kernels, one after another. ``steps`` : of the
    engine, at ``step_s`` each. ``other_s`` : what else there is.
    """

    gb: float = 0.0
    recorded: int = 0
    plain: int = 0
    layers: int = 6
    compiled: int = 0
    steps: int = 0
    step_s: float = 1.5e-3
    other_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it, one after another."""
        launched = (self.plain + _RECORDED_LAUNCHES * self.recorded) * self.layers * 15 * _LAUNCH_S
        moved = 1e9 * self.gb / _BYTES_PER_S
        return _START_S + launched + moved + self.compiled * _COMPILED_S + self.steps * self.step_s + self.other_s


@dataclass(frozen=True, slots=True)
class Part:
    """``run`` : in a process of its own. ``needs_kernels`` : the drafter's, which are compiled beside what does not."""

    run: Run
    work: Work
    needs_kernels: bool = True


PARTS: dict[str, Part] = {
    "attention": Part(attention, Work(gb=50, compiled=25, other_s=15), needs_kernels=False),
    "passes": Part(passes, Work(recorded=400, plain=3000, compiled=15, steps=5000)),
    "exactness": Part(exactness, Work(recorded=120, plain=12_000, compiled=3, steps=25_000)),
    "speed-large": Part(
        speed_large, Work(gb=16 * 5000, recorded=60, plain=150, layers=32, compiled=9, steps=600, other_s=15)
    ),
    "overhead-large": Part(
        overhead_large, Work(gb=16 * 9000, recorded=300, plain=60, layers=32, steps=9000, step_s=1e-3, other_s=20)
    ),
    "speed-small": Part(speed_small, Work(gb=2.5 * 5000, recorded=60, plain=150, layers=16, compiled=2, other_s=10)),
    "tests": Part(suite, Work(compiled=24, other_s=30), needs_kernels=False),
    "soak": Part(soak, Work(recorded=250, steps=8000, step_s=3e-3, other_s=10)),
    "growth": Part(growth, Work(recorded=60, steps=15_000, other_s=5)),
    "profile": Part(profiles, Work(gb=16 * 300, recorded=12, plain=60, layers=32, compiled=2, steps=300, other_s=25)),
    "growth-real": Part(growth_real, Work(gb=0.6 * 9000, recorded=60, plain=3000, layers=18, steps=9000, step_s=3e-3)),
    "overhead-small": Part(overhead_small, Work(recorded=250, steps=12_000, step_s=2e-3, other_s=10)),
    "speed-variants": Part(
        speed_variants, Work(gb=16 * 1500, recorded=10, plain=900, layers=32, compiled=2, other_s=30)
    ),
}
"""By their names, in the order of their worth."""

CALLS: Final[tuple[tuple[str, ...], ...]] = (
    ("attention", "passes", "exactness"),
    ("speed-large", "overhead-large", "speed-small", "tests"),
    ("soak", "growth", "profile"),
    ("growth-real", "overhead-small", "speed-variants"),
)
"""What each call of the command runs; each is meant for less than nine minutes."""

KERNELS: Final = Part(kernels, Work(other_s=90))
"""Runs beside the parts that need none of them, so that no part waits for a compiler while it measures."""


def expected_seconds(names: tuple[str, ...], parts: Mapping[str, Part]) -> float:
    """Of these parts, one after another."""
    return sum(parts[name].work.seconds for name in names)
