"""Which attention reads the slot KV cache fastest?

``python -m benchmarks.attention [--device cuda] [--batch B...] [--width T...] [--context L...] [--heads H,Hkv,D]``

Every candidate attends from T new positions of B rows of different length to what they hold; its output is compared
with attention written out in float32. On CUDA twenty calls are recorded as a graph and repeated, so that launching from
Python does not count; where a candidate cannot be recorded, it does, and the table says so. Calls right behind each
other find keys and values in the device's cache, which a layer of a large model does not: the second time is with that
cache filled with something else before each call. Candidates that do not run here are listed with the reason. Prints a
table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.attention.candidates import CANDIDATES, Attend, NotHereError, Problem, reference
from benchmarks.environment import device_name, head
from ssd.model.loading.load_target import DTYPES

MOST_ERROR = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""Relative to the norm of the output: what rounding makes of it. float32 without reduced matrix precision."""

_CALLS = 20
_FLUSHED_BYTES = 128 << 20
"""Of numbers changed before each call, more than a device's cache holds: a model's weights are read between layers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 where a candidate that ran computed something else."""
    args = _parse(argv)
    parameters = {name: getattr(args, name) for name in ("batch", "width", "context", "heads", "dtype", "rounds")}
    device = torch.device(args.device)
    name = device_name(device)
    print(f"attention: {name}, {json.dumps(parameters)}")
    if device.type != "cuda":
        print("no CUDA device: only candidates that run on a CPU")
    rows = compare(args.batch, args.width, args.context, tuple(args.heads), args.dtype, device, args.rounds)
    result = {
        **head("attention"),
        "device": name,
        "parameters": parameters,
        "rows": rows,
    }
    print(json.dumps(result))
    return int(any(row.get("is_right") is False for row in rows))


def compare(
    batches: Sequence[int],
    widths: Sequence[int],
    contexts: Sequence[int],
    heads: tuple[int, int, int],
    dtype: str,
    device: torch.device,
    rounds: int,
) -> list[dict[str, Any]]:
    """One row for each problem and candidate: microseconds, bytes a second and error, or why it did not run."""
    found = []
    for batch in batches:
        for context in contexts:
            for width in widths:
                problem = Problem.random(batch, width, context, heads, DTYPES[dtype], device)
                expected = reference(problem)
                for name, prepare in CANDIDATES.items():
                    row = {"batch": batch, "context": context, "T": width, "candidate": name}
                    row |= _measure(problem, prepare, expected, MOST_ERROR[dtype], rounds)
                    found.append(row)
                    print(_line(row), flush=True)
    return found


@torch.inference_mode()
def _measure(problem: Problem, prepare: Any, expected: torch.Tensor, most_error: float, rounds: int) -> dict[str, Any]:
    try:
        attend: Attend = prepare(problem)
        error = float((attend().float() - expected).norm() / expected.norm())
        device = problem.query.device
        seconds, is_recorded = _time(attend, device, rounds)
        cold = _time_cold(attend, device, rounds) if device.type == "cuda" else seconds
    except NotHereError as reason:
        return {"absent": str(reason)}
    except Exception as failure:  # another library's affair: it is reported, not mended
        return {"absent": f"{type(failure).__name__}: {(str(failure).strip() or '-').splitlines()[0][:160]}"}
    return {
        "us_p50": round(seconds * 1e6, 2),
        "us_cold_p50": round(cold * 1e6, 2),
        "bytes_per_s": round(problem.moved_bytes / cold),
        "recorded": is_recorded,
        "relative_error": float(f"{error:.2g}"),
        "is_right": error <= most_error,
    }


def _time_cold(attend: Attend, device: torch.device, rounds: int) -> float:
    """Seconds of one call that finds other numbers in the device's cache than its own."""
    others = torch.zeros(_FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def flush() -> torch.Tensor:
        return others.add_(1)

    def both() -> torch.Tensor:
        flush()
        return attend()

    return max(1e-9, _time(both, device, rounds)[0] - _time(flush, device, rounds)[0])


def _time(attend: Attend, device: torch.device, rounds: int) -> tuple[float, bool]:
    """Seconds of one call, the median of ``rounds``, and whether it was repeated as a graph."""

    def calls() -> None:
        for _ in range(_CALLS):
            attend()

    run, is_recorded = calls, False
    if device.type == "cuda":
        from ssd.model.steps.graphs import CudaGraphs

        try:
            run, is_recorded = CudaGraphs(device)(calls), True
        except Exception:
            torch.cuda.synchronize(device)
    seconds = []
    for _ in range(rounds + 1):
        _synchronize(device)
        began = time.perf_counter()
        run()
        _synchronize(device)
        seconds.append((time.perf_counter() - began) / _CALLS)
    return median(seconds[1:]), is_recorded


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _line(row: dict[str, Any]) -> str:
    head = f"batch {row['batch']:>3} context {row['context']:>6} T {row['T']:>3} {row['candidate']:<18}"
    if "absent" in row:
        return f"{head} - {row['absent']}"
    notes = ("" if row["recorded"] else ", launched from Python") + ("" if row["is_right"] else ", WRONG")
    speed = f"{row['us_p50']:>10.1f} us {row['us_cold_p50']:>8.1f} us cold {row['bytes_per_s'] / 1e9:>8.1f} GB/s"
    return f"{head} {speed}, error {row['relative_error']:.1e}{notes}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--batch", type=int, nargs="+", default=[1, 8, 32], metavar="B", help="rows (default: 1 8 32)")
    add("--width", type=int, nargs="+", default=[1, 4, 16, 64], metavar="T", help="new positions (default: 1 4 16 64)")
    add("--context", type=int, nargs="+", default=[1024, 8192], metavar="L", help="longest row (default: 1024 8192)")
    add("--heads", type=_heads, default=[32, 8, 128], metavar="H,Hkv,D", help="(default: 32,8,128, as an 8B Llama)")
    add("--dtype", default=None, choices=tuple(DTYPES), help="(default: bfloat16 on CUDA, else float32)")
    add("--rounds", type=int, default=20)
    add("--json", action="store_true", help="accepted for symmetry: the JSON line is always the last")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    if min(*args.batch, *args.width, *args.context, args.rounds) < 1:
        parser.error("--batch, --width, --context and --rounds take numbers from 1")
    return args


def _heads(text: str) -> list[int]:
    heads = [int(part) for part in text.split(",")]
    if len(heads) != 3 or min(heads) < 1 or heads[0] % heads[1]:
        raise argparse.ArgumentTypeError(f"three numbers, the first a multiple of the second, got {text!r}")
    return heads
