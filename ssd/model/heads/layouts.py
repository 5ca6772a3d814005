"""The checkpoint formats of draft heads: EAGLE, Medusa, and modules for multi-token prediction (MTP).

MTP modules are part of the target's own checkpoint. A format is recognised by the names of its tensors, and defines the
network's configuration and the tensors' names.

Checkpoints number the hidden states that EAGLE-3 reads in two ways. A speculators configuration counts like vLLM: layer
k is the output of the first k layers. ``eagle_config`` counts like SGLang (set_eagle3_layers_to_capture): layer k is
the output of the layer with index k. Both configurations have the same default (EAGLE's modeling_llama_kv.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, PreTrainedModel

from ssd.errors import ModelError, first_line
from ssd.model.heads.networks import Eagle3Head, FusedHead, Head, MedusaHead, TargetParts, eagle_layer, mtp_layers
from ssd.model.heads.tensors import (
    Config,
    TensorFiles,
    Tensors,
    assign_tensors,
    find_directory,
    read_config,
    read_positive,
    read_tensors,
    require_same,
    require_tensors,
    shapes_of,
)
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.kv.kv_cache import SlotKVCache, SlotRows
from ssd.model.layers.replace import MAX_CHANGE, MAX_CHANGE_LOW_PRECISION, replace_layers
from ssd.model.runners.select_runner import CPU_LAYERS
from ssd.text.load_tokenizer import HubOptions

Matches = Sequence[re.Match[str]]
# The prefix of tensor names in the checkpoint, by the prefix in our module; the longest matching prefix applies.
Names = Mapping[str, str]


class Layout(NamedTuple):
    """A checkpoint format of draft heads, recognised by the names of the tensors."""

    name: str
    required_names: tuple[str, ...]  # regular expressions that all match a tensor of this format
    # The last argument contains all matches of the first expression.
    build: Callable[[Config, Tensors, PreTrainedModel, Matches], Head]
    excluded_names: tuple[str, ...] = ()  # regular expressions that match no tensor of this format

    def matches(self, names: Collection[str]) -> list[re.Match[str]]:
        """Return the tensor names, as regex matches, that identify this format; empty for another format."""
        first, *others = (_matching(each, names) for each in self.required_names)
        return first if all(others) and not any(_matching(each, names) for each in self.excluded_names) else []


def _matching(pattern: str, names: Collection[str]) -> list[re.Match[str]]:
    return [match for name in sorted(names) if (match := re.fullmatch(pattern, name))]


def _fill_head(head: Head, tensors: Tensors, names: Names, target: PreTrainedModel, **more: torch.Tensor) -> Head:
    """Assign the tensors of a checkpoint to a draft head.

    ``names`` maps prefixes of tensor names in the head to prefixes in the checkpoint. ``more`` are tensors that are
    not read from the checkpoint, under their names in the head.
    """
    shapes = {name: size for name, size in shapes_of(head).items() if name not in more}

    def checkpoint_name(module_name: str) -> str:
        prefix = max((prefix for prefix in names if module_name.startswith(prefix)), key=len, default="")
        return names.get(prefix, "") + module_name.removeprefix(prefix)

    found = read_tensors(tensors, {checkpoint_name(module_name): size for module_name, size in shapes.items()})
    assign_tensors(
        head, {**{module_name: found[checkpoint_name(module_name)] for module_name in shapes}, **more}, target
    )
    return head


# -- EAGLE -----------------------------------------------------------------------------------------------------------

_MAX_LAYERS_READ = 16
_MAX_HEAD_DIM = 1 << 12  # A damaged configuration must not allocate memory for a size that no head has.
# The fields of a configuration that determine the head's decoder layer.
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "vocab_size",
    "attention_bias",
    "mlp_bias",
)


def _llama_config(config: Config, target: PreTrainedModel) -> LlamaConfig:
    """Return a draft head's Llama configuration; raises ModelError if it is invalid or has more than one layer."""
    if (read_positive(config, "head_dim") or 1) > _MAX_HEAD_DIM:
        raise ModelError(
            f"the head's head_dim is {config['head_dim']}, but at most {_MAX_HEAD_DIM} is supported: use another head"
        )
    if read_positive(config, "num_hidden_layers") not in (None, 1):
        raise ModelError(
            "the head has several layers (num_hidden_layers), but only heads with one layer are supported: use "
            "such a head"
        )
    fields: dict[str, Any] = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    fields.setdefault("hidden_size", target.config.get_text_config().hidden_size)
    try:
        found = LlamaConfig(**json.loads(json.dumps(fields)), num_hidden_layers=1)
    except Exception as failure:
        raise ModelError(f"the head's config.json cannot be read: {first_line(failure)}") from failure
    found._attn_implementation = ATTENTION_NAME
    return found


def _eagle(config: Config, tensors: Tensors, target: PreTrainedModel, _: Matches) -> Head:
    require_same(config, target, ("hidden_size", "vocab_size"))
    shape = _llama_config(config, target)
    qkv_bias = not shape.attention_bias and "layers.0.self_attn.q_proj.bias" in tensors

    with torch.device("meta"):
        head = FusedHead(target, eagle_layer(shape, qkv_bias=qkv_bias), shape, bias="fc.bias" in tensors)
    head.set_rotary(shape, target.device)
    return _fill_head(head, tensors, {"layer.": "layers.0."}, target)


_EMBED = "embed_tokens.weight"
# Tensors of an EAGLE-3 checkpoint that need not become part of the head.
_UNREAD = {"t2d", "d2t", _EMBED, "verifier_lm_head.weight", "verifier_norm.weight"}


def _eagle3(config: Config, tensors: Tensors, target: PreTrainedModel, _: Matches, names: Names) -> Head:
    own = target.config.get_text_config()
    layer, eagle = config, config.get("eagle_config")
    listed = eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None
    if names:  # speculators
        inner, listed = config.get("transformer_layer_config"), config.get("eagle_aux_hidden_state_layer_ids") or None
        if not isinstance(inner, dict):
            raise ModelError("the head's config.json lacks transformer_layer_config: download the head again")
        layer = inner
        if config.get("norm_before_fc"):
            raise ModelError(
                "the head normalizes hidden states before it fuses them (norm_before_fc), and SSD does not support "
                "this: use another head"
            )
        config = {"vocab_size": layer.get("vocab_size"), "norm_before_residual": True, **config}
    require_same(config, target, ("vocab_size",))
    if (wide := read_positive(config, "target_hidden_size")) not in (None, own.hidden_size):
        raise ModelError(
            f"the head was made for another model: its config.json says target_hidden_size {wide}, but this "
            f"model has {own.hidden_size}. Use the head that was trained for this model"
        )
    shape = _llama_config({**layer, "vocab_size": own.vocab_size}, target)
    mapping, made = _draft_to_target(tensors, own.vocab_size), {}
    if mapping is not None:
        made["draft_to_target"] = mapping
        if (wanted := read_positive(config, "draft_vocab_size")) not in (None, len(mapping)):
            raise ModelError(
                f"the head's draft_vocab_size is {wanted}, but its tensor d2t has {len(mapping)} entries: download "
                "the head again"
            )
    embed = _embeddings(tensors, target, shape)
    layers = _feature_layers(target, listed, 0 if names else 1)
    with torch.device("meta"):
        head = Eagle3Head(
            shape,
            embed,
            layers,
            target_hidden_size=own.hidden_size,
            draft_vocab_size=None if mapping is None else len(mapping),
            norm_before_residual=bool(config.get("norm_before_residual")),
        )
    theirs = {name.replace("midlayer.", names.get("midlayer.", "midlayer.")) for name in shapes_of(head)}
    unknown = {name for name in set(tensors) - theirs - _UNREAD if "rotary" not in name}
    if unknown:
        raise ModelError(f"the head has unsupported tensors ({', '.join(sorted(unknown)[:4])}): use another head")
    return _fill_head(head, tensors, names, target, **made)


def _draft_to_target(tensors: Tensors, vocab_size: int) -> torch.Tensor | None:
    """Return the target's id of each token of a draft head's vocabulary, int64[Vd]; None if the ids are the same."""
    if "d2t" not in tensors:
        return None
    offsets = tensors["d2t"]
    if offsets.ndim != 1 or offsets.dtype.is_floating_point or not len(offsets):
        raise ModelError("the head's tensor d2t is not a list of integers: download the head again")
    token_ids = offsets.to(torch.int64) + torch.arange(len(offsets))
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise ModelError(
            f"the head's tensor d2t has token ids outside 0..{vocab_size - 1}, so the head was made for a model "
            "with another vocabulary. Use the head that was trained for this model"
        )
    return token_ids


def _embeddings(
    tensors: Tensors, target: PreTrainedModel, shape: LlamaConfig
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a draft head's embedding function: the target's, unless the checkpoint contains different embeddings."""
    own: Any = target.get_input_embeddings()
    hidden_size = target.config.get_text_config().hidden_size
    if _EMBED in tensors:
        weight = read_tensors(tensors, {_EMBED: (shape.vocab_size, shape.hidden_size)})[_EMBED]
        weight = weight.to(target.device, target.dtype)
        ids = torch.arange(shape.vocab_size, device=target.device)
        if shape.hidden_size != hidden_size or not torch.equal(own(ids), weight):
            return lambda token_ids: torch.nn.functional.embedding(token_ids, weight)
    elif shape.hidden_size != hidden_size:
        raise ModelError(
            f"the head's layer has hidden_size {shape.hidden_size}, but the model has {hidden_size}, and the "
            f"head has no tensor {_EMBED}. The head was made for another model, or some of its files are missing"
        )
    return lambda token_ids: target.get_input_embeddings()(token_ids)


def _feature_layers(target: PreTrainedModel, listed: Any = None, before: int = 0) -> tuple[int, ...]:
    """Return the target layers whose hidden states an EAGLE-3 head reads; ``listed`` are the layers in its config.json.

    If they are None, EAGLE-3's default is used: 2, n / 2 and n - 3 for n layers. ``before`` is added to each listed
    layer, because checkpoint formats number layers differently.
    """
    count = target.config.get_text_config().num_hidden_layers
    if listed is None:
        if count < 6:
            raise ModelError(
                f"the head's config.json does not say which layers the head reads, and {count} model layers are too "
                "few for the default choice. Use the head that was trained for this model"
            )
        return 2, count // 2, count - 3
    if (
        not isinstance(listed, list)
        or not 1 <= len(listed) <= _MAX_LAYERS_READ
        or not all(isinstance(index, int) and not isinstance(index, bool) and 0 <= index < 1 << 15 for index in listed)
    ):
        raise ModelError(
            "eagle_aux_hidden_state_layer_ids in the head's config.json is not a list of layers: download the "
            "head again"
        )
    return tuple(before + index for index in listed)


# -- Medusa ----------------------------------------------------------------------------------------------------------


def _medusa(config: Config, tensors: Tensors, target: PreTrainedModel, blocks: Matches) -> Head:
    require_same(config, target, ("hidden_size", "vocab_size"))
    own, prefix = target.config.get_text_config(), blocks[0][1]
    num_heads, num_layers = (1 + max(int(each[part]) for each in blocks if each[1] == prefix) for part in (2, 3))
    has_outputs = any(f"{prefix}{head}.{num_layers}.weight" in tensors for head in range(num_heads))
    shared = None if has_outputs else TargetParts(target)
    with torch.device("meta"):
        head = MedusaHead(own.hidden_size, own.vocab_size, num_heads, num_layers, shared)
    names = {f"outputs.{i}.": f"{prefix}{i}.{num_layers}." for i in range(num_heads)}
    return _fill_head(head, tensors, {"blocks.": prefix, **names}, target)


# -- multi-token prediction ------------------------------------------------------------------------------------------

# The layer's prefix in a checkpoint with only the MTP module, as SGLang extracts it for DeepSeek models.
_ALONE = "model.layers.0."


def _mtp(
    config: Config,
    tensors: Tensors,
    target: PreTrainedModel,
    projects: Matches,
    parts: tuple[str, ...],
    hidden_first: bool = False,
) -> Head:
    """Build a draft head from a module for multi-token prediction (MTP) in the target's checkpoint.

    Some models have a module for each of the next tokens. Then the first module drafts all tokens. ``projects`` are the
    regex matches of the names of the modules' projection weights; their group, if any, is the layer number. ``parts``
    are prefixes of tensor names, with ``{}`` for the layer number: those of the decoder layer, the norm of the
    embedding, the norm of the hidden state and, if the module has one, the norm after the layer. With ``hidden_first``,
    the projection's input begins with the hidden state.
    """
    project = min(projects, key=lambda match: [int(group) for group in match.groups()])
    at, embedding, hidden, *last = (part.format(*project.groups()) for part in parts)
    require_same(config, target, ("hidden_size", "vocab_size", *(() if at == _ALONE else ("num_hidden_layers",))))
    read_positive(config, "num_nextn_predict_layers")
    names = {
        "layer.": at,
        "norm_embedding.": embedding,
        "norm_hidden.": hidden,
        "fc.": project[0].removesuffix("weight"),
    }
    names |= dict(zip(["norm."], last, strict=False))
    require_tensors(tensors, [f"{name}weight" for ours, name in names.items() if ours != "layer."])
    layers = mtp_layers(target)
    # The layer is a mixture of experts or dense. If neither fits, the error names the missing tensors.
    fitting = (each for each in layers if all(name in tensors for name in shapes_of(each.layer, at)))
    like = next(fitting, layers[0])
    head = FusedHead(
        target,
        like.layer,
        like.config,
        layer_type=like.layer_type,
        norm=like.norm,
        has_last_norm=bool(last),
        hidden_first=hidden_first,
    )
    return _fill_head(head, tensors, names, target)


_N = "model.layers.{}."
_MIMO = "model.mtp_layers.0."

# The first format that matches is used.
LAYOUTS: tuple[Layout, ...] = (
    Layout("EAGLE-3 (fc, midlayer)", (r"fc\.weight", r"midlayer\..*"), partial(_eagle3, names={})),
    Layout(
        "speculators, eagle3 (fc, layers.0 with hidden_norm)",
        (r"fc\.weight", r"layers\.0\.hidden_norm\.weight"),
        partial(_eagle3, names={"midlayer.": "layers.0."}),
    ),
    # EAGLE-3 has a midlayer, a reduced vocabulary, or norms before the attention of its first layer.
    Layout(
        "EAGLE and EAGLE-2 (fc, layers.0 without a norm before its attention)",
        (r"fc\.weight", r"layers\.0\.self_attn\.q_proj\.weight"),
        _eagle,
        excluded_names=("d2t", r"layers\.0\.(input_layernorm|hidden_norm)\.weight"),
    ),
    # medusa_model_legacy.py; text-generation-inference reads the same names (layers/medusa.py). The last layer of each
    # head is its output layer; heads of later versions have none and use the target's.
    Layout(
        "Medusa (0.0.linear.weight)",
        (r"(|medusa_head\.|medusa_heads\.|medusa\.)(\d{1,2})\.(\d{1,2})\.linear\.weight",),
        _medusa,
    ),
    # vLLM's deepseek_mtp.py, glm4_moe_mtp.py, mimo_mtp.py and ernie_mtp.py. The stored embeddings and output
    # layer are copies of the target's, according to DeepSeek's paper, and are not read.
    Layout(
        "MTP module of DeepSeek-V3 and GLM-4.5 (model.layers.N.eh_proj)",
        (r"model\.layers\.(\d+)\.eh_proj\.weight",),
        partial(_mtp, parts=(_N, f"{_N}enorm.", f"{_N}hnorm.", f"{_N}shared_head.norm.")),
    ),
    Layout(
        "MTP module of MiMo (model.mtp_layers.0.input_proj)",
        (r"model\.mtp_layers\.0\.input_proj\.weight",),
        partial(
            _mtp,
            hidden_first=True,
            parts=(_MIMO, *(f"{_MIMO}{name}_layernorm." for name in ("token", "hidden", "final"))),
        ),
    ),
    Layout(
        "MTP module of ERNIE 4.5 (model.mtp_linear_proj.0)",
        (r"model\.mtp_linear_proj\.0\.weight",),
        partial(_mtp, parts=("model.mtp_block.0.", "model.mtp_emb_norm.0.", "model.mtp_hidden_norm.0.")),
    ),
)

_LENGTH, _SHOWN = 2, 6


@torch.inference_mode()
def run_head(head: Head, target: PreTrainedModel) -> list[torch.Tensor]:
    """Run a draft head on fixed random hidden states and return all of its outputs, to test the head and its layers.

    Raises any error of the layers, and TypeError if they do not use the slot KV cache.
    """
    device, dtype = target.device, target.dtype
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _LENGTH, target.config.get_text_config().hidden_size, generator=generator)
    features = head.combine([hidden.to(device, dtype)] * len(head.feature_layers))
    cache = SlotKVCache(1, _LENGTH, device)
    rows = SlotRows.build(cache, [0], _LENGTH, device)
    logits, following = head(torch.zeros_like(rows.positions), features, rows.positions, slot_rows=rows)
    if head.attends and not cache.bytes_per_token:
        raise TypeError("the head's layers do not use slot attention")
    return [each for each in (features, logits, following) if each.numel()]


@torch.inference_mode()
def load_head(name_or_path: str | Path, model: PreTrainedModel, hub: HubOptions | None = None) -> Head:
    """Load a draft head for a target model from a directory or hub id, with the target's dtype and device.

    On a CPU, the head's layers are replaced by faster layers with the same outputs up to rounding. ``hub`` has the
    options of the download. Raises ModelError with advice if files are missing or damaged, the format is unknown, or
    the head was made for another model.
    """
    directory = find_directory(name_or_path, hub)
    config, tensors = read_config(directory), TensorFiles(directory)
    names = set(tensors)
    layout, matches = next(((each, found) for each in LAYOUTS if (found := each.matches(names))), (None, []))
    if layout is None:
        some = ", ".join(sorted(names)[:_SHOWN])
        known = "; ".join(each.name for each in LAYOUTS)
        raise ModelError(
            f"draft head {str(name_or_path)!r} has none of the supported layouts ({known}). It has "
            f"{len(names)} tensors: {some}{' ...' if len(names) > _SHOWN else ''}. Convert the head, or omit it"
        )
    try:
        head = layout.build(config, tensors, model, matches).eval().requires_grad_(False)
        run_head(head, model)
    except Exception as error:  # from an architecture or an unusual configuration
        why = f"the head cannot be used with {type(model).__name__}: {first_line(error)[:200]}. Download the head again"
        why = str(error) if isinstance(error, ModelError) else why
        raise ModelError(f"draft head {str(name_or_path)!r}, {layout.name}: {why}") from error
    if model.device.type == "cpu":
        tolerance = MAX_CHANGE if model.dtype == torch.float32 else MAX_CHANGE_LOW_PRECISION

        def outputs(head: Head) -> list[torch.Tensor]:
            return [each.float() for each in run_head(head, model)]

        replace_layers(head, CPU_LAYERS, expected=outputs(head), tolerance=tolerance, compute=outputs)
    return head
