"""Tiny models with random weights, one of each architecture that the tests cover."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 300

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

SLOT_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 6},
    "gemma2": {"head_dim": 16, "sliding_window": 6},
    "gemma3_text": {"head_dim": 16, "sliding_window": 6},
    "phi3": {},
    "mixtral": _EXPERTS,
    "gpt_oss": {**_EXPERTS, "head_dim": 16, "sliding_window": 6},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_neox": {},
    "llama4_text": {
        "head_dim": 16,
        "num_local_experts": 2,
        "attention_chunk_size": 6,
        "intermediate_size_mlp": 96,
    },
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
}

ROW_ARCHITECTURES: dict[str, dict[str, Any]] = {"stablelm": {}, "falcon": {}, "bloom": {"n_layer": 2, "n_head": 4}}

RECURRENT_ARCHITECTURES: dict[str, dict[str, Any]] = {"mamba": {}}


def tiny_model(architecture: str = "llama", **changes: Any) -> PreTrainedModel:
    """A model of a few thousand weights whose next-token scores are spread out, so that near-ties are rare."""
    known = {**SLOT_ARCHITECTURES, **ROW_ARCHITECTURES, **RECURRENT_ARCHITECTURES}
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**_COMMON, **known[architecture], **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.5)
    return model
