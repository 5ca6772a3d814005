"""The ways to drive a model, fastest first, and the search for the first that computes what the model computes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ssd.errors import first_line
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.layers.fused_linear import fuse_linears
from ssd.model.layers.own_products import exact_products
from ssd.model.layers.packed_linear import pack_linears
from ssd.model.layers.probe_logits import PROBE_LENGTH, plain_logits
from ssd.model.layers.replace import MOST_ERROR, Replace, replace_layers
from ssd.model.layers.vector_layers import fuse_activations, fuse_norms, fuse_rotary
from ssd.model.ways.probes import PROBE_SLOTS, PROBE_WIDTH, check_windows, declared_layers, relative_error
from ssd.model.ways.recurrent_target import RecurrentTarget, ReplayTarget
from ssd.model.ways.row_target import RowTarget, WholeTarget
from ssd.model.ways.slot_target import SlotTarget

log = logging.getLogger(__name__)

_MOST_ERROR = 1e-3
_MOST_ERROR_LOW_PRECISION = 0.2
"""A wrong mask, position or state is off by about 1; two ways to round to bfloat16 by up to a tenth."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is driven. ``reason`` says why not by slot attention."""

    kind: Any
    """The class of the target: a subclass of ``Target`` made from (model, num_slots, max_length)."""
    reason: str = ""
    bytes_per_token: int | None = None
    """Of the slot KV cache; None where the model keeps its own."""
    tolerance: float = _MOST_ERROR
    """Greatest relative error of logits that is put down to rounding."""


def find_way(model: PreTrainedModel, *, fuse: bool = False) -> Way:
    """The fastest way that gives the model's own logits on a small probe: a few passes over 13 tokens.

    Faster layers take the place of the model's own first, see `replace_layers`. fuse : on a device too, one for the
    linear layers that read the same input.

    1. `SlotTarget`: one batched pass. 2. `RowTarget`: rows one by one on transformers' caches. 3. `ReplayTarget`: the
    same for running states, with a copy to return to. 4. `RecurrentTarget`: for states that take one token at a time;
    the engine then does not draft. 5. `WholeTarget`: no cache, which is right for every causal model.
    """
    own = model.config._attn_implementation
    if own == ATTENTION_NAME:  # another target drives this model already
        own = "eager"
    model.set_attn_implementation(own)
    expected = plain_logits(model)
    # Quantised activations turn the last bit of a float32 into a step of their scale.
    exact = model.dtype == torch.float32 and getattr(model.config, "quantization_config", None) is None
    limit = _MOST_ERROR if exact else _MOST_ERROR_LOW_PRECISION
    replace_layers(model, _faster_layers(model, fuse=fuse), expected=expected, tolerance=limit)
    if keeps_state(model):
        reason = "it keeps a running state"
    else:
        try:
            return _slots(model, expected, limit)
        # Whatever fails here only means that another way is taken: the output must be right in any case.
        except Exception as failure:
            reason = first_line(failure)
        model.set_attn_implementation(own)
        if _error(RowTarget, model, expected) < limit:
            return Way(RowTarget, reason)
    single = _error(RecurrentTarget, model, expected)
    # A state that is forgotten shows little in a short text: so several tokens a pass must come as near as one.
    if _error(ReplayTarget, model, expected) < min(limit, max(_MOST_ERROR, 2 * single)):
        return Way(ReplayTarget, reason)
    if single < limit:
        return Way(RecurrentTarget, reason)
    return Way(WholeTarget, f"{reason}, and its cache does not give its own logits again")


def _faster_layers(model: PreTrainedModel, *, fuse: bool) -> tuple[Replace, ...]:
    if model.device.type == "cpu":
        return CPU_LAYERS
    return (*device_layers(model.device, model.dtype), *((fuse_linears,) if fuse else ()))


def keeps_state(model: PreTrainedModel) -> bool:
    """True for models with a running state: Mamba, linear attention, convolutions, alone or beside attention."""
    if getattr(model, "_is_stateful", False):
        return True
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in declared_layers(model))


def row_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of KV cache per token where rows are computed one by one; it grows with them, but room for all is kept."""
    target = RowTarget(model, 1, PROBE_LENGTH)
    target.prefill([0], np.ones((1, PROBE_LENGTH - 1), np.int64), [PROBE_LENGTH - 1])
    return target.bytes_per_token(0)


def _slots(model: PreTrainedModel, expected: list[torch.Tensor], limit: float) -> Way:
    if not getattr(model, "_supports_attention_backend", False):
        raise TypeError("its attention cannot be replaced")
    target = SlotTarget(model, PROBE_SLOTS, PROBE_LENGTH, PROBE_WIDTH)
    error = relative_error(target, expected)
    check_windows(target)
    if error >= limit:
        raise ValueError(f"slot attention differs from its own by {error:.2g}")
    return Way(SlotTarget, bytes_per_token=target.kv_cache.bytes_per_token, tolerance=limit)


def _error(kind: type[RowTarget], model: PreTrainedModel, expected: list[torch.Tensor]) -> float:
    """Infinite where the way cannot be gone at all."""
    try:
        error = relative_error(kind(model, PROBE_SLOTS, PROBE_LENGTH), expected)
    except Exception as failure:
        log.debug("%s failed on %s: %s", kind.__name__, type(model).__name__, first_line(failure))
        return float("inf")
    log.debug("%s on %s: relative error %.2g", kind.__name__, type(model).__name__, error)
    return error


CPU_LAYERS: Final[tuple[Replace, ...]] = (pack_linears, fuse_norms, fuse_rotary, fuse_activations, exact_products)


def device_layers(device: torch.device, dtype: torch.dtype) -> tuple[Replace, ...]:
    """Layers of one launch each, in place of those that model libraries write as many; none where triton is missing.

    dtype : of the model's numbers.
    """
    try:
        from ssd.model.layers.triton_layers import TritonRotary, fuse_gates_by_triton, fuse_norms_by_triton
    except ImportError:  # it comes with CUDA builds of torch
        return ()
    if dtype not in MOST_ERROR:
        return ()
    turn: Replace = partial(
        fuse_rotary, make=TritonRotary, dtype=dtype, device=device, most_error=min(MOST_ERROR[dtype], 1e-3)
    )
    return fuse_norms_by_triton, turn, fuse_gates_by_triton
