"""The files of a draft head: its configuration, and its tensors, each read when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from ssd.errors import ModelError, first_line
from ssd.model.heads.layouts.layout import Config
from ssd.text.load_tokenizer import HubOptions

_PATTERNS = ("config.json", "*.safetensors", "*.bin", "*.pt")
_PICKLES = ("*.bin", "*.pt")
_ADVICE = "Give a directory with config.json and the weights of a draft head, or the id of one on the hub"


def find_directory(name_or_path: str | Path, hub: HubOptions | None = None) -> Path:
    """Where the files are: the directory itself, or that of the hub's cache, into which they are fetched.

    Raises ModelError.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"draft head {str(path)!r} is a file. {_ADVICE}")
    from huggingface_hub import snapshot_download

    try:
        arguments = (hub or HubOptions()).file_arguments()
        return Path(snapshot_download(str(name_or_path), allow_patterns=list(_PATTERNS), **arguments))
    except Exception as error:  # of the client, of its HTTP library, of the system
        raise ModelError(f"draft head {str(name_or_path)!r} cannot be had: {first_line(error)}. {_ADVICE}") from error


def read_config(directory: Path) -> Config:
    """Its config.json; raises ModelError where there is none."""
    path = directory / "config.json"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"draft head {directory}: config.json cannot be read: {first_line(error)}. {_ADVICE}"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"draft head {directory}: config.json is no JSON object. {_ADVICE}")
    return content


class TensorFiles(Mapping[str, torch.Tensor]):
    """All tensors of a directory by name: of its safetensors files, or where there are none of its pickled ones.

    Raises ModelError where there are none, and where a file cannot be read. Nothing that is pickled is run.
    """

    def __init__(self, directory: Path) -> None:
        self._paths: dict[str, Path] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    self._paths.update(dict.fromkeys(file.keys(), path))
            except Exception as error:  # SafetensorError, and what else a damaged header makes of itself
                raise ModelError(_torn(path, error)) from error
        if not self._paths:
            for path in sorted(path for pattern in _PICKLES for path in directory.glob(pattern)):
                self._loaded.update(_unpickled(path))
        if not self:
            raise ModelError(f"draft head {directory} has no weights (*.safetensors, *.bin, *.pt). {_ADVICE}")

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._loaded:
            return self._loaded[name]
        path = self._paths[name]
        try:
            with safe_open(path, "pt") as file:
                # A copy: what is read lies in the file, which somebody may change later.
                tensor: torch.Tensor = file.get_tensor(name).clone()
        except Exception as error:
            raise ModelError(_torn(path, error)) from error
        return tensor

    def __contains__(self, name: object) -> bool:  # without reading it
        return name in self._paths or name in self._loaded

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths or self._loaded)

    def __len__(self) -> int:
        return len(self._paths or self._loaded)


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever damaged bytes make the unpickler say
        raise ModelError(_torn(path, error)) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no tensors by name: it is no draft head's. {_ADVICE}")
    return {name: each for name, each in content.items() if isinstance(name, str) and isinstance(each, torch.Tensor)}


def _torn(path: Path, error: Exception) -> str:
    return f"{path} cannot be read: {first_line(error)[:200]}. Copy or download it again"
