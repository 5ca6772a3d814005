"""Where does a step's time go, and what waits for what?

``python -m benchmarks.profile [MODEL] [--shape tiny|1b|8b] [--batch B...] [--draft K...] [--context L] [--traces DIR]``

Steps of the engine under torch's profiler, plain ones (a draft of 0) and such as verify K tokens a row: the device's
time by groups of kernels, its gaps between launches, its waits for the host; the host's time by parts of a step, and
its waits for the device. On a CPU, where model and engine are one after another, operators by groups and what is
outside of them. The profiler slows the host down: the step's time without it stands beside. Prints a table; the last
line of stdout is one JSON object. With --traces also, of each batch and draft, a trace for a browser.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from benchmarks.decode.shapes import SHAPES, random_model
from benchmarks.decode.steps import Shape, Tokens, passes_of
from benchmarks.environment import head, model_facts, model_name
from benchmarks.models import add_model
from benchmarks.profile.recording import profile_steps
from benchmarks.workloads import snippets
from ssd.model.loading.load_target import load_model, open_target
from ssd.text.codec import TextCodec


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    args = _parse(argv)
    parameters = {name: getattr(args, name) for name in ("batch", "draft", "context", "rounds", "profiled", "shape")}
    name = f"random weights, shape {args.shape}" if args.shape else model_name(args.model)
    print(f"profile: {name}, {json.dumps(parameters)}")
    if args.shape:
        model = random_model(args.shape, dtype=args.dtype, device=args.device, speaks=True)
        texts = None
    else:
        model = load_model(args.model, dtype=args.dtype, device=args.device)
        codec = TextCodec.load(str(args.model))
        texts = [token for snippet in snippets(0) for token in codec.encode_prompt(snippet)]
    facts = model_facts(name, model)
    found = profiles(model, texts, args.batch, args.draft, args.context, args.rounds, args.profiled, args.traces)
    result = {**head("profile"), **facts, "parameters": parameters, **found}
    line = json.dumps(result)
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return 0


def profiles(
    model: PreTrainedModel,
    texts: Sequence[int] | None,
    batches: Sequence[int],
    drafts: Sequence[int],
    context: int,
    rounds: int,
    profiled: int,
    traces: Path | None,
) -> dict[str, Any]:
    """How passes are run, and a row for each batch and draft. texts : tokens of prompts; None for random ones."""
    width = max(drafts) + 1
    target = open_target(
        model,
        num_slots=max(batches),
        max_length=context + (rounds + profiled + 8) * width + 8,
        max_draft_tokens=max(1, *drafts),
        keeps_top=True,
    )
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
    rows = []
    for batch in batches:
        for draft in drafts:
            shape = Shape(batch, context, draft)
            trace = None if traces is None else traces / f"trace-b{batch}-t{shape.width}.json.gz"
            prompts = _prompts(texts, target.vocab_size, batch, max(8, context - shape.width * rounds // 2))
            rows.append(profile_steps(target, prompts, shape, rounds, profiled, trace))
            print(table(rows[-1]), flush=True)
    return {"passes": passes_of(target), "rows": rows}


def table(row: dict[str, Any]) -> str:
    """A row, for people."""
    lines = [
        f"batch {row['batch']}, {row['T']} positions a row: step {row['unprofiled_step_ms_p50']:.3f} ms, "
        f"{row['step_ms']:.3f} under the profiler"
    ]
    if "device_busy_ms" in row:
        lines.append(
            f"  device: busy {row['device_busy_ms']:.3f} in {row['kernels']:.0f} kernels, between launches "
            f"{row['launch_gaps_ms']:.3f}, waits for the host {row['waits_for_host_ms']:.3f}; "
            f"host waits for the device {row['host_waits_ms']:.3f}"
        )
    else:
        lines.append(f"  operators {row['operators_ms']:.3f}, outside of them {row['outside_operators_ms']:.3f}")
    for title, key in (("groups", "groups_ms"), ("parts of a step", "phases_ms")):
        lines.append(f"  {title}: " + ", ".join(f"{name} {ms:.3f}" for name, ms in row[key].items()))
    return "\n".join(lines)


def _prompts(texts: Sequence[int] | None, vocab_size: int, num: int, length: int) -> list[Tokens]:
    if texts is None:
        random = np.random.default_rng(0)
        return [random.integers(3, vocab_size, length).astype(np.int32) for _ in range(num)]
    tokens = np.resize(np.array(texts, np.int32), num * length)
    return list(tokens.reshape(num, length))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add_model(parser)
    add("--shape", choices=tuple(SHAPES), help="random weights of a Llama of this shape in place of a model")
    add("--batch", type=int, nargs="+", default=[1, 8], metavar="B", help="rows (default: 1 8)")
    add("--draft", type=int, nargs="+", default=[0, 15], metavar="K", help="drafted tokens; 0 is plain (default: 0 15)")
    add("--context", type=int, default=512, help="tokens a row holds (default: %(default)s)")
    add("--rounds", type=int, default=16, help="steps timed without the profiler (default: %(default)s)")
    add("--profiled", type=int, default=4, help="steps under the profiler (default: %(default)s)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--device", default="auto")
    add("--traces", type=Path, default=None, metavar="DIR", help="directory for a trace of each batch and draft")
    add("--out", type=Path, default=None, help="also write the JSON line to this file")
    args = parser.parse_args(argv)
    if min(*args.batch, args.context, args.rounds, args.profiled) < 1 or min(args.draft) < 0:
        parser.error("--batch, --context, --rounds and --profiled take numbers from 1, --draft from 0")
    return args
