"""Load a Hugging Face model and open the slots it is driven through."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ssd.errors import ModelError
from ssd.target.memory import ADVICE, available_memory, check_weights_fit
from ssd.target.rope import settle_rope
from ssd.target.target import SlotTarget, Target
from ssd.target.ways import find_way

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_MAX_LENGTH = 4096
"""Context where the model's configuration states none."""
_KV_MEMORY_SHARE = 0.5
"""Share of the free memory that the KV cache may take when the context length is chosen for the user."""


def load_model(name_or_path: str | Path, *, dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """An unmodified Hugging Face causal language model, in evaluation mode on its device.

    dtype : "auto" is float32 on the CPU and the checkpoint's own on CUDA and for quantised weights; else a name of
    ``DTYPES``. device : "auto" is CUDA where there is one. Raises ModelError with what to do.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not known: use auto, {', '.join(DTYPES)}")
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device 'cuda' was asked for, but torch sees no CUDA device: use --device cpu")
    name = str(name_or_path)
    try:
        config = AutoConfig.from_pretrained(name)
        quantised = getattr(config, "quantization_config", None) is not None
        wanted: Any = "auto"
        if dtype != "auto":
            wanted = DTYPES[dtype]
        elif place.type == "cpu" and not quantised:
            wanted = torch.float32
        if not quantised:
            check_weights_fit(name, config, wanted, place)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=wanted)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"cannot load model {name!r}: {_first_line(error)} "
            "Give a directory with config.json and weights, or the id of a model that is in the local hub cache."
        ) from error
    try:
        return model.eval() if model.device == place else model.eval().to(place)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"model {name!r} does not fit into the memory of {place}: {ADVICE}") from error


def open_target(
    model: PreTrainedModel, *, num_slots: int, max_length: int | None = None, max_draft_tokens: int = 16
) -> Target:
    """The fastest way to drive ``model`` that reproduces its own logits.

    max_length : tokens a slot holds; None takes the model's limit, or less where memory for ``num_slots`` of them
    lacks. Raises ModelError when an explicit ``max_length`` cannot be had.
    """
    limit = model_limit(model)
    if max_length is not None and limit is not None and max_length > limit:
        raise ModelError(f"max_model_len {max_length} exceeds the model's context of {limit} tokens")
    wanted = settle_rope(model, max_length) or limit or DEFAULT_MAX_LENGTH
    model_name = type(model).__name__
    found = find_way(model)
    if found.bytes_per_token is None:
        log.warning("%s is driven %s: %s", model_name, found.kind.way, found.reason)
        target: Target = found.kind(model, num_slots, wanted)
        return target
    fitting = _fitting_length(model, num_slots, found.bytes_per_token)
    if wanted > fitting:
        needed = wanted * num_slots * found.bytes_per_token / 1e9
        advice = f"{num_slots} sequences of {wanted} tokens need {needed:.1f} GB of KV cache"
        if max_length is not None or fitting < 64:
            raise ModelError(f"{advice}, more than is free: lower --max-num-seqs or --max-model-len (now <= {fitting})")
        log.warning("%s, more than is free: max_model_len is %d", advice, fitting)
        wanted = fitting
    return SlotTarget(model, num_slots, wanted, max_draft_tokens + 1)


def model_limit(model: PreTrainedModel) -> int | None:
    """Longest text the model takes, in tokens; None where its configuration states none."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _fitting_length(model: PreTrainedModel, num_slots: int, bytes_per_token: int) -> int:
    return int(available_memory(model.device) * _KV_MEMORY_SHARE) // max(1, bytes_per_token * num_slots)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
