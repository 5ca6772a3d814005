"""What our speculator for vLLM's V2 runner costs a step, on hand-made states. ``python -m benchmarks.vllm.host``

No vLLM is needed. 64 and 256 rows; three of four requests say again what was said before, with every 25th token
changed. For each number of steps that the device is late: processor time of the host in a step, how often what a step
gave had not arrived (nothing waits for it: one that waited would have waited that often), how many tokens a row got in
a step. The device's own part runs on the CPU here and is timed apart. Prints a table; the last line of stdout is one
JSON object.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.run import ENGINE, Option, Run
from benchmarks.vllm.states import HandMadeRunner, LateEvent, Scripted, vllm_config
from ssd.bundled import MODEL_PATH
from ssd.integrations.vllm_v2 import Speculator

_LENGTH, _PROMPT, _OUTPUT, _KINDS = 1024, 128, 128, 24


OPTIONS: dict[str, Any] = {
    "rows": [64, 256],
    "late": Option(default=[0, 1, 2], least=0, help="steps that the device is ahead"),
    "width": Option(default=5, help="tokens of a draft"),
    "steps": 300,
    "seed": 0,
}
UNDER = (*ENGINE, "ssd/integrations")
COLUMNS = (
    (">rows", "{rows}"), (">late", "{late}"), (">host us", "{host_us_p50:.0f}"), (">p95", "{host_us_p95:.0f}"),
    (">us a row", "{host_us_per_row:.2f}"), (">device part us", "{device_part_us_p50:.0f}"),
    (">not arrived", "{not_arrived:.2f}"), (">tokens per step", "{tokens_per_step:.2f}"),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    run = Run("vllm_host", __doc__, argv, OPTIONS, COLUMNS, under=UNDER, program="vllm.host")
    torch.set_num_threads(1)
    for count in run.args.rows:
        for late in run.args.late:
            run.row(measure(count, late, run.args))
    return run.end(results=run.rows)


def measure(count: int, late: int, args: argparse.Namespace) -> dict[str, Any]:
    """One number of rows and one lateness."""
    random = np.random.default_rng(args.seed)
    kinds = random.integers(1, 4096, (_KINDS, _PROMPT + _LENGTH)).tolist()
    runner = HandMadeRunner(max_num_reqs=count, max_model_len=_LENGTH, width=args.width, lag=late)
    config = vllm_config(str(MODEL_PATH), width=args.width, max_num_reqs=count, max_model_len=_LENGTH, vocab_size=4096)
    runner.speculator = speculator = Speculator(config, torch.device("cpu"), runner.states, lambda: LateEvent(runner))
    whole, device = _timed(speculator, "propose"), _timed(speculator, "_choose")
    packing = _timed(speculator, "_pack")
    names: list[str] = []
    for step in range(args.steps):
        over = [name for name in names if len(runner.requests[name].said) >= _OUTPUT]
        if over:
            runner.end(over)
        names = [name for name in names if name not in over]
        coming: dict[str, Scripted] = {}
        while len(names) + len(coming) < count and len(coming) < max(4, count // 16):
            changed = np.array(kinds[int(random.integers(_KINDS))])
            is_new = random.random(len(changed)) < (0.04 if random.random() < 0.75 else 1.0)
            changed[is_new] = random.integers(1, 4096, is_new.sum())
            tokens = changed.tolist()
            coming[f"{step}-{len(coming)}"] = Scripted(tokens[:_PROMPT], tokens[_PROMPT:], _OUTPUT)
        if coming:
            runner.begin(coming)
            names += coming
        runner.step(names)
    skip = args.steps // 4
    on_device = [a + b for a, b in zip(device[skip:], packing[skip:], strict=True)]
    host = [a - b for a, b in zip(whole[skip:], on_device, strict=True)]
    stats = speculator.stats()
    speculator.close()
    return {
        "rows": count, "late": late, "host_us_p50": round(median(host), 1),
        "host_us_p95": round(float(np.quantile(host, 0.95)), 1), "host_us_per_row": round(median(host) / count, 3),
        "device_part_us_p50": round(median(on_device), 1),
        "not_arrived": round(speculator.num_behind / speculator.num_steps, 3),
        "tokens_per_step": round(runner.num_said / runner.num_row_steps, 3), "failures": stats.num_failures,
    }  # fmt: skip


def _timed(speculator: Speculator, name: str) -> list[float]:
    """Microseconds of processor time of every call, from now on."""
    method, took = getattr(speculator, name), []

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time_ns()
        result = method(*args, **kwargs)
        took.append(1e-3 * (time.thread_time_ns() - start))
        return result

    setattr(speculator, name, timed)
    return took


if __name__ == "__main__":
    sys.exit(main())
