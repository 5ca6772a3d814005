"""What a model's own code says of two short texts: what layers and ways that replace it must say as well."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

PROBE_LENGTH = 14
"""Positions of a slot that holds a text of the probe and one token more."""


@torch.inference_mode()
def plain_logits(model: PreTrainedModel) -> list[torch.Tensor]:
    """The model's own logits for the probe, computed without any cache, one row at a time: float32[T, V] each."""
    return [
        model(input_ids=torch.from_numpy(row[None]).to(model.device), use_cache=False).logits[0].float()
        for row in probe_texts(model)
    ]


def probe_texts(model: PreTrainedModel) -> npt.NDArray[np.int64]:
    """Token ids drawn at random from the model's vocabulary, the same every time: int64[2, T]."""
    vocab_size = model.config.get_text_config().vocab_size
    random: Any = np.random.default_rng(0)
    return np.asarray(random.integers(3, max(vocab_size, 5), (2, PROBE_LENGTH - 1)).clip(max=vocab_size - 1), np.int64)
