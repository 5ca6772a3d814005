"""What can be known to fail before anything is loaded, in about a second."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from server.command.arguments import Options
from server.command.hub import check_tokenizer_is_there, check_weights_are_there, context_of, find_config, read_config
from server.command.options import CacheOptions, ModelOptions
from ssd.errors import ConfigError, ModelError, first_line

log = logging.getLogger(__name__)

_CUDA_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/nvmap")
"""One of them is there where torch can find a device: NVIDIA's, AMD's, of Windows' Linux, of Jetson boards."""
_BYTES_PER_CACHED_TOKEN = 9
"""At least: four of text, five and more of order."""


def check_before_loading(options: Options) -> None:
    """Raise ConfigError, ModelError or CacheError for what would fail later; warn of what may yet become good."""
    _check_model(options)
    _check_template(options.model)
    if options.model.device == "cuda" and not any(Path(name).exists() for name in _CUDA_DEVICES):
        raise ModelError("--device cuda was asked for, but this machine shows no such device: use --device cpu")
    if options.speculation.draft.num_speculative_tokens:
        _check_cache(options.cache)
    else:
        _warn_of_unused_cache(options.cache)


def _check_model(options: Options) -> None:
    model = options.model
    context = context_of(read_config(find_config(model.path, model.hub)))
    wanted = options.engine.config.max_model_len
    if context is not None and wanted is not None and wanted > context:
        raise ModelError(f"--max-model-len {wanted} exceeds the model's context of {context} tokens")
    check_weights_are_there(model.path)
    if model.tokenizer_path != model.path:
        check_tokenizer_is_there(model.tokenizer_path, model.tokenizer_hub)
    for name, path in model.adapters.items():
        _check_adapter(name, path)
    for drafting in (options.speculation.draft_model, options.speculation.draft_head):
        if drafting is not None:
            read_config(find_config(drafting, options.model.draft_hub))
            check_weights_are_there(drafting)


def _check_adapter(name: str, path: str) -> None:
    directory = Path(path)
    if directory.is_dir() and (directory / "adapter_config.json").exists():
        return
    if directory.exists() or directory.is_absolute() or path.startswith(("./", "../", "~")) or path.count("/") != 1:
        raise ConfigError(f"--lora-modules {name}={path}: there is no directory with an adapter_config.json")


def _check_template(model: ModelOptions) -> None:
    if model.chat_template is None:
        return
    import jinja2

    from ssd.text.load_tokenizer import parse_template

    try:
        parse_template(model.chat_template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template, line {error.lineno}: {error.message}") from error


def _check_cache(cache: CacheOptions) -> None:
    from ssd.retrieval.files import check_namespace, read_manifest

    check_namespace(cache.namespace)
    for directory in cache.warm_directories:
        try:
            manifest = read_manifest(directory)
        except OSError as error:
            raise ConfigError(f"--warm {directory} cannot be read: {error.strerror}") from error
        if manifest is None:
            inside = sorted(path.parent.name for path in directory.glob("*/manifest.json"))
            hint = f"it has caches in {', '.join(inside[:5])}" if inside else "make one with `ssd-cache build`"
            raise ConfigError(f"--warm {directory} holds no cache (no manifest.json): {hint}")
    _check_size(cache)
    if cache.config.directory is not None:
        _check_writable(cache.config.directory)
    if cache.config.redis_url is not None:
        _check_redis(cache.config.redis_url)


def _check_size(cache: CacheOptions) -> None:
    """Text is kept in files below the cache's directory, without one in memory."""
    needed = cache.config.index.capacity_tokens * _BYTES_PER_CACHED_TOKEN
    directory = cache.config.directory
    if directory is None:
        there, what = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "of memory"
    else:
        there, what = shutil.disk_usage(_existing(directory)).total, f"on the disk of {directory}"
    if needed > there:
        raise ConfigError(
            f"--cache-tokens {cache.config.index.capacity_tokens} take {needed / 1e9:.0f} GB, and there are "
            f"{there / 1e9:.0f} GB {what}: lower it"
        )


def _check_writable(directory: Path) -> None:
    nearest = _existing(directory)
    if not nearest.is_dir():
        raise ConfigError(f"--cache-dir {directory}: Not a directory: {nearest}")
    if not os.access(nearest, os.W_OK | os.X_OK) and nearest != directory:  # an old cache may be read without
        raise ConfigError(f"--cache-dir {directory} cannot be made: {nearest} may not be written")


def _existing(path: Path) -> Path:
    """The nearest of a path and its parents that is there."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def _check_redis(url: str) -> None:
    """Raise ConfigError for what is no URL. A server that does not answer may come later: a warning."""
    from ssd.sharing.connection import address_of, connect, hide_password

    client = connect(url)
    try:
        client.ping()
        log.info("Redis at %s answers", address_of(url))
    except Exception as error:  # of the client, of the system, of the server's own words
        log.warning(
            "Redis at %s does not answer (%s): going on without, and trying again all the time",
            address_of(url), hide_password(first_line(error), url),
        )  # fmt: skip
    finally:
        client.close()


def _warn_of_unused_cache(cache: CacheOptions) -> None:
    asked = {"--redis": cache.config.redis_url, "--cache-dir": cache.config.directory, "--warm": cache.warm_directories}
    if unused := [option for option, value in asked.items() if value]:
        log.warning("without speculation nothing is drafted or learned: %s of no use", " and ".join(unused))
