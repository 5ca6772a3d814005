"""Selection of the fastest model runner that reproduces the model's own logits."""

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
from ssd.model.cpu.cpu_decoder import flatten_layers
from ssd.model.cpu.cpu_layers import fuse_activations, fuse_norms, fuse_rotary
from ssd.model.cpu.exact_matmul import redirect_matmuls
from ssd.model.cpu.packed_linear import pack_linears
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.layers.replace import (
    MAX_CHANGE,
    MAX_CHANGE_LOW_PRECISION,
    MAX_ERROR,
    PROBE_LENGTH,
    LayerReplacement,
    probe_texts,
    reference_logits,
    replace_layers,
)
from ssd.model.runners.probe import relative_error, score_alone, score_as_trees, score_batched
from ssd.model.runners.sequential_runner import CheckpointRunner, FullContextRunner, RecurrentRunner, SequentialRunner
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.target import Target

PROBE_SLOTS = 3
PROBE_WIDTH = 4
"""The maximum number of new tokens per row in the forward passes that test a model runner at startup."""

# The placeholder for a layer that reuses another layer's keys, in versions of transformers that do not omit such
# layers.
_KeyReusingLayer: Any = getattr(cache_utils, "DummyLayer", None)

# The position of each row at which scoring begins; the tokens before it are prefilled in two chunks.
_SCORING_STARTS = (9, 4)


def measure_error(target: Target, expected: Sequence[torch.Tensor]) -> float:
    """Return the largest relative error of a model runner's logits for two texts, compared with ``expected``.

    The beginnings of the texts, of different lengths, are prefilled in chunks; the first text is in the last slot, the
    second in slot 0. The rest is scored in passes of at most ``PROBE_WIDTH`` positions. If the runner can roll back, a
    pass over wrong tokens is run and rolled back before each of these passes. All slots are free afterwards.
    """
    texts, slots = probe_texts(target.model), (PROBE_SLOTS - 1, 0)
    for slot, text, start in zip(slots, texts, _SCORING_STARTS, strict=True):
        for part in (text[: start // 2], text[start // 2 : start]):
            target.prefill([slot], part[None], [len(part)])
    pairs = score_batched(target, slots, list(texts), expected, (PROBE_WIDTH,), after_wrong=target.can_roll_back)
    return relative_error([(found.float(), wanted) for found, wanted in pairs])


def check_windows(target: SlotRunner) -> None:
    """Raise TypeError if a layer attended with another sliding window than the model's configuration declares.

    The texts of the startup test are shorter than usual windows, so the test itself does not notice if a layer does not
    pass its window to the attention function. Call this after a forward pass.
    """
    layers = declared_layers(target.model)
    for index, reach in target.kv_cache.reach.items():
        declared = getattr(layers[index], "sliding_window", None) if index < len(layers) else None
        if reach != declared and not _reuses_keys(layers, index):
            raise TypeError(f"layer {index} attends to {reach or 'all'} positions, but its config declares {declared}")


def _reuses_keys(layers: Sequence[Any], index: int) -> bool:
    """Return whether a layer reuses the keys of an earlier layer, so that it has no sliding window of its own."""
    if _KeyReusingLayer is None:  # in these versions the last layers are those that reuse keys
        return 0 < len(layers) <= index
    return index < len(layers) and isinstance(layers[index], _KeyReusingLayer)


def declared_layers(model: PreTrainedModel) -> list[Any]:
    """Return the layers of the `DynamicCache` that transformers creates for the model; an empty list if this fails.

    It fails for models with a cache of their own. The layers' types show which layers have a sliding window or a
    recurrent state.
    """
    try:
        return list(DynamicCache(config=model.config).layers)
    except Exception:  # a model with its own kind of cache: its layers are unknown
        return []


log = logging.getLogger(__name__)

_TREE_LENGTH = 40


def can_verify_trees(target: SlotRunner, *, tolerance: float) -> bool:
    """Return whether the target computes correct logits for all nodes of a draft tree and can keep the accepted path.

    Uses slot 0, which must be free. A model whose layers mix neighbouring positions other than by attention, for
    example by a convolution, fails the test. If the test fails, drafts must be chains. ``tolerance`` is the maximum
    relative error of the logits.
    """
    length = min(_TREE_LENGTH, target.max_length - 1)
    if min(target.max_width, length) < PROBE_WIDTH:
        return False
    random = np.random.default_rng(0)
    text = random.integers(0, target.vocab_size, length)
    try:
        error = relative_error(score_as_trees(target, 0, text, score_alone(target, 0, text), random))
    except Exception:
        log.warning(
            "%s cannot verify draft trees, so drafts are chains (nothing to do)",
            type(target.model).__name__,
            exc_info=True,
        )
        target.rollback(0, 0)
        return False
    if not error < tolerance:
        log.warning(
            "draft trees change the logits of %s (relative error %.2g), so drafts are chains (nothing to do)",
            type(target.model).__name__,
            error,
        )
    return error < tolerance


@dataclass(frozen=True, slots=True)
class RunnerChoice:
    """The fastest model runner that reproduces the model's own logits, and the memory that it needs."""

    kind: Any  # a subclass of ``Target`` constructed from (model, num_slots, max_length)
    reason: str = ""  # why the model does not run with slot attention
    bytes_per_token: int = 0  # the size of the KV cache; space for all slots is reserved even if the cache grows
    bytes_per_slot: int = 0  # the size of a recurrent state, which does not grow
    tolerance: float = MAX_CHANGE  # the maximum relative error of logits that is attributed to rounding


def select_runner(model: PreTrainedModel) -> RunnerChoice:
    """Return the fastest model runner that reproduces the model's own logits in a few passes over 13 tokens.

    First the model's layers are replaced by faster ones, see `replace_layers`. Then the runners are tested in this
    order, and the first one with correct logits is chosen:

    - `SlotRunner`: all rows in one batched pass.
    - `SequentialRunner`: one row after another, on transformers' caches.
    - `CheckpointRunner`: one row after another for recurrent models, with a copy of the state for rollback.
    - `RecurrentRunner`: for recurrent models that must read one token at a time; the engine then does not draft.
    - `FullContextRunner`: without a cache, correct for every causal model.
    """
    own = model.config._attn_implementation
    if own == ATTENTION_NAME:  # another target already runs this model
        own = "eager"
    model.set_attn_implementation(own)
    expected = reference_logits(model)
    # With quantised activations a difference in the last bit of a float32 becomes a whole quantisation step.
    exact = model.dtype == torch.float32 and getattr(model.config, "quantization_config", None) is None
    limit = MAX_CHANGE if exact else MAX_CHANGE_LOW_PRECISION
    layers = CPU_LAYERS if model.device.type == "cpu" else device_layers(model.device, model.dtype)
    replace_layers(model, layers, expected=expected, tolerance=limit)
    if is_recurrent(model):
        reason = "it has a recurrent state"
    else:
        try:
            return _try_slot_runner(model, expected, limit)
        # A failure only selects another runner, because the output must be right in any case.
        except Exception as failure:
            reason = first_line(failure)
        model.set_attn_implementation(own)
        if _try_runner(SequentialRunner, model, expected) < limit:
            return RunnerChoice(SequentialRunner, reason, *_measure_memory(SequentialRunner, model))
    single = _try_runner(RecurrentRunner, model, expected)
    # A lost state changes the logits of a short text only slightly, so passes over several tokens must be as accurate
    # as passes over one token.
    if _try_runner(CheckpointRunner, model, expected) < min(limit, max(MAX_CHANGE, 2 * single)):
        return RunnerChoice(CheckpointRunner, reason, *_measure_memory(CheckpointRunner, model))
    if single < limit:
        return RunnerChoice(RecurrentRunner, reason, *_measure_memory(RecurrentRunner, model))
    return RunnerChoice(FullContextRunner, f"{reason}, and its logits cannot be reproduced with its cache")


def _measure_memory(kind: type[SequentialRunner], model: PreTrainedModel) -> tuple[int, int]:
    """Measure a model runner's memory: KV cache bytes per token, and bytes of the recurrent state per slot."""
    target, few, many = kind(model, 1, PROBE_LENGTH), PROBE_LENGTH // 3, PROBE_LENGTH - 1
    target.prefill([0], np.ones((1, few), np.int64), [few])
    of_few = target.slot_bytes(0)
    target.prefill([0], np.ones((1, many - few), np.int64), [many - few])
    a_token = max(0, (target.slot_bytes(0) - of_few) // (many - few))
    return a_token, max(0, of_few - few * a_token) * (2 if kind is CheckpointRunner else 1)


def is_recurrent(model: PreTrainedModel) -> bool:
    """Return whether the model has a recurrent state, for example of Mamba, linear attention or convolutions."""
    if getattr(model, "_is_stateful", False):
        return True
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in declared_layers(model))


def _try_slot_runner(model: PreTrainedModel, expected: list[torch.Tensor], limit: float) -> RunnerChoice:
    if not getattr(model, "_supports_attention_backend", False):
        raise TypeError("the model's attention cannot be replaced")
    target = SlotRunner(model, PROBE_SLOTS, PROBE_LENGTH, PROBE_WIDTH)
    error = measure_error(target, expected)
    check_windows(target)
    if error >= limit:
        raise ValueError(f"logits with slot attention differ from the model's own logits by {error:.2g}")
    return RunnerChoice(SlotRunner, bytes_per_token=target.kv_cache.bytes_per_token, tolerance=limit)


def _try_runner(kind: type[SequentialRunner], model: PreTrainedModel, expected: list[torch.Tensor]) -> float:
    try:
        error = measure_error(kind(model, PROBE_SLOTS, PROBE_LENGTH), expected)
    except Exception as failure:
        log.debug("%s failed on %s: %s", kind.__name__, type(model).__name__, first_line(failure))
        return float("inf")
    log.debug("%s on %s: relative error %.2g", kind.__name__, type(model).__name__, error)
    return error


CPU_LAYERS: Final[tuple[LayerReplacement, ...]] = (
    pack_linears,
    fuse_norms,
    fuse_rotary,
    fuse_activations,
    redirect_matmuls,
    flatten_layers,
)


def device_layers(device: torch.device, dtype: torch.dtype) -> tuple[LayerReplacement, ...]:
    """Return the functions that replace a model's layers by Triton kernels on a GPU.

    The result is empty if triton is not installed or there are no kernels for the dtype.
    """
    try:
        from ssd.model.triton.triton_decoder import flatten_by_triton
        from ssd.model.triton.triton_layers import fuse_gates_by_triton, fuse_norms_by_triton, rotate_by_triton
        from ssd.model.triton.triton_linear import own_linears
    except ImportError:  # triton comes with CUDA builds of torch
        return ()
    if dtype not in MAX_ERROR:
        return ()
    rotary: LayerReplacement = partial(
        fuse_rotary,
        apply_rotary=rotate_by_triton,
        dtype=dtype,
        device=device,
        max_error=min(MAX_ERROR[dtype], 1e-3),
        max_elements=1 << 62,
    )
    return fuse_norms_by_triton, rotary, fuse_gates_by_triton, own_linears, flatten_by_triton
