"""What a recorded stretch of steps says: who worked, who waited for whom, and on what."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

Interval = tuple[float, float]
"""Begin and end, microseconds."""

PHASES: Final = ("verify", "commit", "admit", "prefill", "propose", "forward", "spell")
"""Parts of a step of the engine, in the order of one that computes beside the host."""

STEP: Final = "step"

_GROUPS: Final = (
    ("attention", re.compile(r"attend|combine_splits|attention|flash|fmha", re.I)),
    ("matrix products", re.compile(r"gemm|gemv|cutlass|nvjet|splitk|matmul|::linear|::addmm|::mm|mkldnn|onednn", re.I)),
    ("choice of tokens", re.compile(r"argmax|topk|sort|sampl|noisy|radix|logsumexp|softmax", re.I)),
    ("copies", re.compile(r"memcpy|memset|::copy_|::_to_copy|catarray|::cat", re.I)),
    ("norms, rotations, sums", re.compile(r"elementwise|vectorized|reduce|norm|index|scatter|gather|rope|silu", re.I)),
)
_ON_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_WAITS: Final = re.compile(r"Synchronize|^cudaMemcpy$|cudaStreamWait|cudaMemcpyAsync")
_MOST_LAUNCH_GAP_US: Final = 12.0
"""Longer ones are waits for the host: between kernels of one recorded step there are a few microseconds at most."""
_NAMED: Final = 12


@dataclass(frozen=True, slots=True)
class Event:
    """``kind`` : the category of the trace. ``thread`` : where it ran; of events on the device, the stream."""

    kind: str
    name: str
    begin: float
    end: float
    thread: str


def read_events(trace: dict[str, Any]) -> list[Event]:
    """The events with a duration of a trace in Chrome's format, by their begin."""
    found = [
        Event(
            str(event.get("cat", "")),
            str(event["name"]),
            float(event["ts"]),
            float(event["ts"]) + float(event["dur"]),
            f"{event.get('pid')}/{event.get('tid')}",
        )
        for event in trace.get("traceEvents", ())
        if event.get("ph") == "X" and "dur" in event
    ]
    return sorted(found, key=lambda event: (event.begin, -event.end))


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Milliseconds a step: the device's work by groups and its gaps, the host's phases, its operators and its waits.

    Without a device the groups are those of the host's operators, each without those that it calls, and what is left
    of a step is Python and compiled loops that are no operators.
    """
    steps = [event for event in events if event.kind == "user_annotation" and event.name == STEP]
    if not steps:
        raise ValueError(f"the trace has no {STEP!r}")
    begin, end, number = steps[0].begin, max(step.end for step in steps), len(steps)

    def per_step(microseconds: float) -> float:
        return round(microseconds / 1e3 / number, 4)

    host = [event for event in events if begin <= event.begin <= end]
    on_device = [event for event in events if event.kind in _ON_DEVICE and event.end > begin and event.begin < end]
    found: dict[str, Any] = {"steps": number, "step_ms": per_step(end - begin)}
    found["phases_ms"] = {
        phase: per_step(sum(e.end - e.begin for e in host if e.kind == "user_annotation" and e.name == phase))
        for phase in PHASES
    }
    if on_device:
        busy = union((max(begin, e.begin), min(end, e.end)) for e in on_device)
        gaps = [after[0] - before[1] for before, after in pairwise(busy)]
        ends = (busy[0][0] - begin) + (end - busy[-1][1])
        found |= {
            "device_busy_ms": per_step(length(busy)),
            "launch_gaps_ms": per_step(sum(gap for gap in gaps if gap <= _MOST_LAUNCH_GAP_US)),
            "waits_for_host_ms": per_step(ends + sum(gap for gap in gaps if gap > _MOST_LAUNCH_GAP_US)),
            "kernels": round(len(on_device) / number, 1),
            "host_waits_ms": per_step(
                length(union((e.begin, e.end) for e in host if e.kind.startswith("cuda") and _WAITS.search(e.name)))
            ),
            **_groups(((e.name, e.end - e.begin) for e in on_device), per_step),
        }
    else:
        own = list(own_times([event for event in host if event.kind == "cpu_op"]))
        in_operators = sum(microseconds for _, microseconds in own)
        found |= {
            "operators_ms": per_step(in_operators),
            "outside_operators_ms": per_step(end - begin - in_operators),
            **_groups(own, per_step),
        }
    return found


def own_times(events: Iterable[Event]) -> Iterable[tuple[str, float]]:
    """Of each event its name and its microseconds without those of the events inside it, on its thread."""
    by_thread: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_thread[event.thread].append(event)
    for of_thread in by_thread.values():
        stack: list[tuple[Event, list[float]]] = []
        for event in sorted(of_thread, key=lambda each: (each.begin, -each.end)):
            while stack and stack[-1][0].end <= event.begin:
                done, inside = stack.pop()
                yield done.name, done.end - done.begin - sum(inside)
            if stack:
                stack[-1][1].append(event.end - event.begin)
            stack.append((event, []))
        for done, inside in stack:
            yield done.name, done.end - done.begin - sum(inside)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points of time as intervals that do not touch, in their order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Of intervals that do not touch."""
    return sum(end - begin for begin, end in intervals)


def group_of(name: str) -> str:
    """What a kernel or an operator does."""
    return next((group for group, pattern in _GROUPS if pattern.search(name)), "others")


def _groups(times: Iterable[tuple[str, float]], per_step: Any) -> dict[str, Any]:
    groups: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for name, microseconds in times:
        groups[group_of(name)] += microseconds
        names[name] += microseconds
    longest = sorted(names.items(), key=lambda item: -item[1])[:_NAMED]
    return {
        "groups_ms": {name: per_step(us) for name, us in sorted(groups.items(), key=lambda item: -item[1])},
        "longest_ms": {name[:100]: per_step(us) for name, us in longest},
    }
