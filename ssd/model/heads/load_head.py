"""Load a published draft head beside the model it was trained for: whether it can be driven, and by faster layers."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ssd.errors import ModelError, first_line
from ssd.model.heads.head import Head, ParallelHead, RecurrentHead
from ssd.model.heads.layouts import LAYOUTS
from ssd.model.heads.tensors import TensorFiles, find_directory, read_config
from ssd.model.kv.kv_cache import SlotKVCache, SlotRows
from ssd.model.layers.replace import agrees
from ssd.model.ways.find_way import CPU_LAYERS
from ssd.text.load_tokenizer import HubOptions

_LENGTH = 2


@torch.inference_mode()
def say(head: Head, target: PreTrainedModel) -> list[torch.Tensor]:
    """All that a head computes of hidden states that are always the same, as the engine would have it computed.

    Raises whatever its layers raise; TypeError where they attend to something else than the slots.
    """
    device, dtype = target.device, target.dtype
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _LENGTH, target.config.get_text_config().hidden_size, generator=generator)
    features = head.combine([hidden.to(device, dtype)] * len(head.feature_layers))
    if isinstance(head, ParallelHead):
        return [features, head(features[:, -1])]
    assert isinstance(head, RecurrentHead)
    cache = SlotKVCache(1, _LENGTH, device)
    rows = SlotRows.build(cache, [0], _LENGTH, device)
    logits, following = head(torch.zeros_like(rows.positions), features, rows.positions, slot_rows=rows)
    if not cache.bytes_per_token:
        raise TypeError("its layers attend in another way")
    return [features, logits, following]


def require_drivable(head: Head, target: PreTrainedModel) -> None:
    """Raise ModelError where the head cannot be driven beside its target."""
    try:
        say(head, target)
    except Exception as failure:  # whatever an architecture, or an odd configuration, makes of it
        raise ModelError(
            f"a {type(head).__name__} cannot be driven beside {type(target).__name__}: {first_line(failure)}"
        ) from failure


log = logging.getLogger(__name__)

_MOST_ERROR = 1e-3
_MOST_ERROR_LOW_PRECISION = 0.2
"""Relative, as of a target whose layers are replaced."""


def make_faster(head: Head, target: PreTrainedModel) -> None:
    """On a CPU, replace the head's layers by those that compute the same faster, and check that it says the same.

    Else it is left as it was. A pass over several rows or positions takes two thirds of the time. O(weights).
    """
    if target.device.type != "cpu":
        return
    wanted = say(head, target)
    replaced = [each for replace in CPU_LAYERS for each in replace(head)]
    tolerance = _MOST_ERROR if target.dtype == torch.float32 else _MOST_ERROR_LOW_PRECISION
    try:
        if all(_same(*pair, tolerance) for pair in zip(say(head, target), wanted, strict=True)):
            return
        reason = "what it says differs"
    except Exception as failure:  # a head that reaches into its layers, for one
        reason = first_line(failure)
    log.warning("the layers of the draft head stay as they are, which is slower: %s", reason)
    for parent, name, again in replaced:
        setattr(parent, name, again())


def _same(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    can_be = wanted.isfinite()  # tokens that cannot be drafted have minus infinity
    return torch.equal(found.isfinite(), can_be) and agrees(found[can_be], wanted[can_be], tolerance)


_SHOWN = 6


@torch.inference_mode()
def load_head(name_or_path: str | Path, model: PreTrainedModel, hub: HubOptions | None = None) -> Head:
    """The draft head of a directory or hub id, in the dtype and on the device of ``model``, ready to draft for it.

    hub : where an id is fetched from. Raises ModelError with what to do: files that are not there or torn, a layout
    that is not known, a head of another model.
    """
    directory = find_directory(name_or_path, hub)
    config, tensors = read_config(directory), TensorFiles(directory)
    names = set(tensors)
    layout = next((each for each in LAYOUTS if each.matches(names)), None)
    if layout is None:
        some = ", ".join(sorted(names)[:_SHOWN])
        known = "; ".join(each.name for each in LAYOUTS)
        raise ModelError(
            f"draft head {str(name_or_path)!r} has none of the layouts known here, which are: {known}. It has "
            f"{len(names)} tensors: {some}{' ...' if len(names) > _SHOWN else ''}. Convert it, or leave it out"
        )
    try:
        head = layout.build(config, tensors, model).eval().requires_grad_(False)
        require_drivable(head, model)
    except ModelError as error:
        raise ModelError(f"draft head {str(name_or_path)!r}, {layout.name}: {error}") from error
    # A size of 0, numbers that contradict each other: whatever torch says to what a configuration describes.
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ModelError(
            f"draft head {str(name_or_path)!r}, {layout.name}: its config.json and its tensors do not make a head: "
            f"{first_line(error)[:200]}. Download it again"
        ) from error
    make_faster(head, model)
    return head
