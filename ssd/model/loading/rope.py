"""Position encodings that change with the length of the text: hold them still."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_LONG = "longrope"
_HELD = "longrope, held"
"""transformers updates frequencies by the name of their kind; it knows nothing of this one and leaves them alone."""


def settle_rope(model: PreTrainedModel, max_length: int | None) -> int | None:
    """Make a position's encoding independent of what else is in the pass; returns the length that this allows.

    LongRoPE (Ding et al. 2024, section 3) has two sets of frequencies, for texts up to the original context and for
    longer ones. transformers picks one in each pass by its furthest position, so one long text in a batch would turn
    the others' queries, and a text that grows over the edge would meet keys of the other set. So: without a
    ``max_length`` the original context is the limit, and the output is that of the model's own ``generate``; with a
    longer one the long set is used for all texts, as vLLM does.
    """
    original = _original_length(model)
    if original is None:
        return max_length
    if max_length is None:
        log.warning("max_model_len is %d, the context before scaling: longer ones change every output", original)
        return original
    if max_length > original:
        log.warning("max_model_len %d is beyond %d: long-text frequencies are used throughout", max_length, original)
        for module in model.modules():
            _hold_long(module, original, model.device)
    return max_length


def _original_length(model: PreTrainedModel) -> int | None:
    parameters: Any = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    # One set of parameters, or one for each kind of layer.
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    lengths = [kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == _LONG]
    return min((length for length in lengths if length is not None), default=None)


@torch.inference_mode()
def _hold_long(module: Any, original: int, device: torch.device) -> None:
    """Let one more update choose the long set, then none."""
    kind = getattr(module, "rope_type", None)
    beyond = torch.tensor([[original]], device=device)
    if kind == _LONG:
        module(torch.zeros(1, device=device), beyond)
        module.rope_type = _HELD
    elif isinstance(kind, dict) and _LONG in kind.values():
        for layer_type in [name for name, value in kind.items() if value == _LONG]:
            module(torch.zeros(1, device=device), beyond, layer_type=layer_type)
            kind[layer_type] = _HELD
