"""How much memory weights and the KV cache take and may take, and how many slots of which length that is."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ssd.errors import ModelError
from ssd.model.layers.packed_linear import packed_linears

MEMORY_SHARE = 0.5
"""Share of the free memory that the KV cache may take; the rest is for activations and for the retrieval cache."""

_USEFUL_LENGTH = 2048
"""A context that nobody asked for is not shortened below this for the sake of more slots."""

_MOUNT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class Group(NamedTuple):
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
    length. Raises ModelError when not even one slot fits.
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
    group = tightest_group(_MOUNT, _MEMBERSHIP)
    return free if group is None else min(free, group.room)


def total_bytes(device: torch.device) -> int:
    """All memory of the device, or main memory, or what our control group may have of it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total, free = (_memory_bytes(Path("/proc/meminfo"), name) for name in ("MemTotal", "MemAvailable"))
    group = tightest_group(_MOUNT, _MEMBERSHIP)
    return total if group is None or group.room >= free else group.limit


def tightest_group(mount: Path, membership: Path) -> Group | None:
    """Of the control groups of this process that which leaves it least; None where none sets a limit.

    mount : where control groups of version 2 are mounted. membership : /proc/self/cgroup. Memory that only caches files
    counts as free, as the kernel gives it back.
    """
    path = next((line.removeprefix("0::/") for line in _lines(membership) if line.startswith("0::/")), None)
    if path is None:
        return None
    groups = []
    # Inside a container the path may be the host's, which is not mounted here; then the mount is our own group.
    for directory in (mount / path, *(mount / path).parents):
        limit, usage = _lines(directory / "memory.max"), _lines(directory / "memory.current")
        if limit and usage and limit[0].isdecimal():  # there is such a group, and it does not say "max"
            statistics = dict(line.split() for line in _lines(directory / "memory.stat"))
            used = int(usage[0]) - int(statistics.get("inactive_file", 0))
            groups.append(Group(int(limit[0]), max(0, int(limit[0]) - used)))
        if directory == mount:
            break
    return min(groups, key=lambda group: group.room, default=None)


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


ADVICE = (
    "choose a smaller dtype, a quantised checkpoint or a smaller model; one model over several GPUs is vLLM's work, "
    "where ssd.integrations.vllm drafts from the same cache"
)


def check_weights_fit(
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Raise ModelError if the weights alone need more memory than ``device`` has free, before any is read.

    dtype : "auto" is the configuration's. Builds the model without memory for its weights; seconds for large ones.
    """
    held = config.dtype if dtype == "auto" else dtype
    size = (held if isinstance(held, torch.dtype) else torch.float32).itemsize
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    needed = sum(weight.numel() for weight in model.parameters()) * size
    free = free_bytes(device)
    if needed > free:
        raise ModelError(
            f"model {name!r} needs {needed / 1e9:.1f} GB for its weights, {device} has {free / 1e9:.1f} GB free: "
            f"{ADVICE}"
        )


def weight_bytes(model: PreTrainedModel) -> int:
    """What a model's weights take now; memory that several of them share counts once. O(its layers)."""
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    plain = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return int(sum(plain.values())) + sum(layer.num_bytes for layer in packed_linears(model))


log = logging.getLogger(__name__)

_NAMED = 3


def require_complete(name: str, info: Mapping[str, Any]) -> None:
    """Raise ModelError where the checkpoint lacks weights, or has others' shapes; warn of weights without a place.

    ``info`` : the loading info of ``from_pretrained``, in which tied weights are not missing.
    """
    missing, mismatched, unexpected = (
        info.get(f"{kind}_keys") or () for kind in ("missing", "mismatched", "unexpected")
    )
    advice = "the files do not belong together, or some are not there. Download the model again"
    if mismatched:
        key, found, wanted = min(mismatched)
        raise ModelError(
            f"model {name!r}: {len(mismatched)} weights have other shapes than its config.json says, {key} "
            f"{tuple(found)} instead of {tuple(wanted)} among them: {advice}"
        )
    if missing:
        raise ModelError(
            f"model {name!r} lacks {len(missing)} of the weights that its config.json asks for, "
            f"{_some(missing)}: {advice}"
        )
    if unexpected:
        log.warning(
            "model %r has no place for %d weights of its checkpoint, %s: is this its config.json?",
            name, len(unexpected), _some(unexpected),
        )  # fmt: skip


def _some(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")
