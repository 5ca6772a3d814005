"""One attention function for all Hugging Face models, which reads and writes the slot KV cache.

The name under which it is registered has no mask function, so transformers builds no mask. The model is called with
``use_cache=False``, explicit ``position_ids`` and ``slot_rows=``, which its layers pass on to this function.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ssd.model.kv.kv_cache import AttentionKernel, AttentionRules, Pair, SlotRows

ATTENTION_NAME = "ssd_slots"

# The attention kernel for each type of device; other devices use torch's attention, unless a pass has its own kernel.
# `ssd.model.cpu.cpu_attention` adds its own.
KERNELS: Final[dict[str, AttentionKernel]] = {}


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
    """Compute attention of T new positions of B sequences over all positions in their KV cache slots.

    This is the attention function that transformers' layers call. ``query`` is [B, num_heads, T, head_dim]; ``key`` and
    ``value`` are those of the new positions, [B, num_kv_heads, T, ...]. The default of ``scaling`` is head_dim ** -0.5.
    With ``softcap``, scores become softcap * tanh(scores / softcap). ``s_aux`` are attention sinks, [num_heads]: logits
    that add to the softmax's denominator but have no value. Returns the output, [B, T, num_heads, value_dim], and None
    in place of the attention weights. Raises TypeError if a layer does not pass on ``slot_rows``, or passes an
    attention mask, because masks are derived only from position, window and chunk.
    """
    if slot_rows is None:
        raise TypeError("this model's layers do not pass slot_rows to the attention function")
    if attention_mask is not None:
        raise TypeError("this model's layers pass their own attention mask")
    layer: int = module.layer_idx  # type: ignore[assignment]
    chunk = chunk_size(module)
    slot_rows.kv_cache.reach[layer] = sliding_window if chunk is None else chunk
    if (ratio := temperature_ratio(module, slot_rows.positions)) is not None:
        query = query * ratio.to(query.dtype)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    stored = slot_rows.kv_cache.store(layer, slot_rows, key, value)
    return compute_attention(
        query, stored, slot_rows, AttentionRules(scale, sliding_window, chunk, softcap, s_aux)
    ), None


def compute_attention(query: torch.Tensor, stored: Pair, rows: SlotRows, rules: AttentionRules) -> torch.Tensor:
    """Return the attention output, [B, T, num_heads, value_dim], of ``query`` over a layer's KV cache.

    ``query`` is [B, num_heads, T, head_dim]. Uses the attention kernel that is set for the cache, for the forward pass
    or for the type of device, in this order, or else torch's attention.
    """
    kernel = rows.kv_cache.kernel or rows.kernel or KERNELS.get(query.device.type)
    if kernel is not None:
        return kernel(query, *stored, rows, rules)
    keys, values = map(rows.seen_of, stored)
    batch, heads, width, _dim = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    mask = rows.mask(rules.window, rules.chunk, groups, query.dtype)
    # The query heads of one key head are merged into the query axis, which avoids copies of keys and values.
    packed = query.reshape(batch, kv_heads, groups * width, query.shape[-1])
    if rules.softcap is None and rules.sinks is None:
        out = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=rules.scale)
    else:
        out = _explicit(packed, keys, values, mask, rules, groups, width)
    out = out.reshape(batch, heads, width, values.shape[-1])
    return out.transpose(1, 2).contiguous()


def _explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    rules: AttentionRules,
    groups: int,
    width: int,
) -> torch.Tensor:
    """Compute attention step by step, because torch's fused kernel supports neither soft caps nor attention sinks."""
    scale, _window, _chunk, softcap, s_aux = rules
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
    """Return the chunk size of a layer with chunked attention, as in Llama 4; None for other layers."""
    config: Any = getattr(module, "config", None)
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    layer_types = getattr(config, "layer_types", None)
    if chunk is None or layer_types is None or layer_types[module.layer_idx] != "chunked_attention":
        return None
    return chunk


def temperature_ratio(module: Any, positions: torch.Tensor) -> torch.Tensor | None:
    """Return a factor for a Llama 4 layer's queries that corrects its attention temperature, float32[B, 1, T, 1].

    Such a layer, if it has no rotary embeddings, scales its queries by 1 + attn_scale * log(1 + floor((position + 1) /
    floor_scale)), after Nakanishi 2025 (Scalable-Softmax). transformers' code takes the positions from its own KV
    cache, which is empty here, so it has scaled the T new tokens as if they were at positions 0 to T - 1. The factor
    replaces this scale by that of ``positions``, int64[B, T]. Returns None for other layers.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    taken = torch.arange(positions.shape[1], device=positions.device)
    return (_temperature(module, positions) / _temperature(module, taken))[:, None, :, None]


def _temperature(module: Any, positions: torch.Tensor) -> torch.Tensor:
    scale: torch.Tensor = (
        torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    )
    return scale
