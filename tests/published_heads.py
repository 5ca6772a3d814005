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


def norm(size: int, seed: int) -> torch.Tensor:
    """Weights of a norm."""
    return random(size, seed=seed) + 1.0


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


def mtp_parts(*, has_norm: bool = True) -> dict[str, torch.Tensor]:
    """A module's tensors but for the layer's."""
    parts = {"embedding": norm(HIDDEN, 1), "hidden": norm(HIDDEN, 2), "project": random(HIDDEN, 2 * HIDDEN, seed=3)}
    return {**parts, "norm": norm(HIDDEN, 4)} if has_norm else parts


def medusa(num_heads: int, num_layers: int) -> dict[str, torch.Tensor]:
    """Blocks and output layers, as FasterDecoding names them."""
    found = {}
    for head in range(num_heads):
        for block in range(num_layers):
            seed = 100 + 10 * head + block
            found[f"{head}.{block}.linear.weight"] = random(HIDDEN, HIDDEN, seed=seed)
            found[f"{head}.{block}.linear.bias"] = random(HIDDEN, seed=seed + 1000)
        found[f"{head}.{num_layers}.weight"] = random(VOCAB, HIDDEN, seed=500 + head)
    return found


def _layer(at: str, width: int) -> dict[str, torch.Tensor]:
    """Of 4 heads of 16, 2 of keys and values, 96 between; ``width`` : what its attention reads."""
    shapes = {
        "self_attn.q_proj": (64, width),
        "self_attn.k_proj": (32, width),
        "self_attn.v_proj": (32, width),
        "self_attn.o_proj": (HIDDEN, 64),
        "mlp.gate_proj": (96, HIDDEN),
        "mlp.up_proj": (96, HIDDEN),
        "mlp.down_proj": (HIDDEN, 96),
    }
    found = {f"{at}{name}.weight": random(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items(), 10)}
    return {**found, f"{at}post_attention_layernorm.weight": norm(HIDDEN, 32)}


def eagle(*, bias: bool = True, qkv_bias: bool = False) -> dict[str, torch.Tensor]:
    """EAGLE's first head."""
    found = {"fc.weight": random(HIDDEN, 2 * HIDDEN, seed=20), **_layer("layers.0.", HIDDEN)}
    if bias:
        found["fc.bias"] = random(HIDDEN, seed=21)
    for seed, name in enumerate("qkv" if qkv_bias else ""):
        found[f"layers.0.self_attn.{name}_proj.bias"] = random(64 if name == "q" else 32, seed=40 + seed)
    return found


DRAFTED = torch.arange(7, 7 + 2 * 80, 2)
"""The target's ids of the 80 tokens that EAGLE-3's head drafts."""


def eagle3_tensors(prefix: str) -> dict[str, torch.Tensor]:
    """As a checkpoint has them; ``prefix`` : of the head's own layer."""
    return {
        "fc.weight": random(HIDDEN, 3 * HIDDEN, seed=1),
        "norm.weight": norm(HIDDEN, 2),
        "lm_head.weight": random(len(DRAFTED), HIDDEN, seed=3),
        "d2t": DRAFTED - torch.arange(len(DRAFTED)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, DRAFTED, True),
        f"{prefix}hidden_norm.weight": norm(HIDDEN, 30),
        f"{prefix}input_layernorm.weight": norm(HIDDEN, 31),
        **_layer(prefix, 2 * HIDDEN),
    }


def eagle3(directory: Path, changes: Mapping[str, torch.Tensor | None] | None = None, **config: Any) -> Path:
    """The EAGLE repository's layout, as SpecForge and SGLang have it. ``changes`` : of tensors; None: not there."""
    tensors = {**eagle3_tensors("midlayer."), **(changes or {})}
    there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return write(directory, {**EAGLE_SHAPE, "draft_vocab_size": len(DRAFTED), **config}, there)


def speculators(directory: Path, more: Mapping[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """The speculators format."""
    said = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": EAGLE_SHAPE,
        "draft_vocab_size": len(DRAFTED),
        "norm_before_residual": False,
        "target_hidden_size": None,
        **config,
    }
    return write(directory, said, {**eagle3_tensors("layers.0."), **(more or {})})


EAGLE_SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
}
