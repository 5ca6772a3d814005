"""Models to time: a directory's, or random weights in the shape of a Llama."""

from __future__ import annotations

from copy import deepcopy

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from ssd.model.loading.load_target import DTYPES

SHAPES = {
    "tiny": LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    ),
    "1b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    ),
    "8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
    ),
}
"""The larger ones are cut as Llama 3.2 1B and Llama 3.1 8B: steps take what theirs take; what they say means nothing.
The tiny one is for a look at the scripts."""


def random_model(shape: str, *, dtype: str, device: str, seed: int = 0) -> PreTrainedModel:
    """A model of ``SHAPES[shape]`` whose weights are normal, made where they stay."""
    torch.manual_seed(seed)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    kind = DTYPES["bfloat16" if place.type == "cuda" else "float32"] if dtype == "auto" else DTYPES[dtype]
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with place:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(deepcopy(SHAPES[shape]), dtype=kind)
    finally:
        torch.set_default_dtype(before)
    return model.eval()
