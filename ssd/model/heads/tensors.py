"""Reading and validation of a draft head's checkpoint: its config.json and its tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from ssd.errors import ModelError, first_line
from ssd.model.heads.networks import Head
from ssd.text.load_tokenizer import HubOptions

Config = Mapping[str, Any]  # the unvalidated content of a checkpoint's config.json
Tensors = Mapping[str, torch.Tensor]  # all tensors of a checkpoint by name, each read on access


_PATTERNS = ("config.json", "*.safetensors", "*.bin", "*.pt")
_PICKLES = ("*.bin", "*.pt")
_EXPERT = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)$")
_NAMED = 4
_ADVICE = "Give a directory with config.json and the weights of a draft head, or the id of one on the hub"


def find_directory(name_or_path: str | Path, hub: HubOptions | None = None) -> Path:
    """Return the directory of a checkpoint; a hub id is downloaded first. Raises ModelError if this fails."""
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"draft head {str(path)!r} is a file, not a directory. {_ADVICE}")
    from huggingface_hub import snapshot_download

    try:
        arguments = (hub or HubOptions()).file_arguments()
        return Path(snapshot_download(str(name_or_path), allow_patterns=list(_PATTERNS), **arguments))
    except Exception as error:  # from the hub client, its HTTP library or the system
        raise ModelError(
            f"draft head {str(name_or_path)!r} cannot be downloaded: {first_line(error)}. {_ADVICE}"
        ) from error


def read_config(directory: Path) -> Config:
    """Return the content of a checkpoint's config.json; raises ModelError if it cannot be read."""
    path = directory / "config.json"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"draft head {directory}: config.json cannot be read: {first_line(error)}. {_ADVICE}"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"draft head {directory}: config.json is not a JSON object. {_ADVICE}")
    return content


class TensorFiles(Mapping[str, torch.Tensor]):
    """All tensors of a checkpoint by name, from its safetensors files or, if there are none, its pickled files.

    If the weights of a mixture of experts are stored as one tensor per expert, they can also be read as the stacked
    tensor of transformers, although iteration does not yield its name. Raises ModelError if there are no tensors or a
    file cannot be read. Pickled code is never run.
    """

    def __init__(self, directory: Path) -> None:
        self._paths: dict[str, Path] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    self._paths.update(dict.fromkeys(file.keys(), path))
            except Exception as error:  # SafetensorError, and others for damaged headers
                raise ModelError(_unreadable_message(path, error)) from error
        if not self._paths:
            for path in sorted(path for pattern in _PICKLES for path in directory.glob(pattern)):
                self._loaded.update(_load_pickle(path))
        if not self:
            raise ModelError(f"draft head {directory} has no weights (*.safetensors, *.bin, *.pt). {_ADVICE}")

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._loaded:
            return self._loaded[name]
        if name not in self._paths and (parts := self._experts(name)):
            try:
                return torch.stack([torch.cat([self[part] for part in each]) for each in parts])
            except RuntimeError as error:
                raise ModelError(f"the head's experts of {name} differ in shape: download the head again") from error
        path = self._paths[name]
        try:
            with safe_open(path, "pt") as file:
                # A copy, because the tensor is mapped from the file, which may change later.
                tensor: torch.Tensor = file.get_tensor(name).clone()
        except Exception as error:
            raise ModelError(_unreadable_message(path, error)) from error
        return tensor

    def __contains__(self, name: object) -> bool:  # without reading it
        return name in self._paths or name in self._loaded or (isinstance(name, str) and bool(self._experts(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths or self._loaded)

    def __len__(self) -> int:
        return len(self._paths or self._loaded)

    def _experts(self, name: str) -> list[list[str]]:
        """Return, for each expert, the stored tensor names that make up the stacked tensor ``name``; may be empty."""
        if (stack := _EXPERT.match(name)) is None:
            return []
        parts = ("gate_proj", "up_proj") if stack[2] == "gate_up_proj" else (stack[2],)
        names = ([f"{stack[1]}{index}.{part}.weight" for part in parts] for index in count())
        return list(takewhile((self._paths.keys() | self._loaded.keys()).issuperset, names))


def _load_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any error of the unpickler for damaged bytes
        raise ModelError(_unreadable_message(path, error)) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} has no named tensors: it is not a draft head. {_ADVICE}")
    return {name: each for name, each in content.items() if isinstance(name, str) and isinstance(each, torch.Tensor)}


def _unreadable_message(path: Path, error: Exception) -> str:
    return f"{path} cannot be read: {first_line(error)[:200]}. Copy or download it again"


def read_positive(config: Config, name: str) -> int | None:
    """Return a positive integer of a draft head's config.json; None if missing. Raises ModelError for other values."""
    value: Any = config.get(name)
    if value is not None and (type(value) is not int or not 1 <= value < 1 << 31):
        raise ModelError(
            f"{name} in the head's config.json must be a positive integer, got {str(value)[:40]!r}: download "
            "the head again"
        )
    return value


def require_same(config: Config, target: PreTrainedModel, fields: Iterable[str]) -> None:
    """Raise ModelError if one of the ``fields`` of a draft head's configuration differs from the target's."""
    own = target.config.get_text_config()
    for field in fields:
        wanted, found = getattr(own, field, None), read_positive(config, field)
        if found is not None and wanted is not None and found != wanted:
            raise ModelError(
                f"the head was made for another model: its config.json says {field} {found}, but this model has "
                f"{wanted}. Use the head that was trained for this model"
            )


def read_tensors(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Read a checkpoint's tensors by name; raises ModelError if a tensor is missing or has another shape."""
    require_tensors(tensors, shapes)
    found = {name: tensors[name] for name in shapes}
    for name, tensor in found.items():
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ModelError(
                f"the head's tensor {name} is quantised to {tensor.dtype}, which is not supported: use another head"
            )
        if tensor.shape != shapes[name]:
            raise ModelError(
                f"the head's tensor {name} has the shape {tuple(tensor.shape)}, expected {tuple(shapes[name])}: use "
                "the head that was trained for this model, or download it again"
            )
    return found


def require_tensors(names: Collection[str], wanted: Iterable[str]) -> None:
    absent = [name for name in wanted if name not in names]
    if absent:
        listed = ", ".join(absent[:_NAMED]) + (" ..." if len(absent) > _NAMED else "")
        raise ModelError(
            f"the head lacks {len(absent)} of its tensors ({listed}): some of its files are missing, or it was "
            "made for another kind of model. Download the head again"
        )


def shapes_of(module: nn.Module, prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {prefix + name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def assign_tensors(head: Head, tensors: Mapping[str, torch.Tensor], target: PreTrainedModel) -> None:
    """Assign a checkpoint's tensors to a draft head on the meta device, converted to the target's device and dtype.

    Buffers keep the dtype that the head declares.
    """
    buffers = {name: buffer.dtype for name, buffer in head.named_buffers()}
    state = {
        name: tensor.to(device=target.device, dtype=buffers.get(name, target.dtype)) for name, tensor in tensors.items()
    }
    head.load_state_dict(state, assign=True)
    if head.rotary is not None:
        head.set_rotary(head.config, target.device)  # they were created without data on the meta device
