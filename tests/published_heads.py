"""Directories of draft heads with random weights, written as they are published; nothing of the loader is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.models import tiny_model

HIDDEN, VOCAB = 64, 300


def random(*shape: int, seed: int, scale: float = 0.1) -> torch.Tensor:
    """Normal numbers that are the same for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def norm(size: int, seed: int, *, one_more: bool = False) -> torch.Tensor:
    """Weights of a norm; ``one_more`` : kept less one."""
    return random(size, seed=seed) + (0.0 if one_more else 1.0)


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """A directory with both, made where it is not there."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def one_layer(name: str, scratch: Path, **changes: Any) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A model with a layer more than a target of this kind, and that layer's tensors as transformers publishes them."""
    owner = tiny_model(name, num_hidden_layers=3, **changes)
    for place, tensor in enumerate(owner.state_dict().values()):
        if tensor.ndim == 1:  # norms and biases, which begin as ones and zeros
            tensor.add_(random(len(tensor), seed=place))
    owner.set_attn_implementation("eager")
    owner.save_pretrained(scratch)
    tensors = load_file(scratch / "model.safetensors")
    prefix = "model.layers.2."
    return owner, {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def mtp_parts(*, one_more: bool = False, has_norm: bool = True) -> dict[str, torch.Tensor]:
    """A module's tensors but for the layer's."""
    parts = {
        "embedding": norm(HIDDEN, 1, one_more=one_more),
        "hidden": norm(HIDDEN, 2, one_more=one_more),
        "project": random(HIDDEN, 2 * HIDDEN, seed=3),
    }
    return {**parts, "norm": norm(HIDDEN, 4, one_more=one_more)} if has_norm else parts


def medusa(num_heads: int, num_layers: int, *, bias: bool = True) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Blocks as "{head}.{block}.weight" and ".bias", and output layers."""
    blocks = {}
    for head in range(num_heads):
        for block in range(num_layers):
            seed = 100 + 10 * head + block
            blocks[f"{head}.{block}.weight"] = random(HIDDEN, HIDDEN, seed=seed)
            if bias:
                blocks[f"{head}.{block}.bias"] = random(HIDDEN, seed=seed + 1000)
    return blocks, [random(VOCAB, HIDDEN, seed=500 + head) for head in range(num_heads)]


def eagle(layers: int = 1, *, bias: bool = True, qkv_bias: bool = False) -> dict[str, torch.Tensor]:
    """EAGLE's first head: 4 heads of 16, 2 of keys and values, 96 between."""
    found = {"fc.weight": random(HIDDEN, 2 * HIDDEN, seed=20)}
    if bias:
        found["fc.bias"] = random(HIDDEN, seed=21)
    for index in range(layers):
        seed, at = 30 + 20 * index, f"layers.{index}."
        for place, (name, rows, columns) in enumerate([
            ("self_attn.q_proj", 64, 64), ("self_attn.k_proj", 32, 64), ("self_attn.v_proj", 32, 64),
            ("self_attn.o_proj", 64, 64), ("mlp.gate_proj", 96, 64), ("mlp.up_proj", 96, 64),
            ("mlp.down_proj", 64, 96),
        ]):  # fmt: skip
            found[f"{at}{name}.weight"] = random(rows, columns, seed=seed + place)
            if qkv_bias and place < 3:
                found[f"{at}{name}.bias"] = random(rows, seed=seed + place + 10)
        found[at + "post_attention_layernorm.weight"] = norm(HIDDEN, seed + 8)
        if index:
            found[at + "input_layernorm.weight"] = norm(HIDDEN, seed + 9)
    return found


EAGLE_SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN, "vocab_size": VOCAB, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 128, "hidden_act": "silu",
}  # fmt: skip
