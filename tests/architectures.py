"""The architectures that are tested, one line each, and the table of the documentation made from them.

``python -m tests.architectures`` prints the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING

from ssd.model.layers.hidden_states import FINAL
from ssd.model.runners.sequential_runner import CheckpointRunner, FullContextRunner, RecurrentRunner, SequentialRunner
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.target import Target

COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Tied embeddings of random weights repeat the last token for ever, whatever the layers do.
    "tie_word_embeddings": False,
}

SLOTS, ROWS, REPLAY, SINGLE, WHOLE = SlotRunner, SequentialRunner, CheckpointRunner, RecurrentRunner, FullContextRunner

_HEAD = {"head_dim": 16}
_WINDOW = {"head_dim": 16, "sliding_window": 6}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MANY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """``model_type`` as in config.json; ``settings`` go on top of `COMMON`; ``kind`` is how it must be driven."""

    name: str
    model_type: str
    kind: type[Target] = SLOTS
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def config_class(self) -> str:
        """The class of the configuration in transformers."""
        name: str = CONFIG_MAPPING[self.model_type].__name__
        return name


_ALL = [
    Architecture("Llama", "llama"),
    Architecture("Mistral (sliding window)", "mistral", SLOTS, {"sliding_window": 6}),
    Architecture("Mixtral", "mixtral", SLOTS, _EXPERTS),
    Architecture("Ministral", "ministral3", SLOTS, _HEAD),
    Architecture("Qwen2", "qwen2"),
    Architecture("Qwen2-MoE", "qwen2_moe", SLOTS, {**_MANY_EXPERTS, "shared_expert_intermediate_size": 32}),
    Architecture("Qwen3", "qwen3", SLOTS, _HEAD),
    Architecture("Qwen3-MoE", "qwen3_moe", SLOTS, {**_HEAD, **_MANY_EXPERTS}),
    Architecture("Gemma", "gemma", SLOTS, _HEAD),
    Architecture("Gemma 2 (soft caps)", "gemma2", SLOTS, _WINDOW),
    Architecture("Gemma 3", "gemma3_text", SLOTS, _WINDOW),
    Architecture(
        "Gemma 3n (shared keys)",
        "gemma3n_text",
        SLOTS,
        {
            **_WINDOW,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 300,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "intermediate_size": [96] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    Architecture("Phi", "phi"),
    Architecture("Phi-3", "phi3"),
    Architecture("Phi-3.5-MoE", "phimoe", SLOTS, _EXPERTS),
    Architecture("GPT-2", "gpt2", SLOTS, _GPT2),
    Architecture("GPT-BigCode", "gpt_bigcode", SLOTS, _GPT2),
    Architecture("GPT-NeoX", "gpt_neox"),
    Architecture("GPT-J", "gptj", ROWS, {**_GPT2, "rotary_dim": 8}),
    Architecture(
        "GPT-Neo",
        "gpt_neo",
        ROWS,
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    ),
    Architecture("OPT", "opt", SLOTS, {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Architecture("BLOOM (ALiBi)", "bloom", ROWS, {"n_layer": 2, "n_head": 4}),
    Architecture("MPT (ALiBi)", "mpt", ROWS, {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
    Architecture("Falcon (rotary)", "falcon", ROWS),
    Architecture("Falcon (ALiBi)", "falcon", ROWS, {"alibi": True}),
    Architecture("StableLM", "stablelm", ROWS),
    Architecture("StarCoder2", "starcoder2", SLOTS, {"sliding_window": 6}),
    Architecture("OLMo", "olmo"),
    Architecture("OLMo 2", "olmo2"),
    Architecture("OLMo 3", "olmo3", SLOTS, {**_WINDOW, **_ALTERNATING}),
    Architecture("OLMoE", "olmoe", SLOTS, {"num_experts": 4, "num_experts_per_tok": 2}),
    Architecture("Cohere", "cohere"),
    Architecture("Cohere 2", "cohere2", SLOTS, _WINDOW),
    Architecture("DeepSeek-V2", "deepseek_v2", SLOTS, {**_LATENT, **_ROUTED}),
    Architecture("DeepSeek-V3 (latent attention)", "deepseek_v3", SLOTS, {**_LATENT, **_ROUTED}),
    Architecture("MiniCPM3", "minicpm3", SLOTS, _LATENT),
    Architecture("GLM", "glm", SLOTS, _HEAD),
    Architecture("GLM-4", "glm4", SLOTS, _HEAD),
    Architecture("GLM-4-MoE", "glm4_moe", SLOTS, {**_HEAD, **_ROUTED}),
    Architecture("Granite", "granite"),
    Architecture("Granite-MoE", "granitemoe", SLOTS, _EXPERTS),
    Architecture("SmolLM3", "smollm3"),
    Architecture("gpt-oss (sinks)", "gpt_oss", SLOTS, {**_EXPERTS, **_WINDOW}),
    Architecture(
        "Llama 4 (chunks, temperature)",
        "llama4_text",
        SLOTS,
        {
            **_HEAD,
            "num_local_experts": 2,
            "attention_chunk_size": 6,
            "intermediate_size_mlp": 96,
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
        },
    ),
    Architecture("Nemotron", "nemotron", ROWS),
    Architecture("EXAONE 4", "exaone4", SLOTS, {**_WINDOW, **_ALTERNATING}),
    Architecture("ERNIE 4.5", "ernie4_5", SLOTS, _HEAD),
    Architecture("Hunyuan", "hunyuan_v1_dense", SLOTS, _HEAD),
    Architecture("Seed-OSS", "seed_oss", SLOTS, _HEAD),
    Architecture("Mamba", "mamba", SINGLE),
    Architecture(
        "Mamba-2", "mamba2", REPLAY, {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8}
    ),
    Architecture("Falcon-Mamba", "falcon_mamba", SINGLE),
    Architecture(
        "Jamba",
        "jamba",
        SINGLE,
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    Architecture("Bamba", "bamba", REPLAY, {**_MAMBA2, "attn_layer_indices": [1]}),
    Architecture("Falcon-H1", "falcon_h1", REPLAY, {**_MAMBA2, "mamba_d_ssm": 128, "head_dim": 16}),
    Architecture(
        "Zamba 2",
        "zamba2",
        REPLAY,
        {
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 16,
            "mamba_headdim": 16,
            "mamba_expand": 2,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "chunk_size": 8,
            "num_mem_blocks": 1,
        },
    ),
    Architecture(
        "Granite 4 hybrid",
        "granitemoehybrid",
        REPLAY,
        {**_MAMBA2, **_EXPERTS, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
    ),
    Architecture(
        "Qwen3-Next", "qwen3_next", REPLAY, {**_HEAD, **_MANY_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32}
    ),
    Architecture("Qwen3.5", "qwen3_5_text", REPLAY, {**_HEAD, **_DELTA}),
    Architecture("LFM2", "lfm2", REPLAY, {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    Architecture(
        "MiniMax",
        "minimax",
        SINGLE,
        {**_HEAD, **_EXPERTS, "block_size": 8, "layer_types": ["linear_attention", "full_attention"]},
    ),
    Architecture(
        "RecurrentGemma",
        "recurrent_gemma",
        WHOLE,
        {"attention_window_size": 6, "lru_width": 64, "block_types": ["recurrent", "attention"], **_HEAD},
    ),
]

ARCHITECTURES = {architecture.name: architecture for architecture in _ALL}


UNTAPPED: dict[str, tuple[tuple[int, ...], str]] = {
    "Gemma 3n (shared keys)": ((FINAL,), "its hidden states have 4 dimensions, not 3"),
    "MiniCPM3": ((0, 1), "the output of its layers is changed before the output layer reads it"),
}
"""Architectures with slots where a draft head cannot read every hidden state: what it can read, and why no more."""


def table() -> Iterator[str]:
    """Lines of a Markdown table: which architectures each model runner serves, and how many."""
    yield "| runner | architectures | speculation | draft heads |"
    yield "|---|---|---|---|"
    for kind in (SLOTS, ROWS, REPLAY, SINGLE, WHOLE):
        found = sorted((each.name for each in _ALL if each.kind is kind), key=str.lower)
        drafts = "yes" if kind.can_roll_back else "no"
        heads = "no"
        if kind is SLOTS:
            heads = "yes; " + "; ".join(
                f"{name} {'only' if layers == (FINAL,) else 'but not'} behind the final norm: {reason}"
                for name, (layers, reason) in UNTAPPED.items()
            )
        yield f"| {kind.backend} | {len(found)}: {', '.join(found)} | {drafts} | {heads} |"


if __name__ == "__main__":
    print("\n".join(table()))
