"""Everything behind the endpoints: tokenizer, cache, sharing and model, as the command line asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from server.base.settings import ServerSettings, read_sampling_defaults
from server.command.arguments import Options
from server.command.keys import read_key_file
from server.command.model_options import ModelOptions
from ssd.errors import ModelError

if TYPE_CHECKING:
    from ssd.engine import Engine
    from ssd.retrieval.cache import CacheSet, SuffixCache
    from ssd.sharing.redis_log import RedisLog, SharingStats
    from ssd.text.codec import TextCodec


def make_settings(options: Options) -> ServerSettings:
    """What the endpoints need; raises ConfigError or ModelError when the model or a file of keys is not there."""
    service = options.service
    filed = () if service.api_key_file is None else read_key_file(service.api_key_file)
    return ServerSettings(
        model_names=service.model_names or (options.model.name,),
        model=options.model.path,
        namespace=options.cache.namespace,
        api_keys=(*service.api_keys, *filed),
        share_prefix_cache=options.model.share_prefix_cache,
        allow_special_tokens=service.allow_special_tokens,
        page=options.page.page,
        allow_draft_details=options.page.allow_draft_details,
        obfuscation_interval_s=service.obfuscation_interval_s,
        trust_request_chat_template=service.trust_request_chat_template,
        limits=options.limits,
        sampling_defaults=_sampling_defaults(options.model),
    )


class EngineLoader:
    """Loads an engine; made to be a worker's ``load``."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._log: RedisLog | None = None

    def __call__(self, resources: ExitStack) -> Engine:
        """Tokenizer, sharing, the cache and its worker process, the warm-up directories, and the model last.

        What is left to close goes to ``resources``. Raises SSDError.
        """
        from transformers.utils import logging as transformers_logging

        from ssd.text.codec import TextCodec

        transformers_logging.disable_progress_bar()
        options = self._options
        codec = TextCodec.load(options.model.path)
        caches = self._open_caches(codec, resources) if options.speculation.draft.num_speculative_tokens > 0 else None

        from ssd.engine import Engine
        from ssd.model.loading.threads import settle_threads

        engine = Engine.from_pretrained(
            options.model.path,
            dtype=options.model.dtype,
            device=options.model.device,
            caches=caches,
            codec=codec,
            config=options.model.engine,
            draft=options.speculation.draft,
            draft_model=options.speculation.draft_model,
        )
        _compile_kernels()
        settle_threads(engine.target)  # before the warm-up times passes, and on the thread that will make them
        return engine

    def sharing_stats(self) -> Mapping[str, SharingStats]:
        """Counts by namespace; empty where nothing is shared."""
        return {} if self._log is None else {self._options.cache.namespace: self._log.stats()}

    def _open_caches(self, codec: TextCodec, resources: ExitStack) -> CacheSet:
        from ssd.retrieval.cache import CacheSet

        options = self._options.cache
        if options.config.redis_url is not None:
            from ssd.sharing.redis_log import RedisLog

            self._log = RedisLog(options.config.redis_url, fingerprint=codec.fingerprint, vocab_size=codec.vocab_size)
            resources.callback(self._log.close)
        caches = CacheSet(options.config, codec.fingerprint, namespace=options.namespace, on_open=self._share)
        resources.callback(caches.close)
        cache = caches.get()
        for directory in options.warm_directories:
            cache.add_static_directory(directory)
        return caches

    def _share(self, cache: SuffixCache) -> None:
        if self._log is not None and cache.name == self._options.cache.namespace:
            self._log.attach(cache)


def _compile_kernels() -> None:
    """Those of the endpoints, so that no request waits for them."""
    from server.intake.json_size import num_values
    from server.running.prediction import common_tokens

    num_values(b"[]")
    common_tokens([0], [0])


def _sampling_defaults(options: ModelOptions) -> dict[str, float]:
    if options.generation_config == "vllm":
        return {}
    if options.generation_config == "auto":
        directory = _model_directory(options.path)
        path = None if directory is None else directory / "generation_config.json"
        return read_sampling_defaults(path) if path is not None and path.exists() else {}
    return read_sampling_defaults(Path(options.generation_config) / "generation_config.json")


def _model_directory(model: str) -> Path | None:
    """The model's files on this machine; None when they are not here yet. Raises ModelError for a path without any."""
    directory = Path(model)
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise ModelError(f"{model} has no config.json: give a Hugging Face model directory or a model's id")
        return directory
    if directory.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") > 1:
        raise ModelError(f"there is no directory {model}: give a Hugging Face model directory or a model's id")
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return Path(found).parent if isinstance(found, str) else None
