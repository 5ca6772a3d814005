"""Tiny models with random weights, one of each architecture that the tests cover."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.architectures import ARCHITECTURES, COMMON

VOCAB: int = COMMON["vocab_size"]


def tiny_model(name: str = "Llama", **changes: Any) -> PreTrainedModel:
    """A model of a few thousand weights whose next-token scores are spread out, so that near-ties are rare.

    name : of the table in ``tests/architectures.py``, or a model type of it. changes : to the table's settings.
    """
    architecture = ARCHITECTURES.get(name) or next(a for a in ARCHITECTURES.values() if a.model_type == name)
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture.model_type, **{**COMMON, **architecture.settings, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.5)
    return model
