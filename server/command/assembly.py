"""Everything behind the endpoints: tokenizer, cache, sharing and model, as the command line asks for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from server.base.settings import ServerSettings, read_sampling_defaults
from server.command.arguments import Options
from server.command.hub import find_generation_config
from server.command.keys import read_key_file
from server.command.model_options import ModelOptions
from server.command.noise import OpenNoise, open_noise
from server.command.progress import Progress
from server.tenants.opening import TenantSources, open_tenants
from server.tenants.registry import Tenants
from server.tenants.secret import OPTION as SECRET_OPTION
from server.tenants.secret import VARIABLE as SECRET_VARIABLE
from server.tenants.secret import given_secret, own_secret
from ssd.errors import ConfigError

if TYPE_CHECKING:
    from ssd.engine import Engine
    from ssd.retrieval.cache import CacheSet, SuffixCache
    from ssd.sharing.published.published import StoreShare
    from ssd.sharing.redis_log import RedisLog, SharingStats
    from ssd.text.codec import TextCodec


_LONGEST_LOOK_S = 4.0
"""Redis has this long to say which noise replicas use, beside the loading of the model."""


def make_settings(options: Options) -> ServerSettings:
    """What the endpoints need; raises ConfigError or ModelError when the model is not there."""
    service = options.service
    return ServerSettings(
        model_names=service.model_names or (options.model.name,),
        model=options.model.path,
        namespace=options.cache.namespace,
        adapters=options.model.adapters,
        api_keys=service.api_keys,
        share_cache_across_keys=service.share_cache_across_keys,
        share_prefix_cache=service.share_prefix_cache,
        allow_special_tokens=service.allow_special_tokens,
        tool_call_parser=options.tools.tool_call_parser,
        reasoning_parser=options.tools.reasoning_parser,
        exclude_tools_when_tool_choice_none=options.tools.exclude_tools_when_tool_choice_none,
        page=options.page.page,
        allow_draft_details=options.page.allow_draft_details,
        obfuscation=options.streams.obfuscation,
        obfuscation_tokens=options.streams.obfuscation_tokens,
        obfuscation_interval_s=options.streams.obfuscation_interval_s,
        trust_request_chat_template=service.trust_request_chat_template,
        spec_decode_metrics=options.observe.spec_decode_metrics,
        logs_requests=options.observe.logs_requests,
        limits=options.limits,
        root_path=options.network.root_path,
        cors=options.network.cors,
        sampling_defaults=_sampling_defaults(options.model),
    )


def read_secret(options: Options) -> bytes | None:
    """The secret that was given, to be read once; None where none was. Raises ConfigError."""
    given = options.service.secret
    return given_secret(options.service.secret_file, {} if given is None else {SECRET_VARIABLE: given})


def make_tenants(options: Options, settings: ServerSettings, secret: bytes | None = None) -> Tenants:
    """Who may come in; raises ConfigError when a file of keys or tenants, or a secret of its own is of no use."""
    service, cache = options.service, options.cache.config
    key_file, redis_url, directory = service.api_key_file, cache.redis_url, cache.directory
    sources = TenantSources(
        keys=service.api_keys,
        read_keys=tuple if key_file is None else lambda: read_key_file(key_file),
        path=service.tenants_file,
    )
    has_keys = bool(service.api_keys) or key_file is not None or service.tenants_file is not None
    has_own_caches = has_keys and not service.share_cache_across_keys
    if redis_url is not None and has_own_caches and secret is None:
        raise ConfigError(
            f"--redis with API keys needs one secret for all servers, or none would find another's caches: give "
            f"{SECRET_OPTION} or ${SECRET_VARIABLE}, or --share-cache-across-keys"
        )
    if secret is None:
        secret = own_secret(directory if has_own_caches else None)
    counters = None
    if redis_url is not None and has_own_caches:
        from ssd.sharing.redis_log import RedisCounters

        counters = RedisCounters(redis_url)
    return open_tenants(sources, settings, secret, cache_directory=directory, counters=counters)


def watched_files(options: Options) -> list[Path]:
    """The files whose change replaces keys and quotas."""
    service = options.service
    return [path for path in (service.api_key_file, service.tenants_file) if path is not None]


class EngineLoader:
    """Loads an engine; made to be a worker's ``load``."""

    def __init__(self, options: Options, secret: bytes | None = None) -> None:
        """``secret`` : what was given."""
        self._options = options
        self._secret = secret
        self._log: RedisLog | StoreShare | None = None
        self.noise = OpenNoise()
        """What coupled noise is made of, once it is known."""
        self.progress = Progress()

    @property
    def log(self) -> RedisLog | StoreShare | None:
        """What replicas share through, once it is open."""
        return self._log

    def __call__(self, resources: ExitStack) -> Engine:
        """Tokenizer, sharing, the cache and its worker process, the warm-up directories, and the model last.

        What is left to close goes to ``resources``. Raises SSDError.
        """
        from transformers.utils import logging as transformers_logging

        from ssd.text.codec import TextCodec

        transformers_logging.disable_progress_bar()
        options, reach = self._options, self.progress.reach
        self.noise = open_noise(options, self._secret, resources.callback)
        reach("reading the tokenizer")
        codec = TextCodec.load(
            options.model.tokenizer,
            options.model.tokenizer_hub,
            model=options.model.path,
            model_hub=options.model.hub,
            chat_template=options.model.chat_template,
        )
        reach("opening the cache")
        caches = self._open_caches(codec, resources) if options.speculation.draft.num_speculative_tokens > 0 else None

        reach("importing torch")
        from ssd.engine import Engine

        engine = Engine.from_pretrained(
            options.model.path,
            dtype=options.model.dtype,
            device=options.model.device,
            caches=caches,
            codec=codec,
            config=options.engine.config,
            draft=options.speculation.draft,
            draft_model=options.speculation.draft_model,
            draft_head=options.speculation.draft_head,
            adapters=options.model.adapters,
            hub=options.model.hub,
            draft_hub=options.speculation.draft_hub,
            report=reach,
            draw_seed=_seeds(options.engine.seed),
            noise_root=self.noise.root,
        )
        reach("compiling kernels, once on each machine")
        _compile_kernels()
        reach("warming up, and compiling kernels once on each machine")
        if self.noise.shared is not None:
            self.noise.shared.wait(_LONGEST_LOOK_S)
        return engine

    def sharing_stats(self) -> Mapping[str, SharingStats]:
        """Counts by namespace; empty where nothing is shared."""
        if self._log is None:
            return {}
        stats, shared = self._log.stats(), self.noise.shared
        if shared is not None:
            num_failures, num_reconnects = stats.num_failures, stats.num_reconnects
            stats = replace(
                stats,
                num_failures=num_failures + shared.num_failures,
                num_reconnects=num_reconnects + shared.num_reconnects,
            )
        return {self._options.cache.namespace: stats}

    def _open_caches(self, codec: TextCodec, resources: ExitStack) -> CacheSet:
        from ssd.retrieval.cache import CacheSet

        options = self._options.cache
        if options.config.redis_url is not None:
            from ssd.sharing.published.published import shared_log

            self._log = shared_log(
                options.config.redis_url,
                fingerprint=codec.fingerprint,
                vocab_size=codec.vocab_size,
                publishes=options.publishes,
                publish_to=options.publish_to,
            )
            resources.callback(self._log.close)
        elif options.publish_to is not None:
            from ssd.sharing.published.published import StoreShare

            self._log = StoreShare(
                options.publish_to,
                fingerprint=codec.fingerprint,
                vocab_size=codec.vocab_size,
                publishes=options.publishes,
            )
            resources.callback(self._log.close)
        caches = CacheSet(
            options.config,
            codec.fingerprint,
            namespace=options.namespace,
            on_open=self._share,
            on_close=self._share_no_more,
        )
        resources.callback(caches.close)
        if self._log is not None:
            self._log.obey(caches.discard)
        for directory in options.warm_directories:
            caches.add_static_directory(directory)
        return caches

    def _share(self, cache: SuffixCache) -> None:
        if self._log is not None:
            self._log.attach(cache)

    def _share_no_more(self, cache: SuffixCache) -> None:
        if self._log is not None:
            self._log.detach(cache)


def _seeds(first: int | None) -> Callable[[], int] | None:
    """A repeatable way to draw the seeds of requests; None leaves it to the engine."""
    return None if first is None else partial(random.Random(first).getrandbits, 63)


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
        path = find_generation_config(options.path, options.hub)
        return {} if path is None else read_sampling_defaults(path)
    return read_sampling_defaults(Path(options.generation_config) / "generation_config.json")
