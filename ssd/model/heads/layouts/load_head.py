"""Load a published draft head beside the model it was trained for."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from ssd.errors import ModelError, first_line
from ssd.model.heads.faster import make_faster
from ssd.model.heads.head import Head
from ssd.model.heads.layouts import LAYOUTS
from ssd.model.heads.layouts.files import TensorFiles, find_directory, read_config
from ssd.model.heads.probe import require_drivable
from ssd.text.load_tokenizer import HubOptions

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
    layout = next((each for each in LAYOUTS if each.matches(config, names)), None)
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
