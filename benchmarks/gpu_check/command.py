"""Everything that only a GPU can show, in one run of at most ten minutes; needs none of the web packages.

``python -m benchmarks.gpu_check [MODEL] [--device cuda] [--parts PART...] [--minutes M] [--out DIR]``

- passes: the small model by plain passes, static shapes, CUDA graphs, with and without our attention kernel: logits and
  greedy text against plain passes, what warming up takes, the time of a pass at batch 1, 4, 16, T = 1 to 65, and of one
  whose tokens are sampled inside and outside.
- attention: our kernel and other attentions against float32, and their times (`benchmarks.attention`).
- decode: steps of the engine over random weights in the shape of an 8B Llama, context 1024, draft 0 and 15, with graphs
  without, and with fused layers (`benchmarks.decode`).
- exactness: float32 greedy against ``model.generate`` and sampling against no speculation, every pair of drafter, draft
  limit and batch size; bfloat16: how often a token differs (published, not asserted).
- growth: a stream with repeats, speculation on and off in turn.

A part that fails does not stop the next; none begins after the minutes are over. Ends stdout with one JSON line, and
with an error status where a part failed. ``--device cpu`` runs the same for a look at the script itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import benchmarks.decode
from benchmarks.attention.command import compare
from benchmarks.environment import device_name, head, model_name
from benchmarks.gpu_check.engine import exactness, growth
from benchmarks.gpu_check.passes import passes
from ssd.bundled import MODEL_PATH


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 where a part failed."""
    args = _parse(argv)
    name = device_name(torch.device(args.device))
    print(f"gpu_check: {model_name(args.model)} on {name}; {', '.join(args.parts)}; at most {args.minutes} minutes")
    result: dict[str, Any] = {
        **head("gpu_check"),
        "device": name,
        "parameters": {
            key: getattr(args, key)
            for key in ("parts", "batch", "width", "prompts", "max_tokens", "requests", "rounds")
        },
    }
    began = time.perf_counter()
    for part in args.parts:
        part_began = time.perf_counter()
        if part_began - began > 60 * args.minutes:
            result[part] = {"skipped": f"{args.minutes} minutes were over"}
            print(f"== {part}: skipped")
            continue
        print(f"== {part}", flush=True)
        try:
            result[part] = PARTS[part](args)
        except Exception as failure:  # the next parts may still tell something
            traceback.print_exc()
            result[part] = {"passed": False, "failure": f"{type(failure).__name__}: {failure}"}
        result[part]["seconds"] = round(time.perf_counter() - part_began, 1)
        line = json.dumps(result)
        if args.out:  # after every part: what is known is not lost
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "gpu_check.json").write_text(line + "\n")
    failed = [part for part in args.parts if not _passed(result[part])]
    if failed:
        print(f"failed: {', '.join(failed)}")
    print(json.dumps(result))
    return int(bool(failed))


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """A few shapes, in the type that models are served in, and in float32."""
    device = torch.device(args.device)
    contexts = [1024, 8192] if device.type == "cuda" else [64]
    rows = compare([1, 8], [1, 16], contexts, (32, 8, 128), args.attention_dtype, device, args.rounds)
    exact = compare([3], [5], [300], (8, 2, 64), "float32", device, 2)
    return {
        "passed": all(row.get("is_right", True) for row in [*rows, *exact] if row["candidate"] == "ours"),
        "rows": rows,
        "float32": exact,
    }


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """The same steps with graphs, without, and with fused layers."""
    sizes = ["--batch", "1", "--context", str(args.decode_context), "--draft", "0", "15", "--rounds", str(args.rounds)]
    base = ["--shape", args.decode_shape, "--device", args.device, "--no-baselines", *sizes]
    found: dict[str, Any] = {"passed": True}
    ways = {"graphs": [], "enforce_eager": ["--enforce-eager"], "fused": ["--fuse-linears"]}
    for name, options in ways.items():
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
            out = Path(directory) / "decode.json"
            found["passed"] &= benchmarks.decode.main([*base, *options, "--out", str(out)]) == 0
            found[name] = json.loads(out.read_text())
        for row in found[name]["rows"]:
            print(f"decode {args.decode_shape} {name} T {row['T']}: step {row['step_ms_p50']} ms, "
                  f"bare forward {row['forward_ms_p50']} ms, {row['bytes_per_s'] / 1e9:.0f} GB/s")  # fmt: skip
    return found


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "passes": passes,
    "attention": attention,
    "decode": decode,
    "exactness": exactness,
    "growth": growth,
}


def _passed(part: dict[str, Any]) -> bool:
    """A part, and every part of it that says so."""
    inner = [value for value in part.values() if isinstance(value, dict)]
    return part.get("passed", True) and all(value.get("passed", True) for value in inner)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("model", nargs="?", default=MODEL_PATH, help="Hugging Face directory or id (default: bundled)")
    add("--device", default="cuda")
    add("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="(default: all, in this order)")
    add("--minutes", type=float, default=8.0, help="no part begins later (default: %(default)s)")
    add("--prompts", type=int, default=64, help="of the exactness check (default: %(default)s)")
    add("--max-tokens", type=int, default=48, help="of its outputs (default: %(default)s)")
    add("--requests", type=int, default=96, help="of the growth stream (default: %(default)s)")
    add("--rounds", type=int, default=20, help="timed passes of each shape (default: %(default)s)")
    add("--batch", type=int, nargs="+", default=[1, 4, 16], metavar="B", help="rows of timed passes")
    add("--width", type=int, nargs="+", default=[1, 2, 5, 9, 17, 65], metavar="T", help="positions of each")
    add("--decode-shape", choices=tuple(benchmarks.decode.SHAPES), default="8b")
    add("--decode-context", type=int, default=1024)
    add("--attention-dtype", default=None, choices=("float32", "bfloat16", "float16"))
    add("--out", type=Path, default=None, help="directory for gpu_check.json")
    args = parser.parse_args(argv)
    args.attention_dtype = args.attention_dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return args
