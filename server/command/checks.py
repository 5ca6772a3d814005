"""Checks before the model is loaded, within about a second, of everything that would make the start fail later."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.command.arguments import Options
from server.command.options import CacheOptions, ModelOptions
from ssd.errors import ConfigError, ModelError, first_line
from ssd.text.load_tokenizer import HubOptions, go_offline_without_a_hub, is_offline

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec

log = logging.getLogger(__name__)

_INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_GGUF = b"GGUF"
_ENCODERS = tuple(
    """Albert Bert BigBird Camembert CLIP ConvBert Deberta DistilBert Electra ErnieFor ErnieModel Esm Eurobert Flaubert
    Longformer MPNet ModernBert NomicBert Roberta RoFormer SqueezeBert XLMRoberta XLNetModel""".split()
)
"""Prefixes of the class names of encoder models, which cannot generate text."""
_ENCODER_HEADS = tuple(
    """ForMaskedLM ForSequenceClassification ForTokenClassification ForQuestionAnswering ForMultipleChoice
    ForNextSentencePrediction""".split()
)
_DECODER_HEADS = ("ForCausalLM", "LMHeadModel", "Decoder")
_ADVICE = "give a Hugging Face model directory, or the id of a model, which is OWNER/NAME"


def find_config(model: str, hub: HubOptions) -> Path:
    """Return the path of a model's config.json, which is downloaded from the hub if needed.

    Raises ModelError if the model has no such file, or if the download fails.
    """
    directory = Path(model)
    if directory.is_dir():
        path = directory / "config.json"
        if not path.exists():
            raise ModelError(f"{model} has no config.json: {_describe_other_kind(directory) or _ADVICE}")
        return path
    if directory.exists():
        kind = "a GGUF file, which ssd-serve cannot load" if _starts_with(directory, _GGUF) else "a file"
        raise ModelError(f"{model} is {kind}: {_ADVICE}")
    if directory.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") > 1:
        raise ModelError(f"there is no directory {model}: {_ADVICE}")
    return _fetch_file(model, "config.json", hub)


def read_config(path: Path) -> Mapping[str, Any]:
    _require_no_pointer(path)
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object: {_ADVICE}")
    return content


def read_context_length(config: Mapping[str, Any]) -> int | None:
    """Return the maximum context length in tokens from a model's config.json; None if no known field contains it."""
    text = config.get("text_config")
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = (text if isinstance(text, dict) else config).get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _starts_with(path: Path, beginning: bytes) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(beginning)) == beginning
    return False


def _require_no_pointer(path: Path) -> None:
    if _starts_with(path, _LFS_POINTER):
        raise ModelError(f"{path} is a Git LFS pointer and not the file itself: run `git lfs pull` in its directory")


def _describe_other_kind(directory: Path) -> str:
    """Return what a directory without config.json contains instead, e.g. GGUF files, and a remedy; "" if unknown."""
    if (adapter := directory / "adapter_config.json").exists():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if base := json.loads(adapter.read_bytes()).get("base_model_name_or_path"):
                return f"it is a LoRA adapter of {base}. Serve that model with --lora-modules NAME={directory}"
        return f"it is a LoRA adapter. Serve its base model with --lora-modules NAME={directory}"
    if any(_starts_with(path, _GGUF) for path in directory.glob("*.gguf")):
        return f"it has GGUF files, which ssd-serve cannot load. {_ADVICE[0].upper()}{_ADVICE[1:]}"
    return ""


def check_generates(model: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError if the model is an encoder, a classifier, or an encoder-decoder, which cannot continue text."""
    kinds = config.get("architectures")
    named = [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list) else []
    if not named or config.get("is_decoder") is True or any(kind.endswith(_DECODER_HEADS) for kind in named):
        return
    if config.get("is_encoder_decoder") is True:
        found = "a model of an encoder and a decoder"
    elif all(kind.endswith(_ENCODER_HEADS) or kind.startswith(_ENCODERS) for kind in named):
        found = "an encoder or a classifier"
    else:
        return
    raise ModelError(f"{model} is {found} ({', '.join(named)}), which cannot generate text: {_ADVICE}")


def check_weights_are_there(model: str) -> None:
    """Raise ModelError if a model directory has no weights or only Git LFS pointers. Hub ids are not checked."""
    directory = Path(model)
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if path.suffix in (*_WEIGHT_SUFFIXES, ".json", ".model", ".jinja"):
            _require_no_pointer(path)
    for path in (directory / name for name in _INDEX_NAMES):
        if path.exists():
            try:
                named = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
                missing = [name for name in named if not (directory / name).exists()]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(f"{path} cannot be read: {first_line(error)}") from error
            if missing:
                raise ModelError(
                    f"{model} lacks {len(missing)} of the {len(named)} files that {path.name} names, e.g. "
                    f"{missing[0]}: copy or download the model again"
                )
            return
    if not any(path.suffix in _WEIGHT_SUFFIXES for path in directory.iterdir()):
        raise ModelError(f"{model} has a config.json, but no weights (*.safetensors): {_ADVICE}")


def _fetch_file(model: str, name: str, hub: HubOptions) -> Path:
    failure = go_offline_without_a_hub()
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    arguments = hub.file_arguments()
    try:
        found = try_to_load_from_cache(model, name, **arguments)
        if isinstance(found, str) and is_offline():
            if failure is not None:
                log.warning("%s: using %s from the local hub cache", failure, model)
            return Path(found)
        if is_offline():
            raise ModelError(
                f"{model!r} is neither a local directory nor in the local hub cache, and "
                f"{failure or '$HF_HUB_OFFLINE prevents downloads'}: {_ADVICE}"
            )
        return Path(hf_hub_download(model, name, **arguments))
    except HFValidationError as error:
        raise ModelError(f"{model!r} is neither a local directory nor a model id: {_ADVICE}") from error
    except ModelError:
        raise
    except Exception as error:  # of the hub client, its HTTP library or the system
        if isinstance(found, str):
            log.warning(
                "cannot ask the hub for a newer version of %s (%s): using the local copy", model, first_line(error)
            )
            return Path(found)
        raise ModelError(
            f"{model!r} is not a local directory, and it cannot be downloaded from the hub: {first_line(error)[:300]}; "
            f"{_ADVICE}. Gated models need $HF_TOKEN"
        ) from error


_CUDA_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/nvmap")
"""Device files of NVIDIA, AMD, WSL and Jetson GPUs. If none of these files exists, torch cannot find a GPU."""
_BYTES_PER_CACHED_TOKEN = 9
"""The minimum number of bytes that the cache needs per token: 4 for the token id, 5 or more for the suffix array."""


def check_before_loading(options: Options) -> None:
    """Check the options, model, cache and Redis, so that errors are reported before the model is loaded.

    Raises ConfigError, ModelError or CacheError for problems that would make the start fail later, and logs warnings
    about problems that may resolve themselves.
    """
    _check_model(options)
    _check_template(options.model)
    if options.model.device == "cuda" and not any(Path(name).exists() for name in _CUDA_DEVICES):
        raise ModelError("--device cuda is set, but this machine has no CUDA device: use --device cpu")
    cache, drafting = options.cache, options.speculation
    if drafting.draft.num_speculative_tokens:
        _check_cache(cache)
        return
    asked = {
        "--redis": cache.config.redis_url,
        "--cache-dir": cache.config.directory,
        "--warm": cache.warm_directories,
        "--draft-model": drafting.draft_model,
        "--draft-head": drafting.draft_head,
    }
    if unused := [option for option, value in asked.items() if value]:
        log.warning("speculation is off, so these options have no effect: %s", " and ".join(unused))


def _check_model(options: Options) -> None:
    model = options.model
    config = read_config(find_config(model.path, model.hub))
    check_generates(model.path, config)
    context = read_context_length(config)
    wanted = options.engine.config.max_model_len
    if context is not None and wanted is not None and wanted > context:
        raise ModelError(f"--max-model-len {wanted} exceeds the model's context of {context} tokens: lower it")
    check_weights_are_there(model.path)
    if Path(model.tokenizer_path).is_file():
        _require_no_pointer(Path(model.tokenizer_path))
    for name, path in model.adapters.items():
        is_there, is_id = (Path(path) / "adapter_config.json").exists(), path.count("/") == 1
        is_path = Path(path).exists() or path.startswith(("/", "./", "../", "~"))
        if not is_there and (is_path or not is_id):
            raise ConfigError(f"--lora-modules {name}={path}: {path} is not a directory with an adapter_config.json")
    for drafting in (options.speculation.draft_model, options.speculation.draft_head):
        if drafting is not None:
            read_config(find_config(drafting, options.model.draft_hub))
            check_weights_are_there(drafting)


def _check_template(model: ModelOptions) -> None:
    if model.chat_template is None:
        return
    import jinja2

    from ssd.text.load_tokenizer import parse_template

    try:
        parse_template(model.chat_template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template is not a valid template: line {error.lineno}: {error.message}") from error


def check_own_templates(codec: TextCodec) -> None:
    """Raise ModelError if the model's own chat template cannot be compiled."""
    import jinja2

    from ssd.text.load_tokenizer import parse_template

    for with_tools in (False, True):
        try:
            parse_template(codec.chat_template(with_tools=with_tools) or "")
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the model's chat template, line {error.lineno}: {error.message}. Repair its chat_template.jinja or "
                "tokenizer_config.json, or use another template (--chat-template FILE)"
            ) from error


def _check_cache(cache: CacheOptions) -> None:
    from ssd.retrieval.files import DirectoryLock, check_namespace, read_manifest

    check_namespace(cache.namespace)
    for directory in cache.warm_directories:
        try:
            manifest = read_manifest(directory)
        except OSError as error:
            raise ConfigError(f"--warm {directory} cannot be read: {error.strerror}") from error
        if manifest is None:
            inside = sorted(path.parent.name for path in directory.glob("*/manifest.json"))
            hint = f"it has caches in {', '.join(inside[:5])}" if inside else "make one with `ssd-cache build`"
            raise ConfigError(f"--warm {directory} contains no cache (no manifest.json): {hint}")
    _check_size(cache)
    if cache.config.directory is not None and (directory := cache.config.directory / cache.namespace).is_dir():
        with contextlib.suppress(OSError):  # CacheLocked now and not after the tokenizer was read
            DirectoryLock(directory).close()
    if cache.config.redis_url is not None:
        _check_redis(cache.config.redis_url)


def check_directory(directory: Path) -> str:
    """Check that a directory, or its nearest existing parent, can be written, and return the free space as text.

    Raises ConfigError if it cannot be written.
    """
    nearest = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            free = shutil.disk_usage(nearest).free
    except OSError as error:
        raise ConfigError(
            f"--cache-dir {directory} cannot be written ({nearest}: {error.strerror}): give a writable directory"
        ) from error
    return f"{directory} can be written, {free / 1e9:.1f} GB are free"


def _check_size(cache: CacheOptions) -> None:
    """Check that the cache fits on the disk of its directory, or into memory if it has no directory."""
    needed = cache.config.index.capacity_tokens * _BYTES_PER_CACHED_TOKEN
    directory = cache.config.directory
    if directory is None:
        there, what = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "of memory"
    else:
        check_directory(directory)
        nearest = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())
        there, what = shutil.disk_usage(nearest).total, f"on the disk of {directory}"
    if needed > there:
        raise ConfigError(
            f"--cache-tokens {cache.config.index.capacity_tokens} take {needed / 1e9:.0f} GB, but there are "
            f"{there / 1e9:.0f} GB {what}: lower --cache-tokens"
        )


def _check_redis(url: str) -> None:
    """Raise ConfigError for an invalid Redis URL, and log a warning if Redis does not answer yet."""
    from ssd.replication.connection import connect, redact_password, redacted_address

    client = connect(url)
    try:
        client.ping()
        log.info("Redis at %s answers", redacted_address(url))
    except Exception as error:  # of the Redis client, the Redis server or the system
        log.warning(
            "Redis at %s does not answer (%s): the server continues without Redis, and retries",
            redacted_address(url),
            redact_password(first_line(error), url),
        )
    finally:
        client.close()
