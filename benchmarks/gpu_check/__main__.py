"""Everything that only a GPU can show, in calls of less than nine minutes; needs none of the web packages.

``python -m benchmarks.gpu_check [MODEL] [--call K | --parts PART...] [--real DIR] [--minutes M] [--out DIR]``

- call 1, is it right: output against ``model.generate`` and against no speculation, in three types; the tests that do
  more on a GPU, our kernels against float32 among them.
- call 2, is it fast: steps of an 8B and a 1B shape beside a copy of memory, repeats at batch 1, what drafting for 64
  rows takes, and speculation that gains nothing at batch 1 to 64.
- call 3, why: steps under the profiler, growth, and a soak with cancellations and leaks.
- call 4, what else: a pretrained model (``--real``), the small model's overhead, steps without recording and fused.

Without --call or --parts, all of them. A part is other programs, each in a process of its own, which writes down what
it finds row by row: one that fails, hangs or has no time left is said and does not stop the next, and what it had found
stands. Ends with the marks, met or not, and one JSON line; status 1 where a part failed. With --out the result is
written after every part; ``--marks`` reads all results there and prints their marks. ``--device cpu`` runs the same at
small sizes, for a look at the script itself. docs/gpu.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.child import ROOT
from benchmarks.models import model_name
from benchmarks.run import head, table
from ssd.bundled import MODEL_PATH

Found = dict[str, Any]
"""What a part found: whether it "passed", and the "results" of its programs."""

PARTS_THAT_PASS: Final = ("tests", "exactness", "growth", "soak", "growth-real")
"""What they find is right or wrong."""


@dataclass(frozen=True, slots=True)
class Mark:
    """``value`` : None where it was not measured. ``bound`` : what it must reach, or, with ``at_most``, not exceed."""

    name: str
    value: float | None
    bound: float
    at_most: bool = False

    @property
    def is_met(self) -> bool | None:
        """None where nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def cells(self) -> dict[str, str]:
        """For people."""
        word = {None: "not measured", True: "met", False: "NOT MET"}[self.is_met]
        value = "-" if self.value is None else f"{self.value:g}"
        return {"mark": self.name, "measured": value, "word": word,
                "bound": f"{'at most' if self.at_most else 'at least'} {self.bound:g}"}  # fmt: skip


def marks(results: Mapping[str, Found]) -> Iterator[Mark]:
    """All of them, from what the parts found; a part that was cut counts with what it had found."""
    for part in PARTS_THAT_PASS:
        found = results.get(part)
        value = None if found is None or "skipped" in found or "cut" in found else float(found["passed"])
        yield Mark(f"{part} is right", value, 1.0)
    for part, shape in (("speed-large", "large"), ("speed-small", "small")):
        at = {(row["batch"], row["T"]): row for row in rows_of(results, part, "decode")}
        plain = at.get((1, 1), {})
        yield Mark(f"{shape} shape, plain decoding at batch 1, share of the copy rate", plain.get("of_copy"), 0.85)
        for width, bound in ((16, 1.10), (64, 1.35)):
            wide = at.get((1, width))
            ratio = round(wide["step_ms_p50"] / plain["step_ms_p50"], 4) if wide and plain else None
            yield Mark(f"{shape} shape, {width} positions over a plain step", ratio, bound, at_most=True)
        share = plain.get("outside_pass_share")
        yield Mark(f"{shape} shape, host time outside the pass, share of a step", share, 0.05, at_most=True)
    shares = [row["drafting_share"] for row in rows_of(results, "speed-large", "profile")]
    yield Mark("drafting for all rows, share of a step", max(shares, default=None), 0.03, at_most=True)
    large = (results.get("speed-large") or {}).get("results", [])
    repeats = next((each.get("repeated_requests") for each in large if each["benchmark"] == "growth"), None) or {}
    yield Mark("repeats at batch 1 over speculation off", repeats.get("speedup_second"), 10.0)
    for part, shape in (("overhead-large", "large"), ("overhead-small", "small")):
        for traffic in ("cold", "adversarial"):
            rows = rows_of(results, part, "overhead")
            ratios = [row["over_off"][0] for row in rows if row["traffic"] == traffic]
            yield Mark(f"{shape} shape, {traffic}, slowest batch over speculation off", min(ratios, default=None), 0.98)


def read_results(directory: Path) -> Found:
    """What the parts of all calls found whose results lie in ``directory``; of two of a part, the later file's by name.

    Empty where none lies there.
    """
    found: Found = {}
    for path in sorted(directory.glob("gpu_check*.json")):
        found |= json.loads(path.read_text())
    return found


def rows_of(results: Mapping[str, Found], part: str, program: str) -> list[dict[str, Any]]:
    """All rows that one program gave in one part."""
    found = (results.get(part) or {}).get("results", [])
    return [row for result in found if result["benchmark"] == program for row in result.get("rows", [])]


def section(result: Found) -> str:
    """The marks and the steps of the large shape, for docs/gpu.md."""
    columns = (("mark", "{mark}"), (">measured", "{measured}"), (">bound", "{bound}"), ("", "{word}"))
    steps = (
        (">batch", "{batch}"), (">positions a row", "{T}"), (">step, ms", "{step_ms_p50:.2f}"),
        (">pass alone, ms", "{pass_ms:.2f}"), (">of the copy rate", "{of_copy:.2f}"),
    )  # fmt: skip
    where = "{device}, {date}, torch {environment[versions][torch]}; steps of the large shape:".format_map(result)
    shown = table(columns, [mark.cells() for mark in marks(result)])
    return "\n".join([*shown, "", where, "", *table(steps, rows_of(result, "speed-large", "decode"))])


_LEAST_SHARE = 0.4
"""Of its expected time that a part must have left to begin: what it finds first is worth most."""

_MOST_SHARE = 4.0
"""Of its expected time, and a minute, that a part may take: one that hangs shall not take the next ones' time."""

_GRACE_S = 5.0
_KEPT_CHARACTERS = 2000

SIZES: Final[dict[str, tuple[str, str]]] = {
    "exact": ("--prompts 32 --max-tokens 48", "--prompts 2 --max-tokens 8"),
    "growth": ("--requests 80 --repeated 24 --max-tokens 96", "--requests 3 --repeated 2 --max-tokens 8"),
    "large": ("8b", "tiny"),
    "small": ("1b", "tiny"),
    "steps": ("--context 1024 --rounds 16 --copy-mb 2048", "--context 64 --rounds 2 --copy-mb 16"),
    "drafts": ("0 1 3 7 15 31 63", "0 3"),
    "batches": ("8 32 64", "2"),
    "repeats": ("--repeated 4 --max-tokens 256", "--repeated 2 --max-tokens 24"),
    "drafting": (
        "--batch 64 --context 256 --index-tokens 1000000",
        "--batch 4 --context 32 --index-tokens 4000 --draft 0 3",
    ),
    "overhead": ("--batch 1 4 16 64 --rounds 8", "--batch 1 --rounds 1 --max-tokens 4"),
    "profile": ("--batch 1 32 --context 1024", "--batch 1 2 --context 64 --rounds 2 --draft 0 3"),
    "soak": ("--requests 2000 --reopened 4", "--requests 24 --reopened 2"),
}
"""What stands for a name in a part's commands: on a GPU, and for a look on a CPU."""

TESTS: Final = (
    "test_triton_attention", "test_triton_sampling", "test_static_steps", "test_pass_noise", "test_triton_layers",
    "test_taps", "test_take_weights",
)  # fmt: skip
"""Each in a process of its own, all at once: what they wait for is a compiler."""


@dataclass(frozen=True, slots=True)
class Part:
    """``commands`` : programs of ours with their arguments, or pytest; ``at_once`` : side by side. ``seconds`` : what
    they should take on a GPU with 3 TB/s, which none measured."""

    seconds: int
    commands: tuple[str, ...]
    at_once: bool = False


_EXACT = "benchmarks.exact {exact} --rounds 1 --device {device}"
_GROWTH = "benchmarks.growth --streams mixed --sampling greedy {growth} --device {device}"
_OVERHEAD = "benchmarks.contenders --question overhead {overhead} --device {device}"
_PYTEST = "pytest -q -p no:cacheprovider -W default"  # of versions that are not ours no warning shall fail
_TIMED = "benchmarks.decode --no-baselines {steps} --device {device} --shape"
PARTS: dict[str, Part] = {
    # The drafter's kernels are compiled for the CPU, once a machine.
    "kernels": Part(100, ("benchmarks.growth {model} --device cpu --requests 2 --repeated 2 --max-tokens 8",)),
    "exactness": Part(70, (_EXACT + " --model {model} --dtype float32 bfloat16 float16",)),
    "speed-large": Part(
        100,
        (
            _TIMED + " {large} --batch 1 --draft {drafts}",
            _TIMED + " {large} --batch {batches} --draft 0 3 15",
            "benchmarks.growth --shape {large} --streams {repeats} --device {device}",
            "benchmarks.profile --shape {large} {drafting} --device {device}",
        ),
    ),
    "overhead-large": Part(100, (_OVERHEAD + " --shape {large}",)),
    "speed-small": Part(40, (_TIMED + " {small} --batch 1 --draft {drafts}",)),
    "tests": Part(160, tuple(f"{_PYTEST} tests/{name}.py" for name in TESTS), at_once=True),
    "soak": Part(50, ("benchmarks.gpu_check.soak {model} {soak} --device {device}",)),
    "growth": Part(40, (_GROWTH + " --model {model} --dtype float32",)),
    "profile": Part(50, ("benchmarks.profile --shape {large} {profile} --device {device} --traces {traces}",)),
    "growth-real": Part(
        50,
        (
            _GROWTH + " --model {real} --dtype {served}",
            _EXACT + " --model {real} --dtype float32 --drafters ssd random",
        ),
    ),
    "overhead-small": Part(50, (_OVERHEAD + " --model {model} --dtype float32",)),
    "speed-variants": Part(
        60, tuple(_TIMED + " {large} --batch 1 --draft 0 3 15 --" + name for name in ("enforce-eager", "fuse-linears"))
    ),
}  # fmt: skip
"""By their names, in the order of their worth."""

CALLS: Final[tuple[tuple[str, ...], ...]] = (
    ("kernels", "exactness", "tests"),
    ("kernels", "speed-large", "overhead-large", "speed-small"),
    ("kernels", "soak", "growth", "profile"),
    ("kernels", "growth-real", "overhead-small", "speed-variants"),
)
"""What each call of the command runs; each is meant for less than nine minutes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 where a part failed."""
    args = _parse(argv)
    if args.marks:
        _say(read_results(args.out))
        return 0
    names = tuple(args.parts or (CALLS[args.call - 1] if args.call else PARTS))
    minutes = args.minutes or (8.5 if args.call else 60.0)
    print(f"gpu_check: {model_name(args.model)} on {args.device}; {', '.join(names)}; "
          f"some {sum(PARTS[part].seconds for part in names)} s, at most {60 * minutes:.0f}", flush=True)  # fmt: skip
    result: Found = {**head("gpu_check"), "device": args.device}
    ends = time.monotonic() + 60 * minutes
    for name in names:
        result[name] = found = _played(name, args, ends - time.monotonic())
        words = [f"{key} {found[key]}" for key in ("skipped", "cut", "failure") if key in found]
        print("; ".join([f"== {name}: {'passed' if found['passed'] else 'FAILED'}", *words]), flush=True)
        result["device"] = next((each["device"] for each in found["results"] if "device" in each), result["device"])
        result["marks"] = [asdict(mark) | {"met": mark.is_met} for mark in marks(result)]
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            path = args.out / f"gpu_check{f'-{args.call}' if args.call else ''}.json"
            path.write_text(json.dumps(result) + "\n")
    _say(result)
    result["failed"] = [part for part in names if not result[part]["passed"]]
    print(f"failed: {', '.join(result['failed']) or 'none'}")
    print(json.dumps({key: value for key, value in result.items() if key not in names}))
    return int(bool(result["failed"]))


def _say(result: Found) -> None:
    for mark in marks(result):
        print("{word:<13} {mark}: {measured} ({bound})".format_map(mark.cells()))


def _played(name: str, args: argparse.Namespace, left: float) -> Found:
    """What a part's programs found within the time that is left."""
    part, found = PARTS[name], Found(passed=True, results=[])
    if left < _LEAST_SHARE * part.seconds:
        return found | {"skipped": f"{left:.0f} s were left, it takes some {part.seconds}"}
    if name == "growth-real" and args.real is None:
        return found | {"skipped": "no pretrained model: name its directory with --real"}
    print(f"== {name}: some {part.seconds} s", flush=True)
    ends = time.monotonic() + min(left, _MOST_SHARE * part.seconds + 60)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        given = {key: sizes[args.device == "cpu"] for key, sizes in SIZES.items()} | {
            "model": shlex.quote(str(args.model)),
            "real": shlex.quote(str(args.real)),
            "device": args.device,
            "traces": shlex.quote(str((args.out or Path(scratch)) / "traces")),
            "served": "float32" if args.device == "cpu" else "bfloat16",
        }
        started = []
        for number, command in enumerate(part.commands):
            started.append(Child(shlex.split(command.format_map(given)), Path(scratch) / f"{number}.json", args.device))
            if not part.at_once:
                started[-1].wait(ends - time.monotonic())
        for child in started:
            child.wait(ends - time.monotonic())
            if child.failure:
                found |= {"passed": False, **child.failure}
            found["results"] += child.results()
    return found


class Child:
    """A program under way, which leads a group: what it starts ends with it, and a fault on the device too.

    ``failure`` : of one that has ended otherwise than it should, what is said of it.
    """

    def __init__(self, words: Sequence[str], out: Path, device: str) -> None:
        self.failure: dict[str, str] = {}
        self._words, self._out, self._log = words, out, out.with_suffix(".log")
        # Where there is a device, kernels are compiled, whatever tells the tests so.
        environment = os.environ | ({} if device == "cpu" else {"TRITON_INTERPRET": "0"})
        command = [sys.executable, "-m", *words, *([] if words[0] == "pytest" else ["--out", str(out)])]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, seconds: float) -> None:
        """Until it has ended; one that takes longer is cut."""
        if self._ends_within(max(0.0, seconds)):
            if self._process.returncode and not self.failure:
                said = self._log.read_text(errors="replace").strip()[-_KEPT_CHARACTERS:]
                self.failure = {"failure": f"{' '.join(self._words)}: status {self._process.returncode}: {said}"}
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            self._ends_within(_GRACE_S)
        self.failure = {"cut": f"{' '.join(self._words)}: its time was over; what it had found stands"}

    def results(self) -> list[dict[str, Any]]:
        """What it wrote down, if it did."""
        return [json.loads(self._out.read_text())] if self._out.exists() else []

    def _ends_within(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
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
    add("--out", type=Path, default=None, help="directory for results and traces")
    args = parser.parse_args(argv)
    if args.marks and args.out is None:
        parser.error("--marks needs --out, the directory that the results lie in")
    return args


if __name__ == "__main__":
    sys.exit(main())
