"""Run all checks and measurements that need a GPU, in two calls of about five minutes each.

``python -m benchmarks.gpu_check [--call K | --parts PART...] [--real DIR] [--device cpu] [--out DIR]``

- Call 1 checks correctness and speed: outputs compared with ``model.generate`` and with speculation off, in three
  dtypes, for a small model and for an 8B shape with random weights; the tests that do more on a GPU; engine steps of
  the 8B shape relative to a memory copy; repeated requests; speculation without repetition; the cost of bit-identical
  outputs; and a soak test with cancelled requests that looks for memory leaks.
- Call 2 explains and extends these figures: steps under the profiler, of a 1B shape, and without CUDA graphs; drafting
  for 64 rows; the overhead of speculation for the small model; and a pretrained model (``--real``).

Each part runs other programs in their own processes. If a program fails, hangs or runs out of time, this is reported,
the rows that it had written are kept, and the next part runs. At the end, all targets are printed, met or not, and one
JSON line. The exit status is 1 if a part failed, was cut or was skipped. The result file in ``--out`` is updated after
every part and keeps the parts of earlier runs; logs of failed programs are written next to it. ``--marks`` runs
nothing: it reads all results there, the newest of each part, and prints the targets. ``--device cpu`` runs everything
at small sizes, to try the script itself. No web package is needed. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.child import ROOT
from benchmarks.run import head, table

Found = dict[str, Any]
"""The result of one part: "passed", the "results" of its programs, and messages of programs that ended in "failures" or
were "cut" for time, or the reason why the part was "skipped". Also "at", "date", "environment", "device" and "command".
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """A target for a measured value.

    Attributes:
        part: The part of the GPU check that measures the value.
        value: The measured value; None if it was not measured.
        bound: The value to reach.
        at_most: Whether ``bound`` is a maximum instead of a minimum.
        interval: The 95 % confidence interval of the value, if known.
    """

    part: str
    name: str
    value: float | None
    bound: float
    at_most: bool = False
    interval: tuple[float, float] | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None if nothing was measured or the bound lies within the confidence interval."""
        if self.value is None:
            return None
        if self.interval is not None and self.interval[0] < self.bound <= self.interval[1]:
            return None
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def cells(self) -> dict[str, str]:
        """Return the target as text cells for a table."""
        unknown = "not measured" if self.value is None else "uncertain"
        word = {None: unknown, True: "met", False: "not met"}[self.is_met]
        value = "-" if self.value is None else f"{self.value:g}"
        if self.interval is not None:
            value += " ({:.2f} ... {:.2f})".format(*self.interval)
        return {
            "mark": self.name,
            "measured": value,
            "word": word,
            "bound": f"{'at most' if self.at_most else 'at least'} {self.bound:g}",
        }


def marks(results: Mapping[str, Found]) -> Iterator[Mark]:
    """Yield all targets with their values. Targets for single rows also use the rows of parts that were cut."""
    for part in ("right", "soak", "growth-real"):
        yield Mark(
            part,
            f"part {part}: all programs passed (1: yes, 0: no)",
            _passes(results.get(part, {"cut": "not run"})),
            1.0,
        )
    for part in ("right", "repeats", "overhead-large", "exact-cost", "overhead-small", "growth-real"):
        differ = f"part {part}: outputs that differ but must be equal"
        yield Mark(part, differ, num_different(results, part), 0, at_most=True)
    exact = [row for row in rows_of(results, "right", "exact") if row["dtype"] == "bfloat16"]
    num_equal = sum(row["num_positions"] for row in exact) * (not any(row["num_different"] for row in exact))
    yield Mark("right", "part right: bit-identical token positions in bfloat16", num_equal if exact else None, 1e4)
    rates = [row["rates"] for row in rows_of(results, "exact-cost", "exact")]
    for kind in ("decoding 1 row", "decoding 8 rows"):
        relative = f"8B shape: speed of {kind} with --batch-invariant on, relative to off"
        yield Mark("exact-cost", relative, rates[0][kind][0] if rates else None, 0.95)
    for part, shape in (("speed-large", "8B"), ("speed-small", "1B")):
        at = {(row["batch"], row["T"]): row for row in rows_of(results, part, "decode")}
        plain = at.get((1, 1), {})
        plainly = f"{shape} shape: share of the memory copy rate, batch 1, without drafts"
        yield Mark(part, plainly, plain.get("of_copy"), 0.85)
        for width, bound in ((16, 1.10), (64, 1.35)):
            wide = at.get((1, width))
            ratio = round(wide["pass_ms"] / plain["pass_ms"], 4) if wide and plain else None
            wider = f"{shape} shape: time of a pass of {width} tokens, relative to 1 token"
            yield Mark(part, wider, ratio, bound, at_most=True)
        for batch in (1, 64) if shape == "8B" else (1,):
            share = at.get((batch, 1), {}).get("outside_pass_share")
            outside = f"{shape} shape: share of the step outside the forward pass, batch {batch}"
            yield Mark(part, outside, share, 0.05, at_most=True)
    shares = [row["drafting_share"] for row in rows_of(results, "drafting", "decode")]
    most = max(shares, default=None) if is_whole(results, "drafting") else None
    yield Mark("drafting", "8B shape: share of drafting in the step, 64 rows", most, 0.03, at_most=True)
    repeats = [each["repeated_requests"]["speedup_second"] for each in results.get("repeats", {}).get("results", ())]
    yield Mark("repeats", "8B shape: speed-up of repeated requests, batch 1", max(repeats, default=None), 10.0)
    for part, shape in (("overhead-large", "8B shape"), ("overhead-small", "bundled model")):
        for traffic, cache in (("cold", "empty"), ("adversarial", "misleading")):
            yield _slowest(results, part, f"{shape}: {cache} cache, throughput relative to speculation off", traffic)


def _passes(found: Found) -> float | None:
    if found.get("failures"):
        return 0.0
    return None if {"skipped", "cut"} & found.keys() else float(found["passed"])


def is_whole(results: Mapping[str, Found], part: str) -> bool:
    """Return whether a part (a group of checks) ran completely: neither skipped nor cut."""
    found = results.get(part, {"cut": "not run"})
    return not {"skipped", "cut"} & found.keys() and not any(each.get("is_cut") for each in found["results"])


def _slowest(results: Mapping[str, Found], part: str, name: str, traffic: str) -> Mark:
    """Return the target for the lowest throughput relative to speculation off over all batch sizes.

    Its value is None unless all requested batch sizes were measured. With misleading caches ("adversarial"), it is also
    None if nothing was drafted, because then nothing was tested.
    """
    rows = [row for row in rows_of(results, part, "overhead") if row["traffic"] == traffic]
    asked = {batch for each in results.get(part, {}).get("results", ()) for batch in each["parameters"]["batch"]}
    is_measured = is_whole(results, part) and rows and asked == {row["batch"] for row in rows}
    if not is_measured or (traffic == "adversarial" and not any(row["drafted_per_pass"][2] for row in rows)):
        return Mark(part, name, None, 0.98)
    value, low, high = map(min, zip(*((row["over_off"][0], *row["over_off_95"]) for row in rows), strict=True))
    return Mark(part, name, value, 0.98, interval=(low, high))


def num_different(results: Mapping[str, Found], part: str) -> int | None:
    """Return the number of outputs that differ from plain decoding although they must be equal.

    Only programs that ran in float32 or with batch-invariant passes count. Returns None if no difference was found but
    the part did not pass, or if no output had to be equal.
    """
    found = results.get(part, {"passed": False, "results": []})
    strict = [
        each
        for each in found["results"]
        if each["benchmark"] == "exact" or each.get("is_exact") or "float32" in each.get("dtype", "")
    ]
    places = [place for each in strict for place in (each, each.get("repeated_requests", {}), *each.get("rows", ()))]
    number = sum(place.get(key, 0) for place in places for key in ("num_different", "mismatches", "changed_outputs"))
    return number if number or (strict and found["passed"]) else None


def read_results(directory: Path) -> Found:
    """Read all result files in ``directory`` and combine them with `merged`. Returns an empty result without files."""
    return merged(json.loads(path.read_text()) for path in sorted(directory.glob("gpu_check*.json")))


def merged(results: Iterable[Found]) -> Found:
    """Combine several results: the newest run of each part, and the general fields of the newest result.

    A skipped run does not replace an earlier run of the part. For two runs with the same date, the later one is used.
    """
    found: Found = {}
    parts: dict[str, list[Found]] = {}
    for result in sorted(results, key=lambda each: str(each["date"])):
        head_of_it = {key: value for key, value in result.items() if key not in PARTS}
        found |= head_of_it
        for name in (name for name in PARTS if name in result):
            # Those of a file without heads of parts: its programs wrote down where and when they ran.
            first = head_of_it | next(iter(result[name]["results"]), {})
            own = {key: first[key] for key in ("date", "environment", "device")}
            parts.setdefault(name, []).append({"at": own["date"], "command": "", **own, **result[name]})
    for name, played in parts.items():
        found[name] = sorted(played, key=lambda each: ("skipped" not in each, str(each["at"])))[-1]
    return found


def rows_of(results: Mapping[str, Found], part: str, program: str) -> list[dict[str, Any]]:
    """Return all result rows that one program wrote in one part of the GPU check."""
    found = results.get(part, {}).get("results", [])
    return [row for result in found if result["benchmark"] == program for row in result.get("rows", [])]


def device_of(results: Mapping[str, Found], part: str) -> str:
    """Return the short name of the GPU that a part of the check ran on, such as "H100"; empty if unknown."""
    said = (str(each["device"]) for each in (results[part], *results[part]["results"]) if "device" in each)
    return next((each.removeprefix("NVIDIA ").split()[0] for each in said), "")


def section(results: Found) -> str:
    """Return the Markdown tables of targets and of the 8B shape's steps for docs/benchmarks.md."""
    columns = (
        ("target", "{mark}"),
        ("GPU, commit", "{on}"),
        (">measured", "{measured}"),
        (">bound", "{bound}"),
        ("result", "{word}"),
    )
    steps = (
        (">batch", "{batch}"),
        (">tokens per row and pass", "{T}"),
        (">engine step, ms", "{step_ms_p50:.2f}"),
        (">forward pass alone, ms", "{pass_ms:.2f}"),
        (">output tokens/s", "{tokens_per_s:,.0f}"),
        (">share of the memory copy rate", "{of_copy:.2f}"),
    )
    where = (
        "The next table shows engine steps of the 8B shape on an {device} ({date}, torch "
        "{environment[versions][torch]}, transformers {environment[versions][transformers]}). Each row had 1,024 "
        "tokens of context, and all draft tokens were accepted."
    )

    def on(part: str) -> str:
        return f"{device_of(results, part)}, `{{environment[commit]}}`".format_map(results[part])

    def those(word: str) -> str:
        return ", ".join(part for part in PARTS if word in results.get(part, {})) or "none"

    known = [mark for mark in marks(results) if mark.value is not None]
    absent = ", ".join(part for part in PARTS if part not in {*results, "kernels"}) or "none"
    lines = table(columns, [{**mark.cells(), "on": on(mark.part)} for mark in known])
    lines += [
        "",
        f"The GPU check ran out of time in these parts: {those('cut')}. The GPU check has not run these parts: "
        f"{absent}.",
    ]
    for part in PARTS:
        for failure in results.get(part, {}).get("failures", ()):
            command, _, status = failure.splitlines()[0].rpartition(": ")
            lines += ["", f"In the part `{part}`, `{command.split()[0]}` failed with {status} on {on(part)}."]
    if rows := rows_of(results, "speed-large", "decode"):
        lines += ["", where.format_map(results["speed-large"]), "", *table(steps, rows)]
    return "\n".join(lines)


_LEAST_SHARE = 0.4
"""The share of a part's expected time that must be left to start the part; its first rows are the most useful ones."""
_MOST_SHARE = 2.0
"""The time limit of a part relative to its expected time (plus 30 s), so that a hanging part leaves time for others."""
_SECONDS = 8.5 * 60
"""The default time limit of one call."""
_KEPT_CHARACTERS = 2000
_LAST_SECONDS = 15
"""The time that pytest gets to report failures after it was interrupted at its time limit."""

_STEPS = "benchmarks.decode --no-baselines --context 1024 --rounds 16 --copy-mb 2048"
_GROWTH = "benchmarks.growth --streams mixed --sampling greedy --requests 40 --repeated 12 --max-tokens 64"
_OVERHEAD = "benchmarks.contenders --question overhead --traffic cold adversarial --rounds 6"
_EXACT = "benchmarks.exact --rounds 1 --draft 1 8 63 --batch 1 8 32"
_TESTS = (
    "overlap",
    "triton_attention",
    "triton_sampling",
    "triton_layers",
    "triton_linear",
    "static_steps",
    "pass_noise",
    "taps",
    "take_weights",
)
_TEST_FILES = " ".join(f"tests/test_{name}.py" for name in _TESTS)
PARTS: dict[str, tuple[int, tuple[str, ...]]] = {
    # The drafter's kernels are compiled for the CPU, once a machine.
    "kernels": (90, ("benchmarks.growth --requests 2 --repeated 2 --max-tokens 8",)),
    "right": (
        90,
        (
            f"{_EXACT} --dtype float32 --prompts 12 --max-tokens 24",
            f"{_EXACT} --dtype bfloat16",
            f"{_EXACT} --dtype float16",
            f"{_EXACT} --dtype bfloat16 --shape 8b --prompts 24",
            f"{_GROWTH} --dtype float32",
            # Of versions that are not ours no warning shall fail. What is cut has said where it was.
            f"pytest -v -o addopts= -p no:cacheprovider -W default -o faulthandler_timeout=60 -n 9 {_TEST_FILES}",
        ),
    ),
    "speed-large": (
        60,
        (f"{_STEPS} --shape 8b --batch 1 --draft 0 3 15 63", f"{_STEPS} --shape 8b --batch 8 32 64 --draft 0"),
    ),
    "repeats": (40, ("benchmarks.growth --shape 8b --streams --repeated 4 --max-tokens 192",)),
    "overhead-large": (60, (f"{_OVERHEAD} --shape 8b --batch 1 16",)),
    "exact-cost": (35, (f"{_EXACT} --shape 8b --dtype bfloat16 --prompts 2 --max-tokens 8 --rounds 3",)),
    "soak": (35, ("benchmarks.reliability --question engine --requests 1000",)),
    "profile": (40, (f"{_STEPS} --shape 8b --batch 1 32 --draft 0 15 --profiled 4 --traces traces",)),
    "drafting": (40, (f"{_STEPS} --shape 8b --batch 64 --context 256 --draft 0 15 --index-tokens 1000000",)),
    "speed-small": (40, (f"{_STEPS} --shape 1b --batch 1 --draft 0 1 3 7 15 31 63",)),
    "overhead-small": (50, (f"{_OVERHEAD} --dtype float32 --batch 1 4 16",)),
    "growth-real": (60, (f"{_GROWTH} --model REAL", f"{_EXACT} --model REAL --dtype float32 --drafters ssd random")),
    "speed-variants": (
        40,
        (f"{_STEPS} --shape 8b --batch 1 --draft 0 3 15 --enforce-eager",),
    ),
}
"""The parts by name, the most important first: the expected seconds on a GPU with 4 TB/s of memory bandwidth, and the
command lines of the programs (or of pytest)."""

AT_ONCE: Final = ("right",)
"""The parts whose programs run concurrently, because they check outputs and do not measure time."""

CALLS: Final[tuple[tuple[str, ...], ...]] = (
    ("kernels", "right", "speed-large", "repeats", "overhead-large", "exact-cost", "soak"),
    ("kernels", "profile", "drafting", "speed-small", "overhead-small", "growth-real", "speed-variants"),
)

SMALL: Final = {
    "exact": "--prompts 2 --max-tokens 8 --rounds 1 --draft 1 3 --batch 1 8",
    "growth": "--requests 3 --repeated 2 --max-tokens 24",
    "decode": "--context 64 --rounds 2 --copy-mb 16 --batch 1 --draft 0 3 --index-tokens 4000",
    "contenders": "--batch 1 --rounds 1 --max-tokens 4",
    "reliability": "--requests 16 --reopened 2",
}
"""Options by program that are appended with ``--device cpu`` to make the run small; they override earlier options."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a part of the check did not pass, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=(__doc__ or "").split("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--call", type=int, choices=range(1, len(CALLS) + 1), help="run the parts of this call")
    which.add_argument("--parts", nargs="+", choices=tuple(PARTS), metavar="PART", help=f"run: {', '.join(PARTS)}")
    which.add_argument("--marks", action="store_true", help="run nothing, print the targets for the results in --out")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script (default: %(default)s)")
    parser.add_argument("--real", metavar="DIR", help="directory of a pretrained model, for the part growth-real")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="time limit (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=Path(), help="directory for results and traces (default: here)")
    args = parser.parse_args(argv)
    names = () if args.marks else args.parts or (CALLS[args.call - 1] if args.call else tuple(PARTS))
    ends = time.monotonic() + (args.seconds if args.call or args.parts else 60 * 60)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"gpu_check{f'-{args.call}' if args.call else ''}.json"
    before = [json.loads(path.read_text())] if path.exists() else []
    about = {**head("gpu_check", ("ssd", "tests")), "device": args.device}
    result: Found = read_results(args.out) if args.marks else dict(about)
    for name in names:
        print(f"== {name}: some {PARTS[name][0]} s", flush=True)
        found = _played(name, args, ends - time.monotonic())
        words = [f"{key} {found[key]}" for key in ("skipped", "cut", "failures") if key in found]
        word = "passed" if found["passed"] else "not run" if "skipped" in found else "FAILED"
        print("; ".join([word, *words]), flush=True)
        result[name] = {
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **{key: about[key] for key in ("date", "environment")},
            "device": next((each["device"] for each in found["results"] if "device" in each), args.device),
            "command": f"python -m benchmarks.gpu_check {f'--call {args.call}' if args.call else f'--parts {name}'}",
            **found,
        }
        scratch = path.with_name(f"{path.name}.new")
        scratch.write_text(json.dumps(merged([*before, result])) + "\n")
        scratch.replace(path)
    for mark in marks(result):
        print("{word:<14} {mark}: {measured} ({bound})".format_map(mark.cells()))
    missed = [part for part in names if not result[part]["passed"]]
    print(json.dumps({**head("gpu_check"), "not_passed": missed, "marks": [mark.cells() for mark in marks(result)]}))
    return int(bool(missed))


def _played(name: str, args: argparse.Namespace, left: float) -> Found:
    (seconds, commands), found = PARTS[name], Found(passed=False, results=[])
    if left < _LEAST_SHARE * seconds:
        return found | {"skipped": f"{left:.0f} s were left, it takes some {seconds}"}
    if name == "growth-real" and args.real is None:
        return found | {"skipped": "no pretrained model: name its directory with --real"}
    ends = time.monotonic() + min(left, _MOST_SHARE * seconds + 30)
    device = "cpu" if name == "kernels" else args.device

    def play(number: int) -> tuple[str, str] | None:
        words = commands[number].split()
        words = [{"REAL": args.real, "traces": str(args.out / "traces")}.get(word, word) for word in words]
        if words[0] != "pytest":
            if args.device == "cpu":
                before = ["", *words]
                words = ["tiny" if after == "--shape" else word for after, word in zip(before, words, strict=False)]
                words += SMALL.get(words[0].removeprefix("benchmarks."), "").split()
            words += ["--device", device, "--out", f"{scratch}/{number}.json"]
        ended = _run(words, Path(scratch) / f"{number}.log", device, ends)
        return ended and (ended[0], f"{commands[number]}: {ended[1]}")

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        with ThreadPoolExecutor(len(commands) if name in AT_ONCE else 1) as lanes:
            for number, ended in enumerate(lanes.map(play, range(len(commands)))):
                if ended is not None:
                    found.setdefault(ended[0], []).append(ended[1])
                    shutil.copy(Path(scratch) / f"{number}.log", args.out / f"{name}-{number}.log")
        found["passed"] = not {"cut", "failures"} & found.keys()
        found["results"] = [json.loads(path.read_text()) for path in sorted(Path(scratch).glob("*.json"))]
    return found


def _run(words: Sequence[str], log: Path, device: str, ends: float) -> tuple[str, str] | None:
    """Run a program until it exits or the time ``ends`` is over.

    Returns None if it succeeded, else "cut" or "failures" with a message. The program runs in its own process group, so
    that its child processes are killed with it.
    """
    # Where there is a device, kernels are compiled, whatever tells the tests so; tests take a core each.
    environment = os.environ | ({} if device == "cpu" else {"TRITON_INTERPRET": "0"})
    is_test = words[0] == "pytest"
    environment |= {"OMP_NUM_THREADS": "1"} if is_test else {}
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=said,
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
    is_over = False
    try:
        process.wait(max(0.0, ends - time.monotonic() - _LAST_SECONDS * is_test))
    except subprocess.TimeoutExpired:
        is_over = True
        if is_test:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = log.read_text(errors="replace").strip()
    if is_over and not (is_test and re.search(r"\b\d+ failed\b", text)):
        return "cut", "its time was over; what it had found stands"
    if process.returncode:
        return "failures", f"status {process.returncode}\n{text[-_KEPT_CHARACTERS:]}"
    if is_test and not re.search(r"\b\d+ passed\b", text):
        return "failures", "no test passed, all were skipped"
    return None


def _heed_interrupts() -> None:
    # Shells let background programs ignore SIGINT, with which pytest is told to stop and report its failures.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
