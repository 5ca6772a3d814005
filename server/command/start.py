"""``ssd-serve``: open the port, load the model and the cache, serve, and shut down in order."""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from server.admission.connections import num_beyond, protocol_within
from server.admission.registry import Tenants
from server.admission.tenant_config import KEY_VARIABLE, SECRET_OPTION, SECRET_VARIABLE, read_key_file
from server.admission.tenant_loader import TenantReloader, load_or_create_secret, open_tenants, read_given_secret
from server.base.settings import ServerSettings, read_sampling_defaults
from server.command.arguments import Options
from server.command.checks import check_before_loading, check_own_templates
from server.command.listen import (
    HttpServer,
    fit_open_files,
    listen,
    remove_socket_file,
    stop_signals,
    tls_arguments,
    url_of,
)
from server.command.noise_secret import NoiseSecret
from server.command.options import ModelOptions
from server.endpoints.app import create_app
from server.observe.logs import report_start, set_up_logging
from server.observe.spans import Spans, make_spans
from server.running.engine_thread import Worker, WorkerState
from ssd.errors import ConfigError, SSDError
from ssd.numbers import format_number
from ssd.replication.connection import URL_VARIABLE, redacted_address
from ssd.retrieval.owners import STATE_DIRECTORY
from ssd.text.load_tokenizer import find_generation_config

if TYPE_CHECKING:
    from ssd.engine import Engine
    from ssd.replication.replication_log import ReplicationLog, ReplicationStats
    from ssd.retrieval.cache_manager import CacheManager
    from ssd.text.codec import TextCodec

log = logging.getLogger(__name__)


def open_noise(options: Options, secret: bytes | None) -> NoiseSecret | None:
    """Return the secret from which the noise of coupled sampling is derived; None if coupled sampling is off.

    It comes from the server's secret, else from the seed, else from a file in the cache directory, else it is random.
    """
    directory = options.cache.cache_dir
    if not options.engine.coupled_sampling:
        return None
    if secret is not None:
        return NoiseSecret.from_secret(secret)
    if options.engine.seed is not None:
        return NoiseSecret.from_seed(options.engine.seed)
    if options.cache.redis is not None:
        log.warning(
            "--coupled-sampling has no secret, so replicas give different answers, and drafts from each "
            "other's answers are accepted less often: give all replicas the same %s or $%s",
            SECRET_OPTION,
            SECRET_VARIABLE,
        )
    return NoiseSecret.load_or_create(None if directory is None else directory / STATE_DIRECTORY / "noise")


def make_settings(options: Options) -> ServerSettings:
    groups = (options.requests, options.cors, options.streams, options.web_ui, options.tools)
    return ServerSettings(
        **{each.name: getattr(group, each.name) for group in groups for each in fields(group)},
        model_names=options.service.model_names or (options.model.name,),
        model=options.model.path,
        namespace=options.cache.namespace,
        adapters=options.model.adapters,
        spec_decode_metrics=options.observe.spec_decode_metrics,
        no_access_log=options.observe.no_access_log,
        limits=options.limits,
        host=options.network.host,
        root_path=options.network.root_path,
        sampling_defaults=_sampling_defaults(options.model),
    )


def make_tenants(options: Options, settings: ServerSettings, secret: bytes | None = None) -> Tenants:
    service, cache = options.service, options.cache.config
    key_file, redis_url, directory = service.api_key_file, cache.redis_url, cache.directory
    has_keys = bool(service.api_keys) or key_file is not None or service.tenants_file is not None
    has_own_caches = has_keys and not options.requests.share_cache_across_keys
    if redis_url is not None and has_own_caches and secret is None:
        raise ConfigError(
            "--redis with API keys requires the same secret on all servers, because cache names are derived "
            f"from it: give {SECRET_OPTION} or ${SECRET_VARIABLE}, or --share-cache-across-keys"
        )
    if secret is None:
        secret = load_or_create_secret(directory if has_own_caches else None)
    counters = None
    if redis_url is not None and has_own_caches:
        from ssd.replication.replication_log import RedisCounters

        counters = RedisCounters(redis_url)
    return open_tenants(
        settings,
        secret,
        keys=service.api_keys,
        read_keys=tuple if key_file is None else lambda: read_key_file(key_file),
        path=service.tenants_file,
        cache_directory=directory,
        counters=counters,
    )


class EngineLoader:
    """Loads the cache, the model and the engine. The engine's thread calls this object."""

    def __init__(self, options: Options, secret: bytes | None = None) -> None:
        self._options, self._secret = options, secret
        self.log: ReplicationLog | None = None
        self.noise: NoiseSecret | None = None

    def __call__(self, resources: ExitStack) -> Engine:
        """Load the engine, and register in ``resources`` everything that must be closed later.

        Raises SSDError if the tokenizer, the cache or the model cannot be loaded.
        """
        from transformers.utils import logging as transformers_logging

        from ssd.text.codec import TextCodec

        transformers_logging.disable_progress_bar()
        options, reach = self._options, partial(log.info, "starting: %s")
        self.noise = open_noise(options, self._secret)
        reach("reading the tokenizer")
        codec = TextCodec.load(
            options.model.tokenizer_path,
            options.model.tokenizer_hub,
            model=options.model.path,
            model_hub=options.model.hub,
            chat_template=options.model.chat_template,
        )
        check_own_templates(codec)
        reach("opening the cache")
        caches = self._open_caches(codec, resources) if options.speculation.draft.num_speculative_tokens > 0 else None

        reach("importing torch")
        from server.base.counting import common_tokens, num_values
        from ssd.engine import Engine

        seed = options.engine.seed
        engine = Engine.from_pretrained(
            options.model.path,
            dtype=options.model.torch_dtype,
            device=options.model.device,
            caches=caches,
            codec=codec,
            config=options.engine.config,
            draft=options.speculation.draft,
            draft_model=options.speculation.draft_model,
            draft_head=options.speculation.draft_head,
            adapters=options.model.adapters,
            hub=options.model.hub,
            draft_hub=options.model.draft_hub,
            report=reach,
            draw_seed=None if seed is None else partial(random.Random(seed).getrandbits, 63),
            noise_root=self.noise,
        )
        reach("warming up")
        num_values(b"[]")  # so that no request waits for them
        common_tokens([0], [0])
        return engine

    def sharing_stats(self) -> Mapping[str, ReplicationStats]:
        """Map each cache namespace to statistics about the text that it shares with replicas. Empty without Redis."""
        return {} if self.log is None else {self._options.cache.namespace: self.log.stats()}

    def _open_caches(self, codec: TextCodec, resources: ExitStack) -> CacheManager:
        from ssd.retrieval.cache_manager import CacheManager

        options = self._options.cache
        if options.config.redis_url is not None:
            from ssd.replication.replication_log import DEFAULT_MAX_TOKENS, ReplicationLog

            self.log = ReplicationLog(
                options.config.redis_url,
                fingerprint=codec.fingerprint,
                vocab_size=codec.vocab_size,
                max_tokens=max(DEFAULT_MAX_TOKENS, options.cache_tokens),  # a new replica reads all of it
            )
            resources.callback(self.log.close)
        caches = CacheManager(
            options.config,
            codec.fingerprint,
            namespace=options.namespace,
            on_open=None if self.log is None else self.log.attach,
            on_close=None if self.log is None else self.log.detach,
        )
        resources.callback(caches.close)
        for directory in options.warm_directories:
            caches.add_prebuilt_directory(directory)
        return caches


def _sampling_defaults(options: ModelOptions) -> dict[str, float]:
    if options.generation_config == "vllm":
        return {}
    path: Path | None = Path(options.generation_config) / "generation_config.json"
    if options.generation_config == "auto":
        path = find_generation_config(options.path, options.hub)
    return {} if path is None else read_sampling_defaults(path)


def summary_of(
    engine: Engine, options: Options, settings: ServerSettings, num_tenants: int, noise: NoiseSecret | None
) -> dict[str, object]:
    """Return the configuration for the log: model, device, slots, noise, cache, Redis and number of tenants."""
    target, draft, cache = engine.target, options.speculation, options.cache.config
    drafting: dict[str, object] = {"num_speculative_tokens": "none"}
    if engine.caches is not None and target.can_roll_back:
        drafting = {
            "num_speculative_tokens": draft.draft.num_speculative_tokens,
            "draft_model": draft.draft_model or "none",
            "draft_head": draft.draft_head or "none",
            "namespace": options.cache.namespace,
            "cache_tokens": format_number(cache.index.capacity_tokens),
            "cached_tokens": engine.caches.get().stats().num_tokens,
            "prebuilt_caches": len(options.cache.warm_directories) or "none",
            "cache_dir": str(cache.directory or "none"),
            "redis": "none" if cache.redis_url is None else redacted_address(cache.redis_url),
        }
    return {
        "model": settings.model,
        "adapters": len(settings.adapters) or "none",
        "class": type(target.model).__name__,
        "backend": target.backend.replace(" ", "-"),
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "slots": target.num_slots,
        "context": engine.max_model_len,
        "coupled_streams": engine.config.coupled_streams or "none",
        **({} if noise is None else {"noise_secret": noise.source}),
        **drafting,
        "tenants": num_tenants or "none",
    }


_CONNECTIONS_S = 3
"""At shutdown, the seconds that connections get to send remaining data after all requests have ended."""
_ACCEPTED_AT_ONCE = 64
"""The maximum number of new connections that are accepted before the event loop serves existing connections."""
_CLOSE_S = 10.0
"""At shutdown, the seconds that the engine's thread gets to write the cached text of all namespaces to disk."""

_SWITCH_S = 0.0005
"""The interpreter's thread switch interval in seconds (``sys.setswitchinterval``).

The engine's thread releases the interpreter's lock at every torch operation and waits up to this long to get it back.
With Python's default of 5 ms, the serialization of a response with many log-probabilities on another thread delayed
streams by a second.
"""

OK, FAILED, UNUSABLE = 0, 1, 2
"""Exit statuses: stopped by a signal; the engine failed while serving; the server could not be started."""


def main(options: Options) -> int:
    for number in stop_signals():
        if number is not signal.SIGINT:
            signal.signal(number, lambda *_: sys.exit(OK))
    for variable in (KEY_VARIABLE, SECRET_VARIABLE, URL_VARIABLE):
        os.environ.pop(variable, None)  # no child needs it
    set_up_logging(options.observe.log_level, options.observe.log_format)
    sys.setswitchinterval(_SWITCH_S)
    try:
        listener = listen(options.network)
        check_before_loading(options)
        settings = fit_open_files(make_settings(options))
        secret = read_given_secret(options.service.secret_file, options.service.secret)
        tenants = make_tenants(options, settings, secret)
        endpoint = options.observe.otlp_traces_endpoint
        spans = None if endpoint is None else make_spans(endpoint)
    except SSDError as error:
        return _log_failure(error)
    try:
        return serve(options, settings, listener, tenants, secret, spans)
    finally:
        if spans is not None:
            spans.close()


def serve(
    options: Options,
    settings: ServerSettings,
    listener: socket.socket,
    tenants: Tenants,
    secret: bytes | None = None,
    spans: Spans | None = None,
) -> int:
    """Serve on a listening socket until a signal arrives, and return the exit status."""
    loader = EngineLoader(options, secret)
    tenants.sharing = lambda: loader.log
    files = options.service.api_key_file, options.service.tenants_file
    watch = TenantReloader(tenants, [path for path in files if path is not None])
    worker = Worker(loader)
    config = uvicorn.Config(
        create_app(worker, settings, tenants, loader.sharing_stats, spans),
        log_config=None,
        access_log=False,
        http=protocol_within(settings.limits),
        ws="none",
        loop="asyncio",  # uvloop holds the interpreter's lock while it writes: 3 % fewer tokens/s
        # At most as many accepts at once as there are file descriptors beyond ``max_connections``, because asyncio
        # repeats each accept that finds no free descriptor a second later.
        backlog=min(_ACCEPTED_AT_ONCE, num_beyond(settings.limits)),
        timeout_keep_alive=math.ceil(settings.limits.max_idle_seconds),
        timeout_graceful_shutdown=_CONNECTIONS_S,
        **tls_arguments(options.network),
    )
    address = url_of(listener, options.network)
    timeout_s = options.network.shutdown_timeout_s

    def summary(engine: Engine) -> dict[str, object]:
        return summary_of(engine, options, settings, len(tenants.accounts()), loader.noise)

    server = HttpServer(config, worker, summary, address, timeout_s)
    log.info(
        "loading %s: %s answers /live now, and other requests when the model is loaded", options.model.path, address
    )
    worker.start()
    if tenants.is_closed:
        watch.start()
    try:
        server.run(sockets=[listener])
    finally:
        watch.stop()
        is_loading = worker.loaded_engine is None and worker.load_error is None
        stopped = worker.stop(0 if is_loading else _CLOSE_S)
        remove_socket_file(options.network)
    if worker.load_error is not None:
        return _log_failure(worker.load_error)
    status = FAILED if worker.state is WorkerState.FAILED else OK
    if is_loading and status == OK:
        log.info("stopped while loading")
    elif (drained := server.drained) is not None:
        log.info(
            "stopped: %d requests in flight ended, %d were aborted after %.1f s; the cache is %s",
            drained.num_ended,
            drained.num_cut,
            drained.seconds,
            "flushed" if stopped else "not completely flushed",
        )
    if not stopped or any(thread.name == "ssd-compile" for thread in threading.enumerate()):
        # A thread is inside a long library call, which cannot be interrupted. If the process ended normally, a thread
        # that compiles would use LLVM after its teardown, and a signal would end the process.
        if not stopped and not is_loading:
            log.warning("the process exits before the engine has stopped: text that is not on disk yet is lost")
        logging.shutdown()
        os._exit(status)
    return status


def _log_failure(error: BaseException) -> int:
    """Log one line with the error and its remedy (and at level DEBUG a traceback), and return the exit status."""
    logging.getLogger(__name__).debug("could not start", exc_info=error)
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError) or "allocate memory" in message or "out of memory" in message.lower():
        message = f"not enough memory: {message}; lower --max-num-seqs, --max-model-len or --cache-tokens"
    elif not isinstance(error, SSDError):
        message = f"{type(error).__name__}: {message} (--log-level debug shows where)"
    report_start("error", message)
    return UNUSABLE
