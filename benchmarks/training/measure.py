"""Measurements of the bundled model (loops in its output, bits per byte), and generation of text for training."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

# A small model decoded greedily soon repeats itself, and repeated text is what a retrieval drafter predicts best. The
# share in loops says how far a speed-up may be trusted; training uses the same definition to push loops away.
MAX_PERIOD = 32
"""The maximum length of a repeated unit that counts as a loop, in tokens."""
MIN_LOOP_TOKENS = 8
"""The minimum length of a loop in tokens, so that ``))))`` and dashed lines of tables do not count."""


def looped_tokens(tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Mark the tokens in loops: sequences of at least two whole copies of a unit of 1 to ``MAX_PERIOD`` tokens.

    Returns bool[n], True in a loop after its first copy, which is legitimate text. A loop has at least
    ``MIN_LOOP_TOKENS`` tokens.
    """
    mask = np.zeros(len(tokens), np.bool_)
    for period in range(1, min(MAX_PERIOD, len(tokens) // 2) + 1):
        same = tokens[period:] == tokens[:-period]
        # Edges of the runs of True: a run [lo, hi) of `same` is the looped stretch [lo, hi + period) of the text.
        edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
        for lo, hi in zip(edges[::2], edges[1::2], strict=True):
            if hi - lo >= period and hi - lo + period >= MIN_LOOP_TOKENS:
                mask[lo + period : hi + period] = True
    return mask


@torch.inference_mode()
def bits_per_byte(
    model: PreTrainedModel, documents: list[npt.NDArray[np.int64]], num_bytes: int, row_length: int
) -> float:
    """Return the model's bits per byte on the held-out text.

    The documents are concatenated and cut into rows of ``row_length`` tokens; each row is predicted without earlier
    context.
    """
    tokens = torch.from_numpy(np.concatenate(documents))
    training = model.training
    model.eval()
    nats = 0.0
    for start in range(0, len(tokens) - 1, row_length):
        row = tokens[start : start + row_length + 1]
        logits = model(input_ids=row[None, :-1], use_cache=False).logits[0].float()
        nats += functional.cross_entropy(logits, row[1:], reduction="sum").item()
    model.train(training)
    return nats / math.log(2) / num_bytes


@torch.no_grad()
def write(
    model: PreTrainedModel, prefixes: torch.Tensor, length: int, temperature: float = 0.0, seed: int = 0
) -> torch.Tensor:
    """Generate text after prompts, int64[rows, start], until each row has ``length`` tokens.

    End-of-text does not stop it. Temperature 0 is greedy. ``seed`` determines the sampling noise.
    """
    cache = DynamicCache(config=model.config)
    tokens = inputs = prefixes
    for position in range(prefixes.shape[1], length):
        logits = model(input_ids=inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        if temperature:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
            uniform = torch.rand(logits.shape, generator=generator).clamp_(1e-20, 1 - 1e-7)
            logits = logits / temperature - torch.log(-torch.log(uniform))
        inputs = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, inputs], dim=1)
    return tokens.clone()
