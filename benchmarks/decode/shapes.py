"""Models to time: a directory's, or random weights in the shape of a Llama."""

from __future__ import annotations

import math
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


_LOUD = 1000.0
"""Times that the embedding of a model that speaks is larger: a standard deviation of 20, beside some 8 that 32 layers
of random weights add.
"""


def random_model(shape: str, *, dtype: str, device: str, seed: int = 0, speaks: bool = False) -> PreTrainedModel:
    """A model of ``SHAPES[shape]`` whose weights are normal, made where they stay.

    speaks : whether each token clearly says which comes next. Scores of random weights lie so near to each other that
    passes of different width choose differently in bfloat16, and drafts of what was said before are rejected. Every
    token is followed by another one, so that text does not repeat itself; where input and output share their embedding
    it is followed by itself.
    """
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
    return _speaking(model.eval()) if speaks else model.eval()


@torch.no_grad()
def _speaking(model: PreTrainedModel) -> PreTrainedModel:
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if output is not embedding:
        size = len(output)
        place = torch.arange(size, device=output.device)
        # One cycle through the whole vocabulary: a step that has no factor in common with its size.
        step = next(step for step in range(int(size * 0.618), size) if math.gcd(step, size) == 1)
        output[(place + step) % size] = embedding[place]
    embedding *= _LOUD
    return model
