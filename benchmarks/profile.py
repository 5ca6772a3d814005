"""Profile engine steps with the PyTorch profiler: the time of kernels by groups, and the waits of device and host."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.steps import DRAFTING, PARTS, synchronize

STEP: Final = "step"
_GROUPS: Final = (
    ("attention", re.compile(r"attend|combine_splits|attention|flash|fmha", re.I)),
    (
        "matrix products",
        re.compile(r"_product|gemm|gemv|cutlass|nvjet|splitk|matmul|::linear|::addmm|::mm|mkldnn|onednn", re.I),
    ),
    ("choice of tokens", re.compile(r"argmax|topk|sort|sampl|noisy|radix|logsumexp|softmax", re.I)),
    ("copies", re.compile(r"memcpy|memset|::copy_|::_to_copy|catarray|::cat", re.I)),
    ("norms, rotations, sums", re.compile(r"elementwise|vectorized|reduce|norm|index|scatter|gather|rope|silu", re.I)),
)
_WAITS: Final = re.compile(r"Synchronize|^cudaMemcpy$|cudaStreamWait|cudaMemcpyAsync")
_NAMED: Final = 12
_ANNOTATED: Final = (STEP, *PARTS, DRAFTING)
"""The names that this program gives to ranges of a step. The profiler also reports each of them as a device event,
which is not a kernel: it lasts from the first to the last kernel launched in the range."""


def profiled(step: Callable[[], object], number: int, device: torch.device, trace: Path | None) -> dict[str, Any]:
    """Profile ``number`` calls of ``step`` and return the `summary`; write a trace to the file ``trace`` if given."""
    synchronize(device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        for _ in range(number):
            with record_function(STEP):
                step()
        synchronize(device)
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    events = [each for each in profiler.events() or () if each.device_type != DeviceType.CPU]
    busy = [(each.time_range.start, each.time_range.end) for each in events if each.name not in _ANNOTATED]
    found = summary(profiler.key_averages(), busy, number)
    if device.type == "cuda" and "device_busy_ms" not in found:
        found["unseen"] = "the profiler was told of no kernel: what follows is the host's alone"
    return found


def summary(averages: Iterable[Any], busy: Iterable[tuple[float, float]], number: int) -> dict[str, Any]:
    """Return milliseconds per step: device time by groups of kernels, the parts of a step, its operators and its waits.

    On a CPU, the groups contain operators, and the rest of a step is Python and compiled loops that are not operators.
    On a GPU, the groups may sum to more than the busy time, because a kernel launched before the previous one ended
    counts its waiting time.

    Args:
        averages: The profiler's averages by name.
        busy: Start and end of each kernel on the device, in microseconds.
        number: The number of profiled steps.
    """
    annotated: dict[str, float] = dict.fromkeys(_ANNOTATED, 0.0)
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
        covered = _covered(busy)
        found["device_busy_ms"] = per_step(covered)
        found["waits_for_host_ms"] = per_step(max(0.0, whole - covered))
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


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    covered, until = 0.0, float("-inf")
    for began, ended in sorted(intervals):
        covered += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return covered


def _longest(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])
