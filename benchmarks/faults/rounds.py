"""One round: a scene, a load, some faults, and the verdict."""

from __future__ import annotations

import random
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.questions import Question
from benchmarks.faults.scene import Scene, SkippedError
from benchmarks.faults.table import Fault
from ssd.text.codec import TextCodec

OUTCOMES = ("right", "cancelled", "noted", "refused", "interrupted")
PROBLEMS = ("failed", "changed", "died", "lost", "twice", "elsewhere", "deaf")
"""A request failed; an answer changed; the server ended by itself; a promised note is gone, is there twice, or lies in
another namespace; sharing did not come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all rounds have in common."""

    codec: TextCodec
    questions: Sequence[Question]
    seed: int
    num_clients: int
    calm_s: float
    """Before, between and after the faults."""
    return_s: float
    """After a fault, within which sharing must be back."""


@dataclass(slots=True)
class Row:
    """What came of the rounds of one fault, or of one combination of faults."""

    name: str
    num_rounds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    num_promised: int = 0
    sharing_s: float | None = None
    """The longest time until a text reached the other replica after a fault."""
    reasons: list[str] = field(default_factory=list)
    skipped: str = ""

    @property
    def num_problems(self) -> int:
        """0 where all is well."""
        return sum(self.counts[name] for name in PROBLEMS)


def play(row: Row, faults: Sequence[Fault], setup: Setup) -> None:
    """One round of these faults; adds to ``row``. Those of Redis happen beside the others, each kind in turn."""
    chance = random.Random(f"{setup.seed}-{row.name}-{row.num_rounds}")
    with (
        tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as home,
        Scene(Path(home), setup.codec, setup.questions, chance) as scene,
    ):
        try:
            scene.open(
                with_redis=any(fault.needs_redis for fault in faults),
                with_small_disk=any(fault.needs_small_disk for fault in faults),
            )
            with scene.load.running(setup.num_clients, setup.seed), ThreadPoolExecutor(2) as lanes:
                scene.hold(setup.calm_s)
                kinds = [[fault for fault in faults if fault.needs_redis is is_redis] for is_redis in (False, True)]
                for lane in [lanes.submit(_inject, kind, scene, setup.calm_s) for kind in kinds]:
                    lane.result()
                scene.hold(setup.calm_s)
        except SkippedError as reason:
            row.skipped = str(reason)
            return
        _judge(row, scene, setup.return_s)
        row.num_rounds += 1


def _inject(faults: Sequence[Fault], scene: Scene, calm_s: float) -> None:
    for number, fault in enumerate(faults):
        if number:
            scene.hold(calm_s)
        fault.inject(scene)
        scene.revive_server()


def _judge(row: Row, scene: Scene, return_s: float) -> None:
    if scene.redis is not None:
        seconds = scene.sharing_returns(return_s)
        if seconds is None:
            row.counts["deaf"] += 1
        else:
            row.sharing_s = max(seconds, row.sharing_s or 0.0)
    scene.revive_server()
    scene.promise_committed()
    scene.close_server()
    shared = scene.history.check(scene.notes_shared())  # what reached a file need not have been shared
    stored = scene.history.check(scene.notes_on_disk())
    row.num_promised += stored.num_promised
    row.counts += scene.load.counts
    row.counts += Counter(
        died=scene.server.num_deaths,
        lost=len(stored.lost),
        twice=len(stored.twice) + len(shared.twice),
        elsewhere=len(stored.elsewhere) + len(shared.elsewhere),
    )
    row.reasons += scene.load.failures


def soak(row: Row, faults: Sequence[Fault], setup: Setup, seconds: float) -> list[tuple[int, float]]:
    """The load for so long, with one of ``faults`` now and then: (seconds, MiB of the server) over time."""
    chance = random.Random(f"{setup.seed}-soak")
    memory: list[tuple[int, float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as home,
        Scene(Path(home), setup.codec, setup.questions, chance) as scene,
    ):
        scene.open(with_redis=True, with_small_disk=False)
        over = threading.Event()

        def watch() -> None:
            step = max(1.0, seconds / 20)
            number = 0
            while not over.wait(step):
                number += 1
                memory.append((round(number * step), round(scene.server.memory_mib(), 1)))
                print(f"{memory[-1][0]:>7} s {memory[-1][1]:>9} MiB  {dict(scene.load.counts)}", flush=True)
                if number * step >= seconds:
                    over.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with scene.load.running(setup.num_clients, setup.seed):
                while not over.wait(setup.calm_s * chance.uniform(1.0, 4.0)):
                    chance.choice(list(faults)).inject(scene)
                    scene.revive_server()
        finally:
            over.set()
            watcher.join()
        _judge(row, scene, setup.return_s)
        row.num_rounds += 1
    return memory
