"""LoRA adapters: read and judged by peft, computed by layers of our own that mix them in one pass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ssd.errors import ModelError, first_line
from ssd.model.layers.adapted_linear import AdaptedLinear, Addition, Rows
from ssd.model.layers.replace import PROBE_LENGTH, plain_logits
from ssd.model.ways.find_way import PROBE_SLOTS, PROBE_WIDTH, error_of
from ssd.model.ways.slot_target import SlotTarget

_UNUSED = (
    "use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "alora_invocation_tokens",
    "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "velora_config", "monteclora_config",
    "arrow_config", "kasa_config",
)  # fmt: skip
"""Settings of an adapter that make it more than additions to linear layers."""


MERGE = "merge it into the weights (peft's merge_and_unload) and serve these"


@dataclass(slots=True)
class Adapters:
    """Adapters of one model: what they add to which of its layers, and what peft says of the probe with each."""

    names: tuple[str, ...] = ()
    additions: dict[str, dict[str, Addition]] = field(default_factory=dict)
    """By the layer's name, then the adapter's."""
    expected: dict[str | None, list[torch.Tensor]] = field(default_factory=dict)
    """Logits of the probe by adapter; None: of the model without one."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.names)

    def attach(self, target: SlotTarget, *, tolerance: float) -> None:
        """Put the additions into the layers of a target's model, and check that mixed passes say what peft said.

        tolerance : greatest relative error of logits that is put down to rounding. Raises ModelError.
        """
        model, rows = target.model, Rows()
        for path, additions in self.additions.items():
            parent, _, name = path.rpartition(".")
            holder = model.get_submodule(parent)
            setattr(holder, name, AdaptedLinear(getattr(holder, name), additions, rows))
        target.take_adapters(self.names, rows)
        probe = SlotTarget(model, PROBE_SLOTS, PROBE_LENGTH, PROBE_WIDTH)
        probe.take_adapters(self.names, rows)
        everyone = (None, *self.names)
        for one, other in zip(everyone, (*self.names, None), strict=True):
            probe.adapters[PROBE_SLOTS - 1], probe.adapters[0] = one, other
            try:
                error = error_of(probe, [self.expected[one][0], self.expected[other][1]])
                reason = f"logits differ from peft's by {error:.2g}"
            except ValueError as failure:
                error, reason = float("inf"), first_line(failure)
            if not error < tolerance:
                raise ModelError(
                    f"{type(model).__name__} with adapter {one or other!r} does not compute what peft computes: "
                    f"{reason}: {MERGE}"
                )


def load_adapters(model: PreTrainedModel, paths: Mapping[str, str]) -> Adapters:
    """Read adapters for ``model``, which is left as it was.

    paths : a directory, or an id of the hub, by the adapter's name. Raises ModelError for what is no LoRA adapter of
    linear layers of this model.
    """
    if not paths:
        return Adapters()
    try:
        import peft  # noqa: F401  # said here and not in the middle of it
    except ModuleNotFoundError:
        raise ModelError("LoRA adapters need the peft package: pip install 'ssd-serving[lora]'") from None
    found = Adapters(names=tuple(paths))
    found.expected[None] = plain_logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between peft and transformers
        wrapped = _wrapped(model, paths)
    for name in paths:
        wrapped.set_adapter(name)
        found.expected[name] = plain_logits(model)
    for path, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            found.additions[path] = _additions(path, layer)
    wrapped.unload()
    return found


def _wrapped(model: PreTrainedModel, paths: Mapping[str, str]) -> Any:
    """The model with all adapters in peft's own layers."""
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
                f"adapter {name!r} of {path} was made for another model: {len(missing)} of its weights are missing, "
                f"{len(result.unexpected_keys)} have no place"
            )
    return wrapped.eval()


def _require_lora(name: str, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise ModelError(f"adapter {name!r} is of kind {kind}: only LoRA adapters are served")
    used = [setting for setting in _UNUSED if getattr(config, setting, None)]
    if used or getattr(config, "bias", "none") != "none":
        raise ModelError(f"adapter {name!r} changes more than linear layers ({', '.join(used) or 'bias'}): {MERGE}")


def _additions(path: str, layer: Any) -> dict[str, Addition]:
    if type(layer.get_base_layer()) is not torch.nn.Linear or layer.lora_embedding_A:
        kind = type(layer.get_base_layer()).__name__
        raise ModelError(f"an adapter changes {path}, a {kind}: only adapters of linear layers are served")
    return {
        name: Addition(down.weight.detach(), layer.lora_B[name].weight.detach(), float(layer.scaling[name]))
        for name, down in layer.lora_A.items()
    }
