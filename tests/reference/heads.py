"""Slow twins of draft heads: a whole sequence at once, one position and one attention head at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch


def eagle3_pass(
    weights: Mapping[str, torch.Tensor],
    embedded: torch.Tensor,
    features: torch.Tensor,
    earlier: Sequence[torch.Tensor],
    *,
    num_heads: int,
    rope_theta: float,
    eps: float,
    norm_before_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and outgoing features of the last of some positions, [Vd] and [H].

    embedded, features : [H] of the position itself. earlier : of each position before it, [2 H] the same two end to
    end. Positions count from 0.
    """

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + eps) * weights[name]

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        half = len(x) // 2
        out = x.clone()
        for i in range(half):
            angle = position * rope_theta ** (-2 * i / len(x))
            out[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
            out[half + i] = x[half + i] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    layer = "midlayer."
    pairs = [torch.chunk(pair, 2) for pair in earlier] + [(embedded, features)]
    both = [
        torch.cat([normed(e, layer + "input_layernorm.weight"), normed(f, layer + "hidden_norm.weight")])
        for e, f in pairs
    ]
    attention = layer + "self_attn."
    head_dim = len(weights[attention + "q_proj.weight"]) // num_heads
    num_kv_heads = len(weights[attention + "k_proj.weight"]) // head_dim
    mixed = []
    for head in range(num_heads):
        kv = head * num_kv_heads // num_heads
        query = (weights[attention + "q_proj.weight"] @ both[-1]).split(head_dim)[head]
        query = turned(query, len(both) - 1)
        keys = [(weights[attention + "k_proj.weight"] @ x).split(head_dim)[kv] for x in both]
        values = [(weights[attention + "v_proj.weight"] @ x).split(head_dim)[kv] for x in both]
        scores = [query @ turned(key, at) / math.sqrt(head_dim) for at, key in enumerate(keys)]
        shares = torch.softmax(torch.stack(scores), 0)
        mixed.append(sum((share * value for share, value in zip(shares, values, strict=True)), torch.zeros(head_dim)))
    residual = both[-1][len(features) :] if norm_before_residual else features
    out = residual + weights[attention + "o_proj.weight"] @ torch.cat(mixed)
    inner = normed(out, layer + "post_attention_layernorm.weight")
    gate = weights[layer + "mlp.gate_proj.weight"] @ inner
    up = weights[layer + "mlp.up_proj.weight"] @ inner
    out = out + weights[layer + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
    return weights["lm_head.weight"] @ normed(out, "norm.weight"), out
