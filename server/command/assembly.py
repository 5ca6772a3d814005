"""Everything behind the endpoints: tokenizer, cache, sharing and model, as the command line asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from server.base.settings import ServerSettings, read_sampling_defaults
from server.command.arguments import Options
from server.command.keys import read_key_file
from server.tenants.opening import TenantSources, open_tenants
from server.tenants.registry import Tenants
from server.tenants.secret import OPTION as SECRET_OPTION
from server.tenants.secret import VARIABLE as SECRET_VARIABLE
from server.tenants.secret import find_secret
from ssd.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from ssd.engine import Engine
    from ssd.retrieval.cache import CacheSet, SuffixCache
    from ssd.sharing.redis_log import RedisLog, SharingStats
    from ssd.text.codec import TextCodec


def make_settings(options: Options) -> ServerSettings:
    """What the endpoints need; raises ConfigError or ModelError when the model is not there."""
    return ServerSettings(
        model_names=options.model_names,
        model=options.model,
        namespace=options.namespace,
        api_keys=options.api_keys,
        share_cache_across_keys=options.share_cache_across_keys,
        share_prefix_cache=options.share_prefix_cache,
        allow_special_tokens=options.allow_special_tokens,
        obfuscation_interval_s=options.obfuscation_interval_s,
        trust_request_chat_template=options.trust_request_chat_template,
        limits=options.limits,
        sampling_defaults=_sampling_defaults(options),
    )


def make_tenants(options: Options, settings: ServerSettings) -> Tenants:
    """Who may come in; raises ConfigError when a file of keys, tenants or the secret is of no use."""
    key_file, redis_url, directory = options.api_key_file, options.cache.redis_url, options.cache.directory
    sources = TenantSources(
        keys=options.api_keys,
        read_keys=tuple if key_file is None else lambda: read_key_file(key_file),
        path=options.tenants_file,
    )
    has_keys = bool(options.api_keys) or key_file is not None or options.tenants_file is not None
    has_own_caches = has_keys and not options.share_cache_across_keys
    if redis_url is not None and has_own_caches and options.secret_file is None and options.secret is None:
        raise ConfigError(
            f"--redis with API keys needs one secret for all servers, or none would find another's caches: give "
            f"{SECRET_OPTION} or ${SECRET_VARIABLE}, or --share-cache-across-keys"
        )
    environment = {} if options.secret is None else {SECRET_VARIABLE: options.secret}
    secret = find_secret(options.secret_file, environment, directory if has_own_caches else None)
    counters = None
    if redis_url is not None and has_own_caches:
        from ssd.sharing.counters import RedisCounters

        counters = RedisCounters(redis_url)
    return open_tenants(sources, settings, secret, cache_directory=directory, counters=counters)


def watched_files(options: Options) -> list[Path]:
    """The files whose change replaces keys and quotas."""
    return [path for path in (options.api_key_file, options.tenants_file) if path is not None]


class EngineLoader:
    """Loads an engine; made to be a worker's ``load``."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._log: RedisLog | None = None

    @property
    def log(self) -> RedisLog | None:
        """What replicas share through, once it is open."""
        return self._log

    def __call__(self, resources: ExitStack) -> Engine:
        """Tokenizer, sharing, the cache and its worker process, the warm-up directories, and the model last.

        What is left to close goes to ``resources``. Raises SSDError.
        """
        from transformers.utils import logging as transformers_logging

        from ssd.text.codec import TextCodec

        transformers_logging.disable_progress_bar()
        options = self._options
        codec = TextCodec.load(options.model)
        caches = self._open_caches(codec, resources) if options.draft.num_speculative_tokens > 0 else None

        from ssd.engine import Engine
        from ssd.model.loading.threads import settle_threads

        engine = Engine.from_pretrained(
            options.model,
            dtype=options.dtype,
            device=options.device,
            caches=caches,
            codec=codec,
            config=options.engine,
            draft=options.draft,
            draft_model=options.draft_model,
        )
        _compile_kernels()
        settle_threads(engine.target)  # before the warm-up times passes, and on the thread that will make them
        return engine

    def sharing_stats(self) -> Mapping[str, SharingStats]:
        """Counts by namespace; empty where nothing is shared."""
        return {} if self._log is None else {self._options.namespace: self._log.stats()}

    def _open_caches(self, codec: TextCodec, resources: ExitStack) -> CacheSet:
        from ssd.retrieval.cache import CacheSet

        options = self._options
        if options.cache.redis_url is not None:
            from ssd.sharing.redis_log import RedisLog

            self._log = RedisLog(options.cache.redis_url, fingerprint=codec.fingerprint, vocab_size=codec.vocab_size)
            resources.callback(self._log.close)
        caches = CacheSet(
            options.cache,
            codec.fingerprint,
            namespace=options.namespace,
            on_open=self._share,
            on_close=self._share_no_more,
        )
        resources.callback(caches.close)
        for directory in options.warm_directories:
            caches.add_static_directory(directory)
        return caches

    def _share(self, cache: SuffixCache) -> None:
        if self._log is not None:
            self._log.attach(cache)

    def _share_no_more(self, cache: SuffixCache) -> None:
        if self._log is not None:
            self._log.detach(cache)


def _compile_kernels() -> None:
    """Those of the endpoints, so that no request waits for them."""
    from server.intake.json_size import num_values
    from server.running.prediction import common_tokens

    num_values(b"[]")
    common_tokens([0], [0])


def _sampling_defaults(options: Options) -> dict[str, float]:
    if options.generation_config == "vllm":
        return {}
    if options.generation_config == "auto":
        directory = _model_directory(options.model)
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
