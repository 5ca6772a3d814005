"""A model's files before it is loaded: whether they are there, and what its configuration says."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssd.errors import ModelError, first_line
from ssd.text.hub import go_offline_without_a_hub, is_offline
from ssd.text.load_tokenizer import HubOptions

log = logging.getLogger(__name__)

_INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_ADVICE = "give a Hugging Face model directory, or the id of a model, which is OWNER/NAME"


def find_config(model: str, hub: HubOptions) -> Path:
    """The path of a model's config.json on this machine: in its directory, in the hub's cache, or fetched now.

    Raises ModelError, within seconds, where there is none.
    """
    directory = Path(model)
    if directory.is_dir():
        path = directory / "config.json"
        if not path.exists():
            raise ModelError(f"{model} has no config.json: {_ADVICE}")
        return path
    if directory.exists():
        raise ModelError(f"{model} is a file: {_ADVICE}")
    if directory.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") > 1:
        raise ModelError(f"there is no directory {model}: {_ADVICE}")
    return _fetched(model, "config.json", hub)


def check_tokenizer_is_there(tokenizer: str, hub: HubOptions) -> None:
    """Raise ModelError, within seconds, where an id names no tokenizer that can be had; paths are not looked at."""
    if Path(tokenizer).exists():
        return
    try:
        _fetched(tokenizer, "tokenizer_config.json", hub)
    except ModelError as error:
        try:
            _fetched(tokenizer, "tokenizer.json", hub)  # which may be all there is
        except ModelError:
            raise error from None


def find_generation_config(model: str, hub: HubOptions) -> Path | None:
    """The path of a model's generation_config.json, found as `find_config` finds the other; None where it has none."""
    directory = Path(model)
    if directory.is_dir():
        path = directory / "generation_config.json"
        return path if path.exists() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "generation_config.json", **hub.file_arguments()))
    except Exception as error:  # not there, not in the cache, or whatever a network may do
        log.debug("no generation_config.json of %s", model, exc_info=error)
        return None


def read_config(path: Path) -> Mapping[str, Any]:
    """A config.json; raises ModelError where it is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is no JSON object: {_ADVICE}")
    return content


def context_of(config: Mapping[str, Any]) -> int | None:
    """Longest text that a configuration allows, in tokens; None where it does not say, or not in a way known here."""
    text = config.get("text_config")
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = (text if isinstance(text, dict) else config).get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None


def check_weights_are_there(model: str) -> None:
    """Raise ModelError where a directory has no weights, or not all files that its index names. Ids pass."""
    directory = Path(model)
    if not directory.is_dir():
        return
    for path in (directory / name for name in _INDEX_NAMES):
        if path.exists():
            try:
                named = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
                missing = [name for name in named if not (directory / name).exists()]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(f"{path} cannot be read: {first_line(error)}") from error
            if missing:
                raise ModelError(
                    f"{model} lacks {len(missing)} of the {len(named)} files that {path.name} names, {missing[0]} "
                    "among them: copy or download it again"
                )
            return
    if not any(path.suffix in _WEIGHT_SUFFIXES for path in directory.iterdir()):
        raise ModelError(f"{model} has a config.json, but no weights (*.safetensors): {_ADVICE}")


def _fetched(model: str, name: str, hub: HubOptions) -> Path:
    failure = go_offline_without_a_hub()
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    arguments = hub.file_arguments()
    try:
        found = try_to_load_from_cache(model, name, **arguments)
        if isinstance(found, str) and is_offline():
            if failure is not None:
                log.warning("%s: using %s as it is in the hub's cache here", failure, model)
            return Path(found)
        if is_offline():
            raise ModelError(
                f"{model!r} is neither a directory here nor in the hub's cache, and "
                f"{failure or '$HF_HUB_OFFLINE forbids to ask the hub'}: {_ADVICE}"
            )
        return Path(hf_hub_download(model, name, **arguments))
    except HFValidationError as error:
        raise ModelError(f"{model!r} is neither a directory here nor a model's id: {_ADVICE}") from error
    except ModelError:
        raise
    except Exception as error:  # of the client, of its HTTP library, of the system
        if isinstance(found, str):
            log.warning("the hub did not say whether %s has changed (%s): using what is here", model, first_line(error))
            return Path(found)
        raise ModelError(
            f"{model!r} is not a directory here, and the hub does not give it: {first_line(error)[:300]}; "
            f"{_ADVICE}. Models behind a gate need $HF_TOKEN"
        ) from error
