"""Slow twins of draft heads: whole sequences, masks written out, no cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

Weights = dict[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation."""
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def mtp(
    owner: PreTrainedModel,
    index: int,
    parts: Weights,
    embedded: torch.Tensor,
    features: torch.Tensor,
    *,
    hidden_first: bool,
) -> torch.Tensor:
    """The next features that a module says, [1, T, H].

    owner : a model whose layer ``index`` is the module's, driven by transformers' own attention. parts : weights of the
    norms "embedding", "hidden" and "norm", and of "project".
    """
    config = owner.config.get_text_config()
    eps = getattr(config, "rms_norm_eps", 1e-6)
    normed = [rms(features, parts["hidden"], eps), rms(embedded, parts["embedding"], eps)]
    both = torch.cat(normed if hidden_first else normed[::-1], dim=-1)
    length = embedded.shape[1]
    positions = torch.arange(length)[None]
    decoder: Any = owner.get_decoder()
    x = both @ parts["project"].T
    out = decoder.layers[index](
        x,
        position_embeddings=decoder.rotary_emb(x, positions),
        position_ids=positions,
        attention_mask=torch.full((1, 1, length, length), -torch.inf).triu(1),
    )
    out = out[0] if isinstance(out, tuple) else out
    return rms(out, parts["norm"], eps) if "norm" in parts else out


def medusa(
    blocks: Sequence[Sequence[Sequence[torch.Tensor]]],
    outputs: Sequence[torch.Tensor],
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Logits [heads, V] of one hidden state, [H]: weights and biases of blocks by head and block, output layers."""
    logits = []
    for block, output in zip(blocks, outputs, strict=True):
        x = hidden
        for weight, bias in block:
            y = weight @ x + bias
            x = x + y * torch.sigmoid(y)
        logits.append(output @ x)
    return torch.stack(logits)


def eagle(weights: Weights, shape: dict[str, Any], embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The next hidden states, [T, H], of EAGLE's first head with names as its repository writes them.

    shape : num_attention_heads, num_key_value_heads, rope_theta, rms_norm_eps. embedded, features : [T, H].
    """
    dim, at = features.shape[1] // shape["num_attention_heads"], "layers.0."
    x = torch.cat([embedded, features], -1) @ weights["fc.weight"].T
    if "fc.bias" in weights:
        x = x + weights["fc.bias"]
    q, k, v = (_project(x, weights, at + f"self_attn.{name}_proj") for name in "qkv")
    x = x + _attended(q, k, v, dim, shape["rope_theta"]) @ weights[at + "self_attn.o_proj.weight"].T
    normed = rms(x, weights[at + "post_attention_layernorm.weight"], shape["rms_norm_eps"])
    return x + _fed_forward(normed, weights, at)


def eagle3(
    weights: Weights,
    shape: dict[str, Any],
    embedded: torch.Tensor,
    features: torch.Tensor,
    *,
    norm_before_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits over the drafted vocabulary, [T, Vd], and outgoing features, [T, H], of EAGLE-3's head.

    shape : as for `eagle`. embedded, features : [T, H].
    """
    at, eps = "midlayer.", shape["rms_norm_eps"]
    normed = rms(features, weights[at + "hidden_norm.weight"], eps)
    both = torch.cat([rms(embedded, weights[at + "input_layernorm.weight"], eps), normed], -1)
    q, k, v = (_project(both, weights, at + f"self_attn.{name}_proj") for name in "qkv")
    mixed = _attended(q, k, v, q.shape[1] // shape["num_attention_heads"], shape["rope_theta"])
    x = (normed if norm_before_residual else features) + mixed @ weights[at + "self_attn.o_proj.weight"].T
    x = x + _fed_forward(rms(x, weights[at + "post_attention_layernorm.weight"], eps), weights, at)
    return rms(x, weights["norm.weight"], eps) @ weights["lm_head.weight"].T, x


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dim: int, theta: float) -> torch.Tensor:
    """Causal attention, one position and one head of ``dim`` numbers at a time: [T, heads * dim]."""
    length, heads, groups = len(q), q.shape[1] // dim, k.shape[1] // dim
    mixed = torch.zeros(length, heads, dim)
    for head in range(heads):
        of_group = slice(head * groups // heads * dim, (head * groups // heads + 1) * dim)
        for place in range(length):
            query = _turn(q[place, head * dim : head * dim + dim], place, theta)
            keys = torch.stack([_turn(k[other, of_group], other, theta) for other in range(place + 1)])
            chances = torch.softmax(keys @ query / math.sqrt(dim), 0)
            mixed[place, head] = chances @ v[: place + 1, of_group]
    return mixed.reshape(length, -1)


def _fed_forward(x: torch.Tensor, weights: Weights, at: str) -> torch.Tensor:
    gate, up = (x @ weights[at + f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (nn.functional.silu(gate) * up) @ weights[at + "mlp.down_proj.weight"].T


def _project(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    out = x @ weights[name + ".weight"].T
    return out + weights[name + ".bias"] if name + ".bias" in weights else out


def _turn(x: torch.Tensor, place: int, theta: float) -> torch.Tensor:
    """Pairs of numbers half the dimension apart, each turned by its angle."""
    half = len(x) // 2
    out = x.clone()
    for pair in range(half):
        angle = place * theta ** (-2 * pair / len(x))
        out[pair] = x[pair] * math.cos(angle) - x[pair + half] * math.sin(angle)
        out[pair + half] = x[pair + half] * math.cos(angle) + x[pair] * math.sin(angle)
    return out
