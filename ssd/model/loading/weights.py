"""Whether a model's weights fit into a device's memory."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ssd.errors import ModelError
from ssd.model.loading.kv_budget import free_bytes

ADVICE = (
    "choose a smaller dtype, a quantised checkpoint or a smaller model; one model over several GPUs is vLLM's work, "
    "where ssd.integrations.vllm drafts from the same cache"
)


def check_weights_fit(name: str, config: PreTrainedConfig, dtype: torch.dtype | str, device: torch.device) -> None:
    """Raise ModelError if the weights alone need more memory than ``device`` has free, before any is read.

    dtype : "auto" is the configuration's. Builds the model without memory for its weights; seconds for large ones.
    """
    held = config.dtype if dtype == "auto" else dtype
    size = (held if isinstance(held, torch.dtype) else torch.float32).itemsize
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    needed = sum(weight.numel() for weight in model.parameters()) * size
    free = free_bytes(device)
    if needed > free:
        raise ModelError(
            f"model {name!r} needs {needed / 1e9:.1f} GB for its weights, {device} has {free / 1e9:.1f} GB free: "
            f"{ADVICE}"
        )
