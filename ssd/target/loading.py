"""Load a Hugging Face model, find the way to drive it, and prove that this way computes what the model computes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ssd.errors import ModelError
from ssd.target.attention import ATTENTION_NAME
from ssd.target.memory import fit_slots, usable_bytes
from ssd.target.target import RowTarget, SlotTarget, Target, is_recurrent
from ssd.target.tree_probe import verifies_trees

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_MAX_LENGTH = 4096
"""Context where the model's configuration states none."""


def load_model(name_or_path: str | Path, *, dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """An unmodified Hugging Face causal language model, in evaluation mode on its device.

    dtype : "auto" is float32 on the CPU and the checkpoint's own on CUDA; else a name of ``DTYPES``.
    device : "auto" is CUDA where there is one. Raises ModelError with what to do.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not known: use auto, {', '.join(DTYPES)}")
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device 'cuda' was asked for, but torch sees no CUDA device: use --device cpu")
    wanted: Any = DTYPES[dtype] if dtype != "auto" else (torch.float32 if place.type == "cpu" else "auto")
    try:
        model = AutoModelForCausalLM.from_pretrained(str(name_or_path), dtype=wanted)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"cannot load model {str(name_or_path)!r}: {_first_line(error)} "
            "Give a directory with config.json and weights, or the id of a model that is in the local hub cache."
        ) from error
    try:
        return model.eval().to(place)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"model {str(name_or_path)!r} does not fit into the memory of {place}") from error


def open_target(
    model: PreTrainedModel,
    *,
    num_slots: int,
    max_length: int | None = None,
    max_draft_tokens: int = 16,
    kv_cache_memory_bytes: int | None = None,
) -> Target:
    """The fastest way to drive ``model`` that reproduces its own logits.

    num_slots : most slots; fewer where memory lacks, see `fit_slots`. max_length : tokens a slot holds; None takes the
    model's limit, or less where memory lacks. kv_cache_memory_bytes : memory to use; None takes half of what is free.
    Raises ModelError when an explicit ``max_length`` cannot be had.
    """
    limit = model_limit(model)
    if max_length is not None and limit is not None and max_length > limit:
        raise ModelError(f"max_model_len {max_length} exceeds the model's context of {limit} tokens")
    wanted = max_length or limit or DEFAULT_MAX_LENGTH
    if is_recurrent(model):
        log.warning("%s is recurrent: it cannot take tokens back, so it runs without speculation", type(model).__name__)
        return RowTarget(model, num_slots, wanted)
    bytes_per_token = _try_slots(model)
    slots = fit_slots(
        num_slots=num_slots,
        max_length=max_length,
        limit=wanted,
        extra=max_draft_tokens + 1,
        bytes_per_token=bytes_per_token or _row_bytes_per_token(model),
        usable_bytes=kv_cache_memory_bytes or usable_bytes(model.device),
    )
    if slots.shortage is not None:
        log.warning("%s", slots.shortage)
    if bytes_per_token is None:
        log.warning("%s does not run on slot attention: rows are computed one by one", type(model).__name__)
        return RowTarget(model, slots.num_slots, slots.max_length)
    target = SlotTarget(model, slots.num_slots, slots.max_length, max_draft_tokens + 1)
    target.can_verify_trees = verifies_trees(target, tolerance=_tolerance(model))
    return target


def _row_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of KV cache per token where rows are computed one by one; it grows with them, but room for all is kept."""
    probe = RowTarget(model, 1, _PROBE_LENGTH)
    probe.prefill([0], _probe_tokens(model)[:1], [_PROBE_LENGTH - 1])
    return probe.bytes_per_token(0)


def _try_slots(model: PreTrainedModel) -> int | None:
    """Bytes of KV cache per token if slot attention reproduces the model's logits, else None."""
    own = model.config._attn_implementation
    if own == ATTENTION_NAME:  # another target drives this model already
        own = "eager"
    if not getattr(model, "_supports_attention_backend", False):
        return None
    try:
        model.set_attn_implementation(own)
        expected = _plain_logits(model)
        # "No speculation" must stay correct: any failure here only means the other way is taken.
        probe = SlotTarget(model, num_slots=3, max_length=_PROBE_LENGTH, max_width=4)
        error = _relative_error(_ragged_logits(probe), expected)
        if error < _tolerance(model):
            return probe.kv_cache.bytes_per_token
        log.warning("slot attention differs from %s: relative error %.2g", type(model).__name__, error)
    except Exception as failure:
        log.warning("slot attention failed on %s: %s", type(model).__name__, _first_line(failure))
    model.set_attn_implementation(own)
    return None


def _tolerance(model: PreTrainedModel) -> float:
    """Greatest relative error of logits that is put down to rounding."""
    return 1e-3 if model.dtype == torch.float32 else 0.08


_PROBE_LENGTH = 14
_SPLIT = 9


def _probe_tokens(model: PreTrainedModel) -> np.ndarray[Any, np.dtype[np.int64]]:
    vocab_size = model.config.get_text_config().vocab_size
    return np.random.default_rng(0).integers(3, max(vocab_size, 5), (2, _PROBE_LENGTH - 1)).clip(max=vocab_size - 1)


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel) -> list[torch.Tensor]:
    """The model's own logits for the probe, computed without any cache, one row at a time: [T, V] each."""
    tokens = torch.from_numpy(_probe_tokens(model)).to(model.device)
    return [model(input_ids=row[None], use_cache=False).logits[0].float() for row in tokens]


def _ragged_logits(target: SlotTarget) -> list[torch.Tensor]:
    """The same through slots in reverse order: rows of different length, a wrong draft, and its rollback."""
    tokens = _probe_tokens(target.model)
    slots, starts = (2, 0), (_SPLIT, _SPLIT - 5)
    for slot, row, start in zip(slots, tokens, starts, strict=True):
        target.prefill([slot], row[None, :start], [start])
    wrong = tokens[:, ::-1][:, :4].copy()
    target.forward(slots, wrong, [4, 2])
    for slot, start in zip(slots, starts, strict=True):
        target.rollback(slot, start)
    width = tokens.shape[1] - min(starts)
    padded = np.zeros((2, width), np.int64)
    counts = [tokens.shape[1] - start for start in starts]
    for b, start in enumerate(starts):
        padded[b, : counts[b]] = tokens[b, start:]
    # In passes of at most four positions, as verification feeds them.
    parts = []
    for first in range(0, width, 4):
        part = padded[:, first : first + 4]
        parts.append(target.forward(slots, part, [part.shape[1]] * 2))
    logits = torch.cat(parts, 1).float()
    return [logits[b, : counts[b]] for b in range(2)]


def _relative_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    worst = 0.0
    for got, whole in zip(found, expected, strict=True):
        want = whole[-len(got) :]
        worst = max(worst, float((got - want).norm() / want.norm()))
    return worst


def model_limit(model: PreTrainedModel) -> int | None:
    """Longest text the model takes, in tokens; None where its configuration states none."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
