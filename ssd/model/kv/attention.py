"""One attention function for every Hugging Face model: reads and writes the slot KV cache.

Registered under a name without a mask entry, so that transformers builds no mask; the model is called with
``use_cache=False``, explicit ``position_ids`` and ``slot_rows=``, which its layers hand down to this function.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ssd.model.kv.cpu_attention import cpu_attention
from ssd.model.kv.kv_cache import AttentionKernel, SlotRows

ATTENTION_NAME = "ssd_slots"

KERNELS: Final[dict[str, AttentionKernel]] = {"cpu": cpu_attention}
"""What attends on a type of device unless the rows of a pass bring another; torch elsewhere."""


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slot_rows: SlotRows | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from T new positions of B rows to everything their slots hold.

    query : [B, num_heads, T, head_dim]; key, value : [B, num_kv_heads, T, head_dim], the new positions only.
    softcap : scores become softcap * tanh(scores / softcap). s_aux : [num_heads], a logit that takes weight but
    carries no value (attention sink). Returns [B, T, num_heads, value_dim]. Raises TypeError where a layer does not
    play along: it keeps the rows to itself, or masks more than position and window say.
    """
    if slot_rows is None:
        raise TypeError("this model's layers do not pass slot_rows to the attention function")
    if attention_mask is not None:
        raise TypeError("this model's layers bring a mask of their own")
    layer: int = module.layer_idx  # type: ignore[assignment]
    chunk = chunk_size(module)
    slot_rows.kv_cache.reach[layer] = sliding_window if chunk is None else chunk
    if needs_temperature(module):
        query = query * temperature_ratio(module, slot_rows.positions).to(query.dtype)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    kernel = slot_rows.kv_cache.kernel or slot_rows.kernel or KERNELS.get(query.device.type)
    if kernel is not None:
        stored = slot_rows.kv_cache.store(layer, slot_rows, key, value)
        rules: dict[str, Any] = {"window": sliding_window, "chunk": chunk, "softcap": softcap, "sinks": s_aux}
        return kernel(query, *stored, slot_rows, scale=scale, **rules), None
    keys, values = slot_rows.kv_cache.write(layer, slot_rows, key, value)
    batch, heads, width, _dim = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    mask = slot_rows.mask(sliding_window, chunk, groups, query.dtype)
    # The query heads of one key head go into the query axis: grouped heads without copying keys and values.
    packed = query.reshape(batch, kv_heads, groups * width, query.shape[-1])
    if softcap is None and s_aux is None:
        out = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    else:
        out = _explicit(packed, keys, values, mask, scale, softcap, s_aux, groups, width)
    out = out.reshape(batch, heads, width, values.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def _explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    groups: int,
    width: int,
) -> torch.Tensor:
    """Attention written out, for what the fused kernel lacks: soft caps and sinks."""
    scores = query @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if s_aux is not None:
        kv_heads = keys.shape[1]
        sink = s_aux.reshape(1, kv_heads, groups, 1).expand(len(query), -1, -1, width).reshape(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return weights.to(values.dtype) @ values


AttentionInterface.register(ATTENTION_NAME, slot_attention)


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
