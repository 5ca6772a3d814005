"""Everything that only a GPU can show, in calls of less than nine minutes; needs none of the web packages.

``python -m benchmarks.gpu_check [MODEL] [--call K | --parts PART...] [--real DIR] [--minutes M] [--out DIR]``

- call 1, is it right: our attention against float32 over lengths, heads, windows, sinks, caps and trees; the small
  model by plain passes, static shapes and recorded ones, with our kernels and without; greedy output against
  ``model.generate`` and sampled output against no speculation, in three types; the tests that do more on a GPU.
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
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import device_name, head, model_name
from benchmarks.gpu_check.marks import marks, say
from benchmarks.gpu_check.plan import CALLS, KERNELS, PARTS, Child, run_here
from benchmarks.gpu_check.scene import ON_CPU, Found, Scene, Sizes, read_results
from ssd.bundled import MODEL_PATH

_LEAST_SHARE = 0.4
"""Of its expected time that a part must have left to begin: what it finds first is worth most."""

_MOST_SHARE = 4.0
"""Of its expected time, and a minute, that a part may take: one that hangs shall not take the next ones' time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 where a part failed."""
    args = _parse(argv)
    if args.marks:
        say(marks(read_results(args.out)))
        return 0
    scene = Scene(str(args.model), args.real, args.device, _sizes(args), args.out)
    names = tuple(args.parts or (CALLS[args.call - 1] if args.call else PARTS))
    minutes = args.minutes or (8.5 if args.call else 60.0)
    name = device_name(torch.device(args.device))
    expected = sum(PARTS[part].seconds for part in names)
    print(f"gpu_check: {model_name(args.model)} on {name}; {', '.join(names)}")
    print(f"some {expected} s, at most {60 * minutes:.0f}", flush=True)
    result: Found = {
        **head("gpu_check"),
        "device": name,
        "parameters": {each.name: getattr(scene.sizes, each.name) for each in fields(Sizes)},
    }
    path = None if args.out is None else args.out / f"gpu_check{f'-{args.call}' if args.call else ''}.json"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(part: str, found: Found) -> None:
        result[part] = found
        if path is not None:
            path.write_text(json.dumps(result) + "\n")

    _run(names, scene, 60 * minutes, write, is_here=args.here)
    failed = [part for part in names if not result[part].get("passed", False)]
    found = marks(result)
    result["marks"] = [mark.to_json() for mark in found]
    if path is not None:
        path.write_text(json.dumps(result) + "\n")
    measured = [mark for mark in found if mark.is_met is not None]
    say(measured)
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    summary = {key: result[key] for key in ("benchmark", "date", "environment", "device")}
    print(json.dumps({**summary, "failed": failed, "marks": [mark.to_json() for mark in measured]}))
    return int(bool(failed))


def _run(
    names: Sequence[str], scene: Scene, seconds: float, write: Callable[[str, Found], None], *, is_here: bool
) -> None:
    ends = time.monotonic() + seconds
    compiling = None
    if not is_here and any(PARTS[name].needs_kernels for name in names):
        compiling = Child(KERNELS.run, scene)
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
        if is_here:
            found = run_here(part.run, scene, partial(write, name))
        else:
            found = Child(part.run, scene).result(min(left, _MOST_SHARE * expected + 60))
        found["seconds"], found["expected_seconds"] = round(time.monotonic() - began, 1), expected
        write(name, found)
        print(f"== {name}: {found['seconds']} s, {'passed' if found.get('passed') else 'FAILED'}"
              f"{''.join(f', {found[key]}' for key in ('failure', 'cut') if key in found)}", flush=True)  # fmt: skip
    if compiling is not None:
        compiling.result(0)


def _sizes(args: argparse.Namespace) -> Sizes:
    given = {each.name: getattr(args, each.name) for each in fields(Sizes) if getattr(args, each.name) is not None}
    made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return replace(ON_CPU if args.device == "cpu" else Sizes(), **made)


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
    add("--here", action="store_true", help="parts in this process, one after another: none is cut")
    add("--out", type=Path, default=None, help="directory for results and traces")
    for each in fields(Sizes):
        default = getattr(Sizes(), each.name)
        kind = type(default[0]) if isinstance(default, tuple) else type(default)
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        add(f"--{each.name.replace('_', '-')}", type=kind, default=None, help=f"(default: {shown})",
            nargs="+" if isinstance(default, tuple) else None)  # fmt: skip
    args = parser.parse_args(argv)
    if args.marks and args.out is None:
        parser.error("--marks needs --out, the directory that the results lie in")
    return args


if __name__ == "__main__":
    sys.exit(main())
