"""Everything that only a GPU can show, in calls of less than nine minutes; needs none of the web packages.

``python -m benchmarks.gpu_check [MODEL] [--call K | --parts PART...] [--real DIR] [--minutes M] [--out DIR]``

- call 1, is it right: greedy output against ``model.generate`` and sampled output against no speculation, in three
  types; the tests that do more on a GPU, our kernels against float32 among them.
- call 2, is it fast: steps of an 8B and a 1B shape beside a copy of memory, repeats at batch 1, what drafting for 64
  rows takes, and speculation that gains nothing at batch 1 to 64.
- call 3, why: steps under the profiler, growth, and a soak with cancellations and leaks.
- call 4, what else: a pretrained model (``--real``), the small model's overhead, steps without recording and fused.

Without --call or --parts, all of them. Parts run in the order of their worth, each in a process of its own: one that
fails, hangs or has no time left is said and does not stop the next, and what it had found stands. The drafter's
kernels are compiled beside the first parts. Ends with the marks, met or not, and one JSON line; status 1 where a part
failed. With --out the result is written after every part; ``--marks`` reads all results there and prints their marks.
``--device cpu`` runs the same at small sizes, for a look at the script itself. docs/gpu.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import torch

from benchmarks.environment import device_name, head, model_name
from benchmarks.gpu_check.marks import marks, say
from benchmarks.gpu_check.outputs import exactness, growth, growth_real, kernels, soak, suite
from benchmarks.gpu_check.scene import SIZES, Found, Keep, Scene, read_results
from benchmarks.gpu_check.speed import (
    overhead_large,
    overhead_small,
    profiles,
    speed_large,
    speed_small,
    speed_variants,
)
from ssd.bundled import MODEL_PATH

Run = Callable[[Scene, Keep], Found]

_LEAST_SHARE = 0.4
"""Of its expected time that a part must have left to begin: what it finds first is worth most."""

_MOST_SHARE = 4.0
"""Of its expected time, and a minute, that a part may take: one that hangs shall not take the next ones' time."""

_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Part:
    """``run`` : in a process of its own. ``seconds`` : what it should take on a GPU with 3 TB/s, which none measured.

    ``needs_kernels`` : the drafter's, which are compiled beside what does not.
    """

    run: Run
    seconds: int
    needs_kernels: bool = True


PARTS: dict[str, Part] = {
    "kernels": Part(kernels, 100, needs_kernels=False),
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
    ("exactness", "tests"),
    ("speed-large", "overhead-large", "speed-small"),
    ("soak", "growth", "profile"),
    ("growth-real", "overhead-small", "speed-variants"),
)
"""What each call of the command runs; each is meant for less than nine minutes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 where a part failed."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    if args.marks:
        say(marks(read_results(args.out)))
        return 0
    scene = Scene(str(args.model), args.real, args.device, _sizes(args), args.out)
    if args.alone is not None:  # what a part found goes to the file that is named, whenever something new is known
        run_here(PARTS[args.alone].run, scene, partial(_write, args.result))
        return 0
    names = tuple(args.parts or (CALLS[args.call - 1] if args.call else [name for name in PARTS if name != "kernels"]))
    minutes = args.minutes or (8.5 if args.call else 60.0)
    name = device_name(torch.device(args.device))
    print(f"gpu_check: {model_name(args.model)} on {name}; {', '.join(names)}")
    print(f"some {sum(PARTS[part].seconds for part in names)} s, at most {60 * minutes:.0f}", flush=True)
    result: Found = {**head("gpu_check"), "device": name, "parameters": vars(scene.sizes)}
    path = None if args.out is None else args.out / f"gpu_check{f'-{args.call}' if args.call else ''}.json"

    def write(part: str, found: Found) -> None:
        result[part] = found
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, result)

    _run(names, scene, 60 * minutes, write, None if args.here else argv)
    failed = [part for part in names if not result[part].get("passed", False)]
    found = marks(result)
    write("marks", [mark.to_json() for mark in found])  # type: ignore[arg-type]
    measured = [mark for mark in found if mark.is_met is not None]
    say(measured)
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    summary = {key: result[key] for key in ("benchmark", "date", "environment", "device")}
    print(json.dumps({**summary, "failed": failed, "marks": [mark.to_json() for mark in measured]}))
    return int(bool(failed))


def _write(path: Path, found: Found) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(found) + "\n")
    scratch.replace(path)


def _run(
    names: Sequence[str],
    scene: Scene,
    seconds: float,
    write: Callable[[str, Found], None],
    argv: Sequence[str] | None,
) -> None:
    """Each part with what time is left. ``argv`` : of this process, for the parts' own ones; None runs them here."""
    ends = time.monotonic() + seconds
    compiling = None
    if argv is not None and any(PARTS[name].needs_kernels for name in names):
        compiling = Child("kernels", argv)
    for name in names:
        part, began = PARTS[name], time.monotonic()
        expected = part.seconds
        if part.needs_kernels and compiling is not None:
            compiled = compiling.result(ends - time.monotonic())
            write("kernels", compiled)
            print(f"== kernels: {compiled['seconds']} s{'' if compiled.get('passed') else ', FAILED'}", flush=True)
            compiling = None
        left = ends - time.monotonic()
        if left < min(_LEAST_SHARE * expected, seconds):
            write(name, {"skipped": f"{left:.0f} s were left, it takes some {expected}", "passed": True})
            print(f"== {name}: skipped, {left:.0f} s were left", flush=True)
            continue
        print(f"== {name}: some {expected} s", flush=True)
        if argv is None:
            found = run_here(part.run, scene, partial(write, name))
        else:
            found = Child(name, argv).result(min(left, _MOST_SHARE * expected + 60))
        found["seconds"], found["expected_seconds"] = round(time.monotonic() - began, 1), expected
        write(name, found)
        print(f"== {name}: {found['seconds']} s, {'passed' if found.get('passed') else 'FAILED'}"
              f"{''.join(f', {found[key]}' for key in ('failure', 'cut') if key in found)}", flush=True)  # fmt: skip
    if compiling is not None:
        compiling.result(0)


def run_here(run: Run, scene: Scene, keep: Keep) -> Found:
    """What the part found, or how it failed beside what it had found."""
    known: Found = {}

    def note(found: Found) -> None:
        known.clear()
        known.update(found)
        keep(found)

    try:
        found = run(scene, note)
    except Exception as failure:  # the next parts may still tell something
        traceback.print_exc()
        found = {**known, "passed": False, "failure": f"{type(failure).__name__}: {failure}"[:2000]}
    keep(found)
    return found


class Child:
    """A part under way in a process of its own, which leads a group: what it starts ends with it, and a fault on the
    device too."""

    def __init__(self, name: str, argv: Sequence[str]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="gpu-check-")
        self._path, self._began = Path(self._directory.name) / "found.json", time.monotonic()
        own = ["--alone", name, "--result", str(self._path)]
        command = [sys.executable, "-m", "benchmarks.gpu_check", *argv, *own]
        self._process = subprocess.Popen(command, start_new_session=True)

    def result(self, seconds: float) -> Found:
        """What was found within ``seconds`` from now; a part that takes longer is cut."""
        is_cut = not self._ends_within(max(0.0, seconds))
        for number in (signal.SIGTERM, signal.SIGKILL) if is_cut else ():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            self._ends_within(_GRACE_S)
        found: Found = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._directory.cleanup()
        taken = round(time.monotonic() - self._began, 1)
        if is_cut:
            found |= {"passed": False, "cut": f"its time was over after {taken} s; what it had found stands"}
        elif self._process.returncode:
            found |= {"passed": False, "failure": f"its process ended with status {self._process.returncode}"}
        return {**found, "seconds": taken}

    def _ends_within(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None


def _sizes(args: argparse.Namespace) -> SimpleNamespace:
    column = int(args.device == "cpu")
    chosen = {name: size[column] if (given := getattr(args, name)) is None else given for name, size in SIZES.items()}
    return SimpleNamespace(**chosen)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("model", nargs="?", default=MODEL_PATH, help="directory or id of the small model (default: bundled)")
    add("--device", default="cuda", help="cuda, or cpu for a look at the script (default: %(default)s)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--call", type=int, choices=range(1, len(CALLS) + 1), help="the parts of one call")
    which.add_argument("--parts", nargs="+", choices=tuple(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    which.add_argument("--marks", action="store_true", help="run nothing: print the marks of the results in --out")
    add("--real", default=None, metavar="DIR", help="a pretrained model, for the part growth-real")
    add("--minutes", type=float, default=None, help="after which nothing runs (default: 8.5 with --call, else 60)")
    add("--here", action="store_true", help="parts in this process, one after another: none is cut")
    add("--out", type=Path, default=None, help="directory for results and traces")
    add("--alone", default=None, help=argparse.SUPPRESS)
    add("--result", type=Path, default=None, help=argparse.SUPPRESS)
    for name, (size, _, text) in SIZES.items():
        several = isinstance(size, tuple)
        shown = " ".join(map(str, size)) if several else size
        add(f"--{name.replace('_', '-')}", type=type(size[0]) if several else type(size), default=None,
            nargs="+" if several else None, help=f"{text} (default: {shown})")  # fmt: skip
    args = parser.parse_args(argv)
    if args.marks and args.out is None:
        parser.error("--marks needs --out, the directory that the results lie in")
    return args


if __name__ == "__main__":
    sys.exit(main())
