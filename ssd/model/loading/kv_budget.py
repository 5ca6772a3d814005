"""How much memory the KV cache may take, and how many slots of which length that is."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import NamedTuple

import torch

from ssd.errors import ModelError

MEMORY_SHARE = 0.5
"""Share of the free memory that the KV cache may take; the rest is for activations and for the retrieval cache."""

_USEFUL_LENGTH = 2048
"""A context that nobody asked for is not shortened below this for the sake of more slots."""

_MOUNT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_CGROUP_FILES = {"v2": ("memory.max", "memory.current"), "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes")}


class _Group(NamedTuple):
    """A control group's limit, and what it leaves of it, in bytes."""

    limit: int
    room: int


class Slots(NamedTuple):
    """What fits: how many slots, of how many tokens each. ``shortage`` : what was given up and how to change it."""

    num_slots: int
    max_length: int
    shortage: str | None = None


def fit_slots(
    *, num_slots: int, max_length: int | None, limit: int, extra: int, bytes_per_token: int, usable_bytes: int
) -> Slots:
    """Slots that ``usable_bytes`` hold.

    num_slots : most that are wanted. max_length : tokens a slot must hold; None takes ``limit``, or less where memory
    lacks: first slots get shorter, down to 2,048 tokens, then they get fewer. extra : tokens of a slot beyond its
    length. Fewer slots only mean that more requests wait; memory for all of them is taken once, so that nothing runs
    out of it later. Raises ModelError when not even one slot fits.
    """
    room = usable_bytes // max(1, bytes_per_token)  # tokens
    wanted = max_length or limit
    if num_slots * (wanted + extra) <= room:
        return Slots(num_slots, wanted)
    needed = (
        f"{num_slots} sequences of {wanted} tokens need {num_slots * (wanted + extra) * bytes_per_token / 1e9:.1f} GB "
        f"of KV cache, but {room * bytes_per_token / 1e9:.1f} GB may be used"
    )
    length = wanted
    if max_length is None:
        length = max(min(limit, _USEFUL_LENGTH), min(wanted, room // num_slots - extra))
    fitting = min(num_slots, room // (length + extra))
    if fitting < 1:
        longest = room - extra
        lower = f"Lower --max-model-len to at most {longest}" if longest > 1 else "Free memory"
        raise ModelError(f"{needed}: not even one fits. {lower}, or choose a smaller model or dtype")
    advice = (
        "lower --max-num-seqs for longer ones" if fitting == num_slots else "lower --max-model-len for more at once"
    )
    return Slots(fitting, length, f"{needed}: serving {fitting} of {length} tokens; {advice}")


def usable_bytes(device: torch.device, utilization: float | None = None) -> int:
    """Bytes that the KV cache may take: ``MEMORY_SHARE`` of what is free, or what leaves ``utilization`` of all in use.

    Raises ModelError where more than that is in use already.
    """
    free = free_bytes(device)
    if utilization is None:
        return int(free * MEMORY_SHARE)
    total = total_bytes(device)
    usable = int(total * utilization) - max(0, total - free)
    if usable <= 0:
        raise ModelError(
            f"{max(0, total - free) / 1e9:.1f} of {total / 1e9:.1f} GB of {device} are in use already, more than "
            f"--gpu-memory-utilization {utilization} allows: raise it, or free memory"
        )
    return usable


def free_bytes(device: torch.device) -> int:
    """Bytes that may still be allocated: of the device, or of main memory within the limits of our control group."""
    if device.type == "cuda":
        gc.collect()  # an earlier model may refer to itself
        torch.cuda.empty_cache()  # what torch keeps of it, and of layers that were replaced, for itself
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free = _memory_bytes(Path("/proc/meminfo"), "MemAvailable")
    room = cgroup_room(_MOUNT, _MEMBERSHIP)
    return free if room is None else min(free, room)


def total_bytes(device: torch.device) -> int:
    """All memory of the device, or main memory, or what our control group may have of it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total, free = (_memory_bytes(Path("/proc/meminfo"), name) for name in ("MemTotal", "MemAvailable"))
    group = _tightest_group(_MOUNT, _MEMBERSHIP)
    return total if group is None or group.room >= free else group.limit


def cgroup_room(mount: Path, membership: Path) -> int | None:
    """Bytes that the control groups of this process leave it, the tightest of them; None where none sets a limit.

    mount : where control groups are mounted. membership : /proc/self/cgroup, lines "id:controllers:path"; version 2
    has one with no controllers. Memory that only caches files counts as free, as the kernel gives it back.
    """
    group = _tightest_group(mount, membership)
    return None if group is None else group.room


def _tightest_group(mount: Path, membership: Path) -> _Group | None:
    groups = []
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, files = mount, _CGROUP_FILES["v2"]
        elif "memory" in controllers.split(","):
            base, files = mount / "memory", _CGROUP_FILES["v1"]
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container the path may be the host's, which is not mounted here; then the mount is our own group.
        for directory in (group, *group.parents):
            if (found := _group(directory, *files)) is not None:
                groups.append(found)
            if directory == base:
                break
    return min(groups, key=lambda group: group.room, default=None)


def _group(directory: Path, limit_name: str, usage_name: str) -> _Group | None:
    limit, usage = _lines(directory / limit_name), _lines(directory / usage_name)
    if not limit or not usage or not limit[0].isdecimal():  # no such group, or "max"
        return None
    statistics = dict(line.split() for line in _lines(directory / "memory.stat"))
    caching = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    return _Group(int(limit[0]), max(0, int(limit[0]) - int(usage[0]) + caching))


def _memory_bytes(meminfo: Path, name: str) -> int:
    """A line of /proc/meminfo; what is available is what the system can still give without swapping."""
    for line in _lines(meminfo):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ModelError(f"{meminfo} has no {name} line: this system does not say how much memory there is")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
