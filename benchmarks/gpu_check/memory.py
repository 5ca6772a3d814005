"""The device's memory: what is held, and how it is let go."""

from __future__ import annotations

import gc

import torch


def let_go(device: torch.device) -> None:
    """Give back what nothing refers to any more: a target and its recorded steps refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_memory(device: torch.device) -> dict[str, int]:
    """Bytes: held by tensors, taken from the device by torch, in use on the device by anyone. Zeros on a CPU."""
    if device.type != "cuda":
        return {"allocated": 0, "reserved": 0, "in_use": 0}
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "in_use": total - free,
    }
