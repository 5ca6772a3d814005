"""Where does a step's time go, and what waits for what?

``python -m benchmarks.profile [MODEL] [--shape tiny|1b|8b] [--batch B...] [--draft K...] [--context L] [--traces DIR]``

Steps of the engine under torch's profiler, plain ones (a draft of 0) and such as verify K tokens a row: the device's
time by groups of kernels and its waits for the host; the host's time by parts of a step, and its waits for the
device. On a CPU, where model and engine are one after another, operators by groups and what is
outside of them. The profiler slows the host down: the step's time without it stands beside, and that of each of its
parts. With ``--shape tiny`` nearly all but the launch is the host's own. Prints a table; the last line of stdout is one
JSON object. With --traces also, of each batch and draft, a trace for a browser.
"""

from __future__ import annotations

import re
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.run import Option, Run
from benchmarks.steps import (
    PARTS,
    KnownText,
    Rows,
    Shape,
    Tokens,
    at_once,
    passes_of,
    prompts_of,
    synchronize,
    texts_of,
    watch,
)
from ssd.config import CacheConfig, DraftConfig
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.engine import Engine
from ssd.model.loading.load_target import open_target
from ssd.model.target import Target
from ssd.retrieval.cache import CacheSet

STEP: Final = "step"
DRAFTING: Final = "drafting"
"""The drafter's own calls, within other parts."""

_GROUPS: Final = (
    ("attention", re.compile(r"attend|combine_splits|attention|flash|fmha", re.I)),
    ("matrix products", re.compile(r"gemm|gemv|cutlass|nvjet|splitk|matmul|::linear|::addmm|::mm|mkldnn|onednn", re.I)),
    ("choice of tokens", re.compile(r"argmax|topk|sort|sampl|noisy|radix|logsumexp|softmax", re.I)),
    ("copies", re.compile(r"memcpy|memset|::copy_|::_to_copy|catarray|::cat", re.I)),
    ("norms, rotations, sums", re.compile(r"elementwise|vectorized|reduce|norm|index|scatter|gather|rope|silu", re.I)),
)
_WAITS: Final = re.compile(r"Synchronize|^cudaMemcpy$|cudaStreamWait|cudaMemcpyAsync")
_NAMED: Final = 12
_UNTIMED_STEPS: Final = 6
"""The first ones record shapes and fill caches."""


def summary(averages: Iterable[Any], number: int) -> dict[str, Any]:
    """Milliseconds a step: the device's work by groups, the host's parts, its operators and its waits.

    averages : what the profiler says of each name over ``number`` steps. Without a device the groups are of operators,
    and what is left of a step is Python and compiled loops that are no operators.
    """
    annotated: dict[str, float] = dict.fromkeys((STEP, *PARTS, DRAFTING), 0.0)
    operators: dict[str, float] = {}
    kernels: dict[str, float] = {}
    num_kernels = 0
    for each in averages:
        if each.key in annotated:
            if each.device_type == DeviceType.CPU:
                annotated[each.key] = each.cpu_time_total
        elif each.device_type == DeviceType.CPU:
            operators[each.key] = each.self_cpu_time_total
        else:
            kernels[each.key] = each.self_device_time_total
            num_kernels += each.count

    def per_step(microseconds: float) -> float:
        return round(microseconds / 1e3 / number, 4)

    whole = annotated.pop(STEP)
    found: dict[str, Any] = {"steps": number, "step_ms": per_step(whole)}
    found["phases_ms"] = {part: per_step(us) for part, us in annotated.items()}
    if kernels:
        found["device_busy_ms"] = per_step(sum(kernels.values()))  # one stream, so no two at once
        found["waits_for_host_ms"] = per_step(max(0.0, whole - sum(kernels.values())))
        found["kernels"] = round(num_kernels / number, 1)
        found["host_waits_ms"] = per_step(sum(us for name, us in operators.items() if _WAITS.search(name)))
    else:
        found["operators_ms"] = per_step(sum(operators.values()))
        found["outside_operators_ms"] = per_step(whole - sum(operators.values()))
    times = kernels or operators
    groups: dict[str, float] = defaultdict(float)
    for name, us in times.items():
        groups[next((group for group, pattern in _GROUPS if pattern.search(name)), "others")] += us
    found["groups_ms"] = {name: per_step(us) for name, us in _longest(groups)}
    return {**found, "longest_ms": {name[:100]: per_step(us) for name, us in _longest(times)[:_NAMED]}}


def _longest(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])


class Clock:
    """Seconds of each part since it was cleared; parts are marked for the profiler too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def around(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        with record_function(part):
            yield
        self.seconds[part] += time.perf_counter() - began


class KnownDrafter(SuffixDrafter):
    """Looks up and judges as the default drafter does, then drafts what each request is known to say.

    So a step costs the host what it costs, and every pass has the width that is asked for.
    """

    def __init__(self, known: Sequence[Sequence[int]], draft: int) -> None:
        super().__init__()
        self._text = KnownText(known, draft)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """``draft`` tokens for each request."""
        super().propose(requests)
        return self._text.propose(requests)


def profile_steps(
    target: Target, prompts: Sequence[Tokens], shape: Shape, args: Namespace, trace: Path | None
) -> dict[str, Any]:
    """Of steps with that many rows and positions: milliseconds without the profiler, and what it saw of others.

    prompts : a row each; what is said of them is in the index where it is drafted. trace : where
    its trace goes, compressed where the name ends so.
    """
    num_tokens = (_UNTIMED_STEPS + args.rounds + args.profiled + 2) * shape.width
    random = np.random.default_rng(1)
    known = _said(target, prompts, num_tokens) if shape.draft else [[] for _ in prompts]
    with CacheSet(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        for _ in range(-(-args.index_tokens // 2048)):
            text = random.integers(3, target.vocab_size, 2048).astype(np.int32)
            caches.get("default").append(text, prompt_length=0)
        for prompt, said in zip(prompts, known, strict=True):
            caches.get("default").append(np.append(prompt, np.array(said, np.int32)), prompt_length=len(prompt))
        caches.flush()
        drafter = KnownDrafter(known, shape.draft)
        engine = Engine(
            target,
            drafter=drafter,
            caches=caches,
            config=at_once(target, prompts),
            # A step that only decodes asks its drafter too, and gets nothing.
            draft=DraftConfig(num_speculative_tokens=max(1, shape.draft)),
        )
        clock = Clock()
        watch(engine, PARTS, clock.around)
        watch(drafter, {DRAFTING: "propose"}, clock.around)
        watch(drafter, {DRAFTING: "observe_scores"}, clock.around)
        watch(drafter, {DRAFTING: "learn_scores"}, clock.around)
        rows = Rows(engine, prompts, num_tokens)
        rows.read_prompts()
        for _ in range(_UNTIMED_STEPS):
            rows.step()
        seconds = list[float]()
        clock.seconds.clear()
        for _ in range(args.rounds):
            began = time.perf_counter()
            rows.step()
            seconds.append(time.perf_counter() - began)
        parts = {part: clock.seconds[part] for part in (*PARTS, DRAFTING)}
        synchronize(target.device)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (target.device.type == "cuda")
        with profile(activities=activities) as profiler:
            for _ in range(args.profiled):
                with record_function(STEP):
                    rows.step()
            synchronize(target.device)
        while engine.has_work():
            for request in range(len(prompts)):
                engine.cancel(str(request))
            engine.step()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    found = summary(profiler.key_averages(), args.profiled)
    if target.device.type == "cuda" and "device_busy_ms" not in found:
        found["unseen"] = "the profiler was told of no kernel: what follows is the host's alone"
    return {
        "batch": shape.batch,
        "context": shape.context,
        "T": shape.width,
        "unprofiled_step_ms_p50": round(1e3 * median(seconds), 4),
        "unprofiled_parts_ms": {part: round(1e3 * taken / len(seconds), 4) for part, taken in parts.items()},
        "drafting_share": round(parts[DRAFTING] / sum(seconds), 4),
        **found,
    }


def _said(target: Target, prompts: Sequence[Tokens], num_tokens: int) -> list[list[int]]:
    engine = Engine(target, drafter=SuffixDrafter(), config=at_once(target, prompts),
                    draft=DraftConfig(num_speculative_tokens=0))  # fmt: skip
    return Rows(engine, prompts, num_tokens).finish()


OPTIONS: dict[str, Any] = {
    "batch": Option(default=[1, 8], metavar="B", help="rows"),
    "draft": Option(default=[0, 15], least=0, metavar="K", help="drafted tokens; 0 is plain"),
    "context": Option(default=512, help="tokens a row holds"),
    "rounds": Option(default=16, help="steps timed without the profiler"),
    "profiled": Option(default=4, help="steps under the profiler"),
    "index_tokens": Option(default=0, least=0, help="of other text that the index holds"),
    "traces": Option(default=None, kind=Path, metavar="DIR", help="for a trace of each batch and draft"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    run = Run("profile", __doc__, argv, OPTIONS, has_model=True, has_shapes=True, unsaid=("traces",))
    args = run.args
    codec, model = run.load(speaks=True)
    text, width = texts_of(codec), max(args.draft) + 1
    target = open_target(
        model,
        num_slots=max(args.batch),
        max_length=args.context + (args.rounds + args.profiled + 8) * width + 8,
        max_draft_tokens=max(1, *args.draft),
        keeps_top=True,
    )
    if args.traces is not None:
        args.traces.mkdir(parents=True, exist_ok=True)
    for batch, draft in product(args.batch, args.draft):
        shape = Shape(batch, args.context, draft)
        trace = None if args.traces is None else args.traces / f"trace-b{batch}-t{shape.width}.json.gz"
        prompts = prompts_of(text, batch, max(8, args.context - shape.width * args.rounds // 2))
        run.say(shown(run.row(profile_steps(target, prompts, shape, args, trace))))
    return run.end(passes=passes_of(target))


def shown(row: dict[str, Any]) -> str:
    """A row, for people."""
    lines = [
        f"batch {row['batch']}, {row['T']} positions a row: step {row['unprofiled_step_ms_p50']:.3f} ms, "
        f"{row['step_ms']:.3f} under the profiler; drafting takes {row['drafting_share']:.1%} of it"
    ]
    if "device_busy_ms" in row:
        lines.append(
            f"  device: busy {row['device_busy_ms']:.3f} in {row['kernels']:.0f} kernels, waits for the host "
            f"{row['waits_for_host_ms']:.3f}; host waits for the device {row['host_waits_ms']:.3f}"
        )
    else:
        lines.append(f"  operators {row['operators_ms']:.3f}, outside of them {row['outside_operators_ms']:.3f}")
    for title, key in (("groups", "groups_ms"), ("parts without the profiler", "unprofiled_parts_ms")):
        lines.append(f"  {title}: " + ", ".join(f"{name} {ms:.3f}" for name, ms in row[key].items()))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
