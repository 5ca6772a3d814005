"""Loads a Hugging Face model, and creates the runner that serves the model with KV cache slots."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ssd.config import BatchInvariant
from ssd.errors import ModelError, first_line
from ssd.model.cpu.packed_linear import PackedLinear, packable_dtypes
from ssd.model.cpu.row_plan import find_invariant_shapes, seconds_of
from ssd.model.layers.hidden_states import FeatureSpec, check_hidden_states
from ssd.model.layers.replace import is_plain
from ssd.model.loading.adapters import MERGE, Adapters
from ssd.model.loading.memory import (
    ADVICE,
    check_weights_fit,
    fit_slots,
    require_complete,
    usable_bytes,
    weight_bytes,
)
from ssd.model.loading.threads import one_thread_if_small
from ssd.model.runners.attach_cuda_graphs import attach_cuda_graphs
from ssd.model.runners.batch_invariance import verify_batch_invariance
from ssd.model.runners.select_runner import can_verify_trees, select_runner
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.target import Target
from ssd.text.load_tokenizer import ROPE_MODULE, HubOptions, errors_only

log = logging.getLogger(__name__)

_WIDTHS = (1, 8)
# The maximum number of a layer's weights that are measured; of a larger layer only the first rows are used.
_MAX_WEIGHTS = 1 << 24
_WORTH = 0.9  # The maximum time of bfloat16, as a share of float32's, at which bfloat16 is chosen.
_TYPES: Final = (torch.float32, torch.bfloat16)


@torch.inference_mode()
def faster_type(model: PreTrainedModel) -> torch.dtype:
    """Return bfloat16 if linear layers on this CPU are batch-invariant in bfloat16 and clearly faster, else float32.

    The speed is measured by multiplying one layer of each shape, packed as for serving, by 1 and by 8 rows.
    """
    kinds: dict[tuple[int, int], list[torch.nn.Linear]] = {}
    for module in model.modules():
        if is_plain(module, _TYPES):
            kinds.setdefault((module.in_features, module.out_features), []).append(module)
    if not kinds or torch.bfloat16 not in packable_dtypes():
        return torch.float32
    seconds = dict.fromkeys(_TYPES, 0.0)
    for (size, num_outputs), layers in kinds.items():
        tried = min(num_outputs, max(1, _MAX_WEIGHTS // size))
        weight = layers[0].weight[:tried]
        for dtype in _TYPES:
            packed = PackedLinear(weight.to(dtype), None)
            packed.rows = find_invariant_shapes(packed.product, size, tried, dtype)
            if dtype == torch.bfloat16 and not packed.rows.is_exact:
                log.info("the model computes in float32, because bfloat16 is not batch-invariant on this machine")
                return torch.float32
            took = sum(seconds_of(packed, torch.zeros(width, size, dtype=dtype)) for width in _WIDTHS)
            seconds[dtype] += took * len(layers) * num_outputs / tried
    share = seconds[torch.bfloat16] / seconds[torch.float32]
    found = torch.bfloat16 if share < _WORTH else torch.float32
    log.info(
        "the model computes in %s: on this machine, linear layers in bfloat16 take %.2f times as long as in float32",
        str(found).removeprefix("torch."),
        share,
    )
    return found


_LONG = "longrope"
_HELD = "longrope, held"  # a RoPE type that transformers does not know, so that it never updates the frequencies


def fix_rope(model: PreTrainedModel, max_length: int | None) -> int | None:
    """Return the maximum text length, and fix the frequencies of a model with LongRoPE, so that they do not change.

    LongRoPE (Ding et al. 2024, section 3) has two sets of rotary frequencies: for texts up to the model's original
    context length, and for longer texts. transformers selects a set in each forward pass by the highest position in the
    batch. So one long text would change the outputs of all texts, and a text that grows would read keys that were
    computed with the other set. Therefore, without ``max_length``, the original context length is the limit, and
    outputs equal those of ``generate``. If ``max_length`` is greater, all texts use the set for long texts, as in vLLM.
    """
    original = _original_length(model)
    if original is None:
        return max_length
    if max_length is None:
        log.warning(
            "max_model_len is limited to %d, because LongRoPE would also change the outputs of short texts "
            "with a larger value. Set max_model_len to allow longer texts",
            original,
        )
        return original
    if max_length > original:
        log.warning(
            "max_model_len %d exceeds %d, so LongRoPE's frequencies for long texts apply to all texts, and "
            "change the outputs of short texts. Lower max_model_len to prevent this",
            max_length,
            original,
        )
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
    """Make a rotary embedding module use LongRoPE's frequencies for long texts in all forward passes."""
    kind = getattr(module, "rope_type", None)
    beyond = torch.tensor([[original]], device=device)
    if kind == _LONG:
        module(torch.zeros(1, device=device), beyond)
        module.rope_type = _HELD
    elif isinstance(kind, dict) and _LONG in kind.values():
        for layer_type in [name for name, value in kind.items() if value == _LONG]:
            module(torch.zeros(1, device=device), beyond, layer_type=layer_type)
            kind[layer_type] = _HELD


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_MAX_LENGTH = 4096
"""The context length in tokens that is used if the model's configuration declares none."""


def load_model(
    name_or_path: str | Path, *, dtype: str = "auto", device: str = "auto", hub: HubOptions | None = None
) -> PreTrainedModel:
    """Load an unmodified Hugging Face causal language model, in evaluation mode on its device.

    With the ``dtype`` "auto", models on CUDA and quantized models get the checkpoint's dtype. On a CPU, a checkpoint in
    bfloat16 gets the dtype that `faster_type` returns, and any other checkpoint float32. The ``device`` "auto" selects
    CUDA if there is a GPU. Raises ModelError with advice if the model cannot be loaded or the checkpoint lacks weights.
    """
    hub = hub or HubOptions()
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not known: use auto, {', '.join(DTYPES)}")
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device 'cuda' was requested, but torch finds no CUDA device: use --device cpu")
    name, config = str(name_or_path), None
    try:
        with errors_only(ROPE_MODULE):
            config = AutoConfig.from_pretrained(name, **hub.arguments())
        quantised = getattr(config, "quantization_config", None) is not None
        if not quantised and "float8" in str(_declared_dtype(config)):
            raise ModelError(
                f"config.json of {name} declares {_declared_dtype(config)} weights, but lacks a quantization_config: "
                "use a checkpoint in bfloat16, float16 or float32"
            )
        wanted: Any = "auto"
        if dtype != "auto":
            wanted = DTYPES[dtype]
        elif place.type == "cpu" and not quantised:
            wanted = torch.bfloat16 if _declared_dtype(config) == torch.bfloat16 else torch.float32
        is_open = dtype == "auto" and wanted is torch.bfloat16  # until it has been measured
        if not quantised:
            most = torch.float32 if is_open else wanted
            check_weights_fit(name, config, most, place, trust_remote_code=hub.trust_remote_code)
        with errors_only("transformers"):  # hides a table of missing weights, which `require_complete` reports
            model, info = AutoModelForCausalLM.from_pretrained(
                name, dtype=wanted, output_loading_info=True, ignore_mismatched_sizes=True, **hub.arguments()
            )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"cannot load model {name!r}: {_reason(error, config).rstrip('.')}. "
            "Give a directory with config.json and weights, or the id of a model that is in the local hub cache."
        ) from error
    require_complete(name, info)
    if is_open:
        with one_thread_if_small(model):
            # No cast to bfloat16, which would round what the library stores in float32, for example rotary angles.
            model = model.float() if faster_type(model) is torch.float32 else model
    try:
        return model.eval() if model.device == place else model.eval().to(place)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"model {name!r} does not fit into the memory of {place}: {ADVICE}") from error


def _reason(error: Exception, config: Any) -> str:
    """Return one line that says why a model could not be loaded, and explain transformers' KeyError for a RoPE type."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = getattr(config.get_text_config(), "rope_parameters", None) if config is not None else None
    kinds = [parameters, *parameters.values()] if isinstance(parameters, dict) else []
    named = [kind.get("rope_type") for kind in kinds if isinstance(kind, dict)]
    if isinstance(error, KeyError) and error.args and error.args[0] in named:
        return (
            f"config.json has rope_scaling of the type {error.args[0]!r}, which this version of transformers does not "
            f"have: it has default, {', '.join(ROPE_INIT_FUNCTIONS)}."
        )
    return first_line(error)


def _declared_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype of the weights that a model's configuration declares; None if it declares no known dtype."""
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return getattr(torch, found.removeprefix("torch."), None) if isinstance(found, str) else found


def open_target(
    model: PreTrainedModel,
    *,
    num_slots: int,
    max_length: int | None = None,
    max_draft_tokens: int = 16,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float | None = None,
    enforce_eager: bool = False,
    adapters: Adapters | None = None,
    tapped: FeatureSpec | None = None,
    keeps_top: bool = False,
    batch_invariant: BatchInvariant = "auto",
) -> Target:
    """Return the fastest runner of a loaded model that reproduces the model's own logits.

    The KV cache gets ``kv_cache_memory_bytes``. If this is None, it gets the share ``gpu_memory_utilization`` of all
    memory minus the memory already in use; if both are None, half of the free memory. If memory is short, there are
    fewer than ``num_slots`` slots, see `fit_slots`. A slot holds ``max_length`` tokens; by default as many as the model
    supports, or fewer if memory is short. ``tapped`` describes the hidden states that are stored for a draft head. With
    ``keeps_top``, forward passes in CUDA graphs also return the most probable tokens. For ``batch_invariant`` see
    `verify_batch_invariance`.

    Raises:
        ModelError: Adapters, an explicit ``max_length`` or batch invariance cannot be provided.
    """
    limit = model_limit(model)
    if max_length is not None and limit is not None and max_length > limit:
        raise ModelError(f"max_model_len {max_length} exceeds the model's context of {limit} tokens: lower it")
    wanted = fix_rope(model, max_length) or limit or DEFAULT_MAX_LENGTH
    if tapped is not None:
        check_hidden_states(model, tapped.layers)
    with one_thread_if_small(model):
        found = select_runner(model)
    bytes_per_token = max(1, found.bytes_per_token)
    if tapped is not None:
        bytes_per_token += tapped.size * model.dtype.itemsize + tapped.bytes_per_token
    extra = (
        max_draft_tokens + 1 + found.bytes_per_slot // bytes_per_token
    )  # a recurrent state takes as much memory as so many tokens
    slots = fit_slots(
        num_slots=num_slots,
        max_length=max_length,
        limit=wanted,
        extra=extra,
        bytes_per_token=bytes_per_token,
        usable_bytes=kv_cache_memory_bytes or usable_bytes(model.device, gpu_memory_utilization),
    )
    if slots.shortage is not None:
        log.warning("%s", slots.shortage)
    held, kv_bytes = weight_bytes(model), slots.num_slots * (slots.max_length + extra) * bytes_per_token
    log.info(
        "%s takes %.2f GB: %.2f GB of weights and a KV cache (%d sequences of %d tokens) of %.2f GB",
        type(model).__name__,
        (held + kv_bytes) / 1e9,
        held / 1e9,
        slots.num_slots,
        slots.max_length,
        kv_bytes / 1e9,
    )
    if found.kind is not SlotRunner:
        how = f"{type(model).__name__} uses the runner {found.kind.backend!r} ({found.reason})"
        if adapters:
            raise ModelError(f"{how}. This runner does not support LoRA adapters: {MERGE}")
        if tapped is not None:
            raise ModelError(
                f"{how}. With this runner, a draft head cannot read the model's hidden states: omit the draft head"
            )
        log.warning("%s", how)
        other: Target = found.kind(model, slots.num_slots, slots.max_length)
        verify_batch_invariance(other, batch_invariant)
        return other
    target = SlotRunner(model, slots.num_slots, slots.max_length, max_draft_tokens + 1)
    if tapped is not None:
        target.allocate_features(tapped)
    if adapters:
        adapters.attach(target, tolerance=found.tolerance)
    with one_thread_if_small(model):
        target.can_verify_trees = can_verify_trees(target, tolerance=found.tolerance)
    if not adapters:  # a CUDA graph would always use the adapters of its capture
        target.recapture_graphs = partial(
            attach_cuda_graphs, target, tolerance=found.tolerance, enforce_eager=enforce_eager, keeps_top=keeps_top
        )
        target.recapture_graphs()
    verify_batch_invariance(target, batch_invariant)
    return target


def model_limit(model: PreTrainedModel) -> int | None:
    """Return the maximum text length of a model in tokens; None if its configuration declares none."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
