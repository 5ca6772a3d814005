"""The ways to drive a model, fastest first, and the search for the first that computes what the model computes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ssd.errors import first_line
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.layers.decoder_layers import flatten_layers
from ssd.model.layers.own_products import exact_products
from ssd.model.layers.packed_linear import pack_linears
from ssd.model.layers.replace import (
    MOST_CHANGE,
    MOST_CHANGE_LOW_PRECISION,
    MOST_ERROR,
    PROBE_LENGTH,
    Replace,
    plain_logits,
    probe_texts,
    replace_layers,
)
from ssd.model.layers.vector_layers import fuse_activations, fuse_norms, fuse_rotary
from ssd.model.target import Target
from ssd.model.ways.probe import alone, as_trees, relative_error, together
from ssd.model.ways.row_target import RecurrentTarget, ReplayTarget, RowTarget, WholeTarget
from ssd.model.ways.slot_target import SlotTarget

PROBE_SLOTS = 3
PROBE_WIDTH = 4
"""Most positions of a scored pass of the probe."""

_NoLayer: Any = getattr(cache_utils, "DummyLayer", None)
"""What stands for a layer that uses another's keys, in versions of transformers that do not leave it out."""

_STARTS = (9, 4)
"""Where scoring begins in either row; what comes before is prefilled in two parts."""


def error_of(target: Target, expected: Sequence[torch.Tensor]) -> float:
    """How far ``target``'s logits are from ``expected``, as a share of their norm; the worse of two rows.

    Two texts in slots of reverse order and with different lengths, prefilled in parts, scored in passes of at most
    ``PROBE_WIDTH`` positions, after wrong drafts where the target takes tokens back. ``target`` is left empty.
    """
    texts, slots = probe_texts(target.model), (PROBE_SLOTS - 1, 0)
    for slot, text, start in zip(slots, texts, _STARTS, strict=True):
        for part in (text[: start // 2], text[start // 2 : start]):
            target.prefill([slot], part[None], [len(part)])
    pairs = together(target, slots, list(texts), expected, (PROBE_WIDTH,), after_wrong=target.can_roll_back)
    return relative_error([(found.float(), wanted) for found, wanted in pairs])


def check_windows(target: SlotTarget) -> None:
    """Raise TypeError unless every layer attended as far back as the model's configuration says.

    The probe is shorter than the windows of real models, so it would not notice a layer that keeps its window to
    itself. After a pass.
    """
    layers = declared_layers(target.model)
    for index, reach in target.kv_cache.reach.items():
        declared = getattr(layers[index], "sliding_window", None) if index < len(layers) else None
        if reach != declared and not _uses_another(layers, index):
            raise TypeError(f"layer {index} attends to {reach or 'all'} positions, its configuration says {declared}")


def _uses_another(layers: Sequence[Any], index: int) -> bool:
    """Whether a layer computes with another's keys: it declares nothing."""
    if _NoLayer is None:  # such layers are the last ones
        return 0 < len(layers) <= index
    return index < len(layers) and isinstance(layers[index], _NoLayer)


def declared_layers(model: PreTrainedModel) -> list[Any]:
    """What each layer keeps of the past, as the layers of the cache that transformers makes from the configuration."""
    try:
        return list(DynamicCache(config=model.config).layers)
    except Exception:  # a kind of layer that has a cache of its own: nothing is known
        return []


log = logging.getLogger(__name__)

_TREE_LENGTH = 40


def verifies_trees(target: SlotTarget, *, tolerance: float) -> bool:
    """Whether every node of a tree is scored as in a pass over the path to it, and its path can be kept.

    tolerance : greatest relative error of the logits. Uses slot 0, which must be free. A model whose layers mix
    neighbours in some other way than by attention (a convolution, say) fails. Any failure means chains.
    """
    length = min(_TREE_LENGTH, target.max_length - 1)
    if min(target.max_width, length) < PROBE_WIDTH:
        return False
    random = np.random.default_rng(0)
    text = random.integers(0, target.vocab_size, length)
    try:
        error = relative_error(as_trees(target, 0, text, alone(target, 0, text), random))
    except Exception:
        log.warning("trees failed on %s: drafts are chains", type(target.model).__name__, exc_info=True)
        target.rollback(0, 0)
        return False
    if not error < tolerance:
        log.warning("trees differ on %s: relative error %.2g; drafts are chains", type(target.model).__name__, error)
    return error < tolerance


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is driven. ``reason`` says why not by slot attention."""

    kind: Any
    """The class of the target: a subclass of ``Target`` made from (model, num_slots, max_length)."""
    reason: str = ""
    bytes_per_token: int = 0
    """Of keys and values; those of rows grow with them, but room for all is kept."""
    bytes_per_slot: int = 0
    """Of states, which do not grow."""
    tolerance: float = MOST_CHANGE
    """Greatest relative error of logits that is put down to rounding."""


def find_way(model: PreTrainedModel) -> Way:
    """The fastest way that gives the model's own logits on a small probe: a few passes over 13 tokens.

    Faster layers take the place of the model's own first, see `replace_layers`.

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
    limit = MOST_CHANGE if exact else MOST_CHANGE_LOW_PRECISION
    layers = CPU_LAYERS if model.device.type == "cpu" else device_layers(model.device, model.dtype)
    replace_layers(model, layers, expected=expected, tolerance=limit)
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
            return Way(RowTarget, reason, *_memory_of(RowTarget, model))
    single = _error(RecurrentTarget, model, expected)
    # A state that is forgotten shows little in a short text: so several tokens a pass must come as near as one.
    if _error(ReplayTarget, model, expected) < min(limit, max(MOST_CHANGE, 2 * single)):
        return Way(ReplayTarget, reason, *_memory_of(ReplayTarget, model))
    if single < limit:
        return Way(RecurrentTarget, reason, *_memory_of(RecurrentTarget, model))
    return Way(WholeTarget, f"{reason}, and its cache does not give its own logits again")


def _memory_of(kind: type[RowTarget], model: PreTrainedModel) -> tuple[int, int]:
    """Bytes that a token of a slot takes, and a slot beside them, a state's copy included: of two lengths."""
    target, few, many = kind(model, 1, PROBE_LENGTH), PROBE_LENGTH // 3, PROBE_LENGTH - 1
    target.prefill([0], np.ones((1, few), np.int64), [few])
    of_few = target.bytes_of(0)
    target.prefill([0], np.ones((1, many - few), np.int64), [many - few])
    a_token = max(0, (target.bytes_of(0) - of_few) // (many - few))
    return a_token, max(0, of_few - few * a_token) * (2 if kind is ReplayTarget else 1)


def keeps_state(model: PreTrainedModel) -> bool:
    """True for models with a running state: Mamba, linear attention, convolutions, alone or beside attention."""
    if getattr(model, "_is_stateful", False):
        return True
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in declared_layers(model))


def _slots(model: PreTrainedModel, expected: list[torch.Tensor], limit: float) -> Way:
    if not getattr(model, "_supports_attention_backend", False):
        raise TypeError("its attention cannot be replaced")
    target = SlotTarget(model, PROBE_SLOTS, PROBE_LENGTH, PROBE_WIDTH)
    error = error_of(target, expected)
    check_windows(target)
    if error >= limit:
        raise ValueError(f"slot attention differs from its own by {error:.2g}")
    return Way(SlotTarget, bytes_per_token=target.kv_cache.bytes_per_token, tolerance=limit)


def _error(kind: type[RowTarget], model: PreTrainedModel, expected: list[torch.Tensor]) -> float:
    """Infinite where the way cannot be gone at all."""
    try:
        error = error_of(kind(model, PROBE_SLOTS, PROBE_LENGTH), expected)
    except Exception as failure:
        log.debug("%s failed on %s: %s", kind.__name__, type(model).__name__, first_line(failure))
        return float("inf")
    log.debug("%s on %s: relative error %.2g", kind.__name__, type(model).__name__, error)
    return error


CPU_LAYERS: Final[tuple[Replace, ...]] = (
    pack_linears, fuse_norms, fuse_rotary, fuse_activations, exact_products, flatten_layers,
)  # fmt: skip


def device_layers(device: torch.device, dtype: torch.dtype) -> tuple[Replace, ...]:
    """Layers of one launch each, in place of those that libraries write as many; none where triton is missing.

    dtype : of the model's numbers.
    """
    try:
        from ssd.model.layers.triton_decoder import flatten_by_triton
        from ssd.model.layers.triton_layers import fuse_gates_by_triton, fuse_norms_by_triton, turn_by_triton
        from ssd.model.layers.triton_linear import own_linears
    except ImportError:  # it comes with CUDA builds of torch
        return ()
    if dtype not in MOST_ERROR:
        return ()
    turn: Replace = partial(
        fuse_rotary, turn=turn_by_triton, dtype=dtype, device=device, most_error=min(MOST_ERROR[dtype], 1e-3),
        most_numbers=1 << 62,
    )  # fmt: skip
    return fuse_norms_by_triton, turn, fuse_gates_by_triton, own_linears, flatten_by_triton
