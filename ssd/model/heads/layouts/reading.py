"""Read the tensors and numbers of a published head, and say what does not fit."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ssd.errors import ModelError
from ssd.model.heads.layouts.layout import Config, Tensors

_NAMED = 4
_SCALE = "_scale_inv"
_BLOCK = 128
"""Rows and columns that share a scale in DeepSeek's checkpoints of eight bits."""
_EXPERT = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)$")


def number(config: Config, *names: str) -> int | None:
    """The first of these fields that the configuration has; None where it has none. Raises ModelError unless >= 1."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
                raise ModelError(f"its config.json says {name}: {str(value)[:40]!r}: a number is expected")
            return value
    return None


def require_same(config: Config, target: PreTrainedModel, fields: Iterable[str]) -> None:
    """Raise ModelError where the head's configuration has one of these fields with another value than the target's."""
    own = target.config.get_text_config()
    for field in fields:
        wanted, found = getattr(own, field, None), number(config, field)
        if found is not None and wanted is not None and found != wanted:
            raise ModelError(
                f"it was made for another model: its config.json says {field} {found}, the model has "
                f"{wanted}. Take the head that was trained for this model"
            )


def read(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The tensors of these names and shapes.

    Experts that are stored one by one are stacked, weights of eight bits with a scale for each block are multiplied
    out. Raises ModelError that names what is missing, or has another shape.
    """
    require(tensors, shapes)
    found = {}
    for name, shape in shapes.items():
        found[name] = tensor = _read(tensors, name, shape)
        if tensor.shape != shape:
            raise ModelError(
                f"its tensor {name} has the shape {tuple(tensor.shape)}, expected {tuple(shape)}: it was "
                "made for another model, or its files do not belong together"
            )
    return found


def require(names: Collection[str], wanted: Iterable[str]) -> None:
    """Raise ModelError unless there is a tensor for every name that is wanted."""
    absent = [name for name in wanted if not has(names, name)]
    if absent:
        listed = ", ".join(absent[:_NAMED]) + (" ..." if len(absent) > _NAMED else "")
        raise ModelError(
            f"it lacks {len(absent)} of its tensors, {listed}: some of its files are not there, or it was "
            "made for another kind of model. Download it again"
        )


def has(names: Collection[str], name: str) -> bool:
    """Whether a tensor is there, or the parts it is made of."""
    if name in names:
        return True
    expert = _EXPERT.match(name)
    return expert is not None and all(f"{expert[1]}0.{part}.weight" in names for part in _parts(expert[2]))


def shapes_of(module: nn.Module, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Names, with ``prefix``, and shapes of all that a module keeps."""
    return {prefix + name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def fill(module: nn.Module, tensors: Mapping[str, torch.Tensor], target: PreTrainedModel) -> None:
    """Give a module, made on the meta device, its tensors; parameters in the target's dtype, on its device."""
    buffers = {name: buffer.dtype for name, buffer in module.named_buffers()}
    state = {
        name: tensor.to(device=target.device, dtype=buffers.get(name, target.dtype))
        for name, tensor in tensors.items()
    }  # fmt: skip
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False).eval()


def _parts(name: str) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)


def _read(tensors: Tensors, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name in tensors:
        return _plain(tensors, name)
    expert = _EXPERT.match(name)
    assert expert is not None
    names = [[f"{expert[1]}{index}.{part}.weight" for part in _parts(expert[2])] for index in range(shape[0])]
    require(tensors, [name for each in names for name in each])
    try:
        return torch.stack([torch.cat([_plain(tensors, name) for name in each]) for each in names])
    except RuntimeError as error:
        raise ModelError(f"its experts {expert[1]}* differ in shape: its files are not whole") from error


def _plain(tensors: Tensors, name: str) -> torch.Tensor:
    tensor = tensors[name]
    if name + _SCALE not in tensors:
        if not tensor.dtype.is_floating_point:
            raise ModelError(f"its tensor {name} is quantised to {tensor.dtype}, which is not read")
        return tensor
    scale: Any = tensors[name + _SCALE]
    if tensor.dim() != 2 or scale.shape != tuple(-(-size // _BLOCK) for size in tensor.shape):
        raise ModelError(f"its tensor {name} and its scales do not belong together: download it again")
    for axis in (0, 1):
        scale = scale.repeat_interleave(_BLOCK, axis).narrow(axis, 0, tensor.shape[axis])
    whole: torch.Tensor = tensor.float() * scale.float()
    return whole
