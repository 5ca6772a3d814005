"""The memory of weights and KV cache, and the number and length of the KV cache slots that fit into memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ssd.errors import ModelError
from ssd.model.cpu.packed_linear import packed_linears

MEMORY_SHARE = 0.5
"""The share of free memory that the KV cache uses; the rest is left for activations and the retrieval cache."""

# Slots are shortened down to this context length in favour of more slots, unless a length was requested.
_USEFUL_LENGTH = 2048

_MOUNT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class ControlGroup(NamedTuple):
    """The memory limit of a Linux control group (cgroup) and the unused part of the limit, both in bytes."""

    limit: int
    available_bytes: int


class FittingSlots(NamedTuple):
    """The number of KV cache slots that fit into memory, and their length in tokens."""

    num_slots: int
    max_length: int
    shortage: str | None = None  # a message that names the necessary reduction and how to change it


def fit_slots(
    *, num_slots: int, max_length: int | None, limit: int, extra: int, bytes_per_token: int, usable_bytes: int
) -> FittingSlots:
    """Return how many KV cache slots fit into ``usable_bytes``; raises ModelError if not even one slot fits.

    A slot holds ``max_length`` tokens (if None: ``limit`` tokens) and ``extra`` more positions, e.g. for draft tokens.
    If not all slots fit and ``max_length`` is None, the slots are shortened first, but not below 2,048 tokens. Then
    their number is reduced.
    """
    room = usable_bytes // max(1, bytes_per_token)  # tokens
    wanted = max_length or limit
    if num_slots * (wanted + extra) <= room:
        return FittingSlots(num_slots, wanted)
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
        raise ModelError(
            f"{needed}: this memory is too small even for one sequence. {lower}, or choose a smaller model or dtype"
        )
    advice = (
        "lower --max-num-seqs for longer sequences"
        if fitting == num_slots
        else "lower --max-model-len for more sequences"
    )
    return FittingSlots(fitting, length, f"{needed}: serving {fitting} of {length} tokens; {advice}")


def usable_bytes(device: torch.device, utilization: float | None = None) -> int:
    """Return the number of bytes that the KV cache may use.

    With ``utilization``, this is ``utilization`` * total memory - memory in use; otherwise it is half of the free
    memory. Raises ModelError if ``utilization`` leaves no memory.
    """
    free = free_bytes(device)
    if utilization is None:
        return int(free * MEMORY_SHARE)
    total = total_bytes(device)
    usable = int(total * utilization) - max(0, total - free)
    if usable <= 0:
        raise ModelError(
            f"{max(0, total - free) / 1e9:.1f} of {total / 1e9:.1f} GB of {device} are already in use, more "
            f"than --gpu-memory-utilization {utilization} allows: raise this option, or free memory"
        )
    return usable


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of main memory within the limits of the process's control group."""
    if device.type == "cuda":
        gc.collect()  # an earlier model may refer to itself
        torch.cuda.empty_cache()  # torch caches memory of that model, and of replaced layers
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free = _memory_bytes(Path("/proc/meminfo"), "MemAvailable")
    group = tightest_group(_MOUNT, _MEMBERSHIP)
    return free if group is None else min(free, group.available_bytes)


def total_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU's memory, or of main memory within the limits of the process's control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total, free = (_memory_bytes(Path("/proc/meminfo"), name) for name in ("MemTotal", "MemAvailable"))
    group = tightest_group(_MOUNT, _MEMBERSHIP)
    return total if group is None or group.available_bytes >= free else group.limit


def tightest_group(mount: Path, membership: Path) -> ControlGroup | None:
    """Return the control group of this process with the least unused memory; None if no control group has a limit.

    Memory of the page cache counts as unused, because the kernel reclaims it. ``mount`` is the mount point of control
    groups version 2; ``membership`` is /proc/self/cgroup.
    """
    path = next((line.removeprefix("0::/") for line in _lines(membership) if line.startswith("0::/")), None)
    if path is None:
        return None
    groups = []
    # Inside a container the path may be the host's, which is not mounted here; then the mount is our own group.
    for directory in (mount / path, *(mount / path).parents):
        limit, usage = _lines(directory / "memory.max"), _lines(directory / "memory.current")
        if limit and usage and limit[0].isdecimal():  # the group exists and has a limit, not "max"
            statistics = dict(line.split() for line in _lines(directory / "memory.stat"))
            used = int(usage[0]) - int(statistics.get("inactive_file", 0))
            groups.append(ControlGroup(int(limit[0]), max(0, int(limit[0]) - used)))
        if directory == mount:
            break
    return min(groups, key=lambda group: group.available_bytes, default=None)


def _memory_bytes(meminfo: Path, name: str) -> int:
    for line in _lines(meminfo):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ModelError(f"{meminfo} has no {name} line: the amount of memory is unknown on this system")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


ADVICE = (
    "choose a smaller dtype, a quantised checkpoint or a smaller model; to split a model over several GPUs use vLLM, "
    "for which ssd.integrations.vllm drafts from the same cache"
)


def check_weights_fit(
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Raise ModelError if the weights alone need more memory than ``device`` has free, before any weight is read.

    The model is built without memory for its weights, which takes seconds for large models. ``name`` is the model's
    name in the error message; the dtype "auto" means the dtype that the configuration declares.
    """
    weight_dtype = config.dtype if dtype == "auto" else dtype
    size = (weight_dtype if isinstance(weight_dtype, torch.dtype) else torch.float32).itemsize
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
    """Return the memory of a model's weights in bytes; memory that several weights share counts once. O(layers)."""
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    plain = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return int(sum(plain.values())) + sum(layer.num_bytes for layer in packed_linears(model))


log = logging.getLogger(__name__)

_NAMED = 3


def require_complete(name: str, info: Mapping[str, Any]) -> None:
    """Raise ModelError if a checkpoint lacks weights or their shapes do not fit config.json; warn of unused weights.

    ``info`` is the loading info of ``from_pretrained``, which does not list tied weights as missing.
    """
    missing, mismatched, unexpected = (
        info.get(f"{kind}_keys") or () for kind in ("missing", "mismatched", "unexpected")
    )
    advice = "the files do not belong together, or some are missing. Download the model again"
    if mismatched:
        key, found, wanted = min(mismatched)
        raise ModelError(
            f"model {name!r}: {len(mismatched)} weights have other shapes than its config.json says, e.g. "
            f"{key} {tuple(found)} instead of {tuple(wanted)}: {advice}"
        )
    if missing:
        raise ModelError(
            f"model {name!r} lacks {len(missing)} of the weights that its config.json requires, "
            f"{_some(missing)}: {advice}"
        )
    if unexpected:
        log.warning(
            "model %r does not use %d weights of its checkpoint, %s: check that config.json belongs to this checkpoint",
            name,
            len(unexpected),
            _some(unexpected),
        )


def _some(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")
