"""Which parts there are, in which order they run, in which call, and how long each should take.

The order is that of their worth: a machine may be taken away at any time. What a part should take is added up from what
it must do at least, at the rates of a GPU with 3 TB/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.gpu_check.attention import attention, attention_race
from benchmarks.gpu_check.engine import exactness, growth, growth_real
from benchmarks.gpu_check.kernels import kernels
from benchmarks.gpu_check.overhead import overhead_large, overhead_small
from benchmarks.gpu_check.passes import passes
from benchmarks.gpu_check.profiles import profiles
from benchmarks.gpu_check.running import Run
from benchmarks.gpu_check.soaking import soak
from benchmarks.gpu_check.speed import speed_large, speed_small, speed_variants
from benchmarks.gpu_check.suite import suite

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
    "race": Part(attention_race, Work(gb=300, compiled=8, other_s=140), needs_kernels=False),
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
    ("soak", "growth", "profile", "race"),
    ("growth-real", "overhead-small", "speed-variants"),
)
"""What each call of the command runs; each is meant for less than nine minutes."""

KERNELS: Final = Part(kernels, Work(other_s=90))
"""Runs beside the parts that need none of them, so that no part waits for a compiler while it measures."""


def expected_seconds(names: tuple[str, ...], parts: Mapping[str, Part]) -> float:
    """Of these parts, one after another."""
    return sum(parts[name].work.seconds for name in names)
