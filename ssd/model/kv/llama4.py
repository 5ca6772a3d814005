"""What Llama 4's layers do not tell an attention function."""

from __future__ import annotations

from typing import Any

import torch


def chunk_size(module: torch.nn.Module) -> int | None:
    """Chunk of a layer with chunked attention, where the model has any."""
    config: Any = getattr(module, "config", None)
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    if chunk is None:
        return None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return None
    return chunk if layer_types[module.layer_idx] == "chunked_attention" else None


def needs_temperature(module: Any) -> bool:
    """Whether the layer scales its queries by their position."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def temperature_ratio(module: Any, positions: torch.Tensor) -> torch.Tensor:
    """What queries at ``positions``, int64[B, T], still need to be scaled by, float32[B, 1, T, 1].

    The layer counts positions from the length of transformers' cache, of which there is none here: it has scaled them
    as positions 0..T-1. The scale is 1 + attn_scale * log(1 + floor((position + 1) / floor_scale)), after Nakanishi
    2025 (Scalable-Softmax).
    """
    taken = torch.arange(positions.shape[1], device=positions.device)
    return (_temperature(module, positions) / _temperature(module, taken))[:, None, :, None]


def _temperature(module: Any, positions: torch.Tensor) -> torch.Tensor:
    scale: torch.Tensor = (
        torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    )
    return scale
