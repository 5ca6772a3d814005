"""LoRA adapters: loaded and validated by peft, computed by SSD's layers, which mix adapters in one forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ssd.errors import ModelError, first_line
from ssd.model.layers.replace import PROBE_LENGTH, reference_logits
from ssd.model.runners.adapted_linear import AdaptedLinear, AdapterRows, LoraWeights
from ssd.model.runners.select_runner import PROBE_SLOTS, PROBE_WIDTH, measure_error
from ssd.model.runners.slot_runner import SlotRunner

# The settings of adapters that change more than linear layers.
_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "layer_replication",
    "velora_config",
    "monteclora_config",
    "arrow_config",
    "kasa_config",
)


MERGE = "merge the adapter into the weights (peft's merge_and_unload) and serve the result"


@dataclass(slots=True)
class Adapters:
    """The LoRA adapters of one model."""

    names: tuple[str, ...] = ()
    lora_weights: dict[str, dict[str, LoraWeights]] = field(default_factory=dict)  # by layer name and adapter name
    # Peft's logits for `probe_texts`; None: no adapter.
    expected: dict[str | None, list[torch.Tensor]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.names)

    def attach(self, target: SlotRunner, *, tolerance: float) -> None:
        """Add the LoRA adapters to the layers of a target's model, and check that they reproduce peft's logits.

        The check mixes adapters in one batch. Raises ModelError if the relative error exceeds ``tolerance``.
        """
        model, rows = target.model, AdapterRows()
        for path, additions in self.lora_weights.items():
            parent, _, name = path.rpartition(".")
            holder = model.get_submodule(parent)
            setattr(holder, name, AdaptedLinear(getattr(holder, name), additions, rows))
        target.enable_adapters(self.names, rows)
        probe = SlotRunner(model, PROBE_SLOTS, PROBE_LENGTH, PROBE_WIDTH)
        probe.enable_adapters(self.names, rows)
        everyone = (None, *self.names)
        for one, other in zip(everyone, (*self.names, None), strict=True):
            probe.adapters[PROBE_SLOTS - 1], probe.adapters[0] = one, other
            try:
                error = measure_error(probe, [self.expected[one][0], self.expected[other][1]])
                reason = f"logits differ from peft's by {error:.2g}"
            except ValueError as failure:
                error, reason = float("inf"), first_line(failure)
            if not error < tolerance:
                raise ModelError(
                    f"{type(model).__name__} does not reproduce peft's logits with adapter {one or other!r} "
                    f"({reason}): {MERGE}"
                )


def load_adapters(model: PreTrainedModel, paths: Mapping[str, str]) -> Adapters:
    """Load LoRA adapters for ``model``, which stays unchanged.

    ``paths`` maps each adapter's name to a directory or hub id. Raises ModelError if an adapter is not a LoRA adapter
    of linear layers of this model.
    """
    if not paths:
        return Adapters()
    try:
        import peft  # noqa: F401  # a missing package is reported here, before any work
    except ModuleNotFoundError:
        raise ModelError("LoRA adapters need the peft package: pip install 'ssd-serving[lora]'") from None
    found = Adapters(names=tuple(paths))
    found.expected[None] = reference_logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated function of transformers
        wrapped = _load_with_peft(model, paths)
    for name in paths:
        wrapped.set_adapter(name)
        found.expected[name] = reference_logits(model)
    for path, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            found.lora_weights[path] = _lora_weights(path, layer)
    wrapped.unload()
    return found


def _load_with_peft(model: PreTrainedModel, paths: Mapping[str, str]) -> Any:
    from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict

    wrapped: Any = None
    for name, path in paths.items():
        try:
            config: Any = PeftConfig.from_pretrained(path)
            _require_lora(name, config)
            if wrapped is None:
                wrapped = PeftModel(model, config, adapter_name=name)
            else:
                wrapped.add_adapter(name, config)
            weights = load_peft_weights(path, device=str(model.device))
            result = set_peft_model_state_dict(wrapped, weights, adapter_name=name)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, SafetensorError) as error:
            raise ModelError(f"adapter {name!r} of {path} cannot be used: {first_line(error)[:300]}") from error
        missing = [key for key in result.missing_keys if f".{name}." in key]
        if missing or result.unexpected_keys:
            raise ModelError(
                f"adapter {name!r} of {path} was made for another model: the adapter lacks {len(missing)} weights, "
                f"and has {len(result.unexpected_keys)} weights that the model does not use. Use an adapter of this "
                "model"
            )
    return wrapped.eval()


def _require_lora(name: str, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise ModelError(
            f"adapter {name!r} is of kind {kind}, but only LoRA adapters are supported: use a LoRA adapter"
        )
    used = [setting for setting in _UNSUPPORTED if getattr(config, setting, None)]
    if used or getattr(config, "bias", "none") != "none":
        raise ModelError(f"adapter {name!r} changes more than linear layers ({', '.join(used) or 'bias'}): {MERGE}")


def _lora_weights(path: str, layer: Any) -> dict[str, LoraWeights]:
    if type(layer.get_base_layer()) is not torch.nn.Linear or layer.lora_embedding_A:
        kind = type(layer.get_base_layer()).__name__
        raise ModelError(
            f"an adapter changes {path}, a {kind}, but only adapters of linear layers are supported: {MERGE}"
        )
    return {
        name: LoraWeights(down.weight.detach(), layer.lora_B[name].weight.detach(), float(layer.scaling[name]))
        for name, down in layer.lora_A.items()
    }
