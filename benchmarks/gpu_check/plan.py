"""Which parts there are, in which order and call they run, how long each should take; each in a process of its own.

What a fault on the device leaves behind ends with its process, and so does what hangs.

The order is that of their worth: a machine may be taken away at any time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
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


@dataclass(frozen=True, slots=True)
class Part:
    """``run`` : in a process of its own. ``seconds`` : what it should take on a GPU with 3 TB/s, which none measured.

    ``needs_kernels`` : the drafter's, which are compiled beside what does not.
    """

    run: Run
    seconds: int
    needs_kernels: bool = True


PARTS: dict[str, Part] = {
    "attention": Part(attention, 155, needs_kernels=False),
    "passes": Part(passes, 100),
    "exactness": Part(exactness, 70),
    "speed-large": Part(speed_large, 100),
    "overhead-large": Part(overhead_large, 100),
    "speed-small": Part(speed_small, 40),
    "tests": Part(suite, 160, needs_kernels=False),
    "soak": Part(soak, 50),
    "growth": Part(growth, 40),
    "profile": Part(profiles, 50),
    "growth-real": Part(growth_real, 50),
    "overhead-small": Part(overhead_small, 50),
    "speed-variants": Part(speed_variants, 60),
}
"""By their names, in the order of their worth."""

CALLS: Final[tuple[tuple[str, ...], ...]] = (
    ("attention", "passes", "exactness"),
    ("speed-large", "overhead-large", "speed-small", "tests"),
    ("soak", "growth", "profile"),
    ("growth-real", "overhead-small", "speed-variants"),
)
"""What each call of the command runs; each is meant for less than nine minutes."""

KERNELS: Final = Part(kernels, 100)
"""Runs beside the parts that need none of them, so that no part waits for a compiler while it measures."""
