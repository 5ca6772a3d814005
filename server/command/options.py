"""Options of ``ssd-serve``, one field per option. Names and meanings are those of ``vllm serve`` if it has them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, Token

from server.admission.tenant_config import (
    KEY_FILE_OPTION,
    KEY_OPTION,
    KEY_VARIABLE,
    SECRET_OPTION,
    SECRET_VARIABLE,
    TENANTS_OPTION,
    check_keys,
)
from server.command.flags import check_range
from server.observe.logs import LogFormat
from ssd.config import (
    MAX_COUPLED_STREAMS,
    BatchInvariant,
    CacheConfig,
    DraftConfig,
    EngineConfig,
    IndexConfig,
    SchedulingPolicy,
)
from ssd.errors import ConfigError
from ssd.numbers import parse_number
from ssd.text.load_tokenizer import HubOptions

BUNDLED_NAME = "ssd-bundled"

_ENGINE, _DRAFT, _INDEX, _CACHE = EngineConfig(), DraftConfig(), IndexConfig(), CacheConfig()
_DTYPE_NAMES = {"half": "float16", "float": "float32"}
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,30}")
"""Matches names of LoRA adapters that can be part of cache namespaces and of torch module names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options for the model: its source, tokenizer and data type."""

    model: Annotated[str | None, Parameter(show=False)] = None
    revision: str | None = None
    """Branch, tag or commit of a model from the Hugging Face hub (default: main)."""
    tokenizer: str | None = None
    """Directory, tokenizer.json or hub id of the tokenizer (default: the model's tokenizer)."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer (default: the value of --revision, or main if --tokenizer is set)."""
    chat_template: str | None = None
    """File with a chat template, or the template itself. It replaces the tokenizer's chat template."""
    download_dir: Path | None = None
    """Directory for models downloaded from the hub (default: the hub's cache). Gated models need $HF_TOKEN."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model. Its author can then do everything on this machine that you can do."""
    lora_modules: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    """LoRA adapters as NAME=PATH, or in the JSON form that vLLM accepts. Requests select an adapter by its name in the
    field `model`. Each adapter has its own cache.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16", "half", "float"] = "auto"
    """Data type of weights and activations. auto: the checkpoint's data type, but on a CPU float32 if the model is not
    slower in float32.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that runs the model. auto: cuda if there is a GPU, else cpu."""
    generation_config: str = "auto"
    """Source of the default sampling parameters. auto: the model's generation_config.json; vllm: OpenAI's defaults; or
    a directory that contains a generation_config.json.
    """

    @property
    def path(self) -> str:
        from ssd.bundled import MODEL_PATH

        return str(MODEL_PATH) if self.model is None else self.model

    @property
    def name(self) -> str:
        return BUNDLED_NAME if self.model is None else self.model

    @property
    def hub(self) -> HubOptions:
        return replace(self.draft_hub, revision=self.revision)

    @property
    def draft_hub(self) -> HubOptions:
        return HubOptions(cache_dir=self.download_dir, trust_remote_code=self.trust_remote_code)

    @property
    def tokenizer_path(self) -> str:
        return self.path if self.tokenizer is None else self.tokenizer

    @property
    def tokenizer_hub(self) -> HubOptions:
        revision = self.tokenizer_revision or (self.revision if self.tokenizer is None else None)
        return replace(self.draft_hub, revision=revision)

    @property
    def torch_dtype(self) -> str:
        return _DTYPE_NAMES.get(self.dtype, self.dtype)

    @property
    def adapters(self) -> dict[str, str]:
        return read_adapters(self.lora_modules)


def _root_path(_type: object, tokens: Sequence[Token]) -> str:
    text = tokens[0].value
    path = text.rstrip("/")
    if path and (not path.startswith("/") or "//" in path or any(character in path for character in "?#% ")):
        raise ConfigError(f"--root-path must begin with / and contain no spaces, ?, #, % or //, got {text!r}")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Options for the listening address, TLS, and a reverse proxy's path."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""
    port: int = 8000
    """Port to listen on; 0 chooses a free port."""
    uds: Path | None = None
    """Path of a Unix domain socket to listen on instead of --host and --port."""
    root_path: Annotated[str, Parameter(converter=_root_path)] = ""
    """Path prefix under which a proxy serves this server, e.g. /llm. Requests may contain or omit the prefix."""
    ssl_certfile: Path | None = None
    """TLS certificate in PEM form; the server then answers only https."""
    ssl_keyfile: Path | None = None
    """TLS private key in PEM form (default: read from --ssl-certfile)."""
    ssl_ca_certs: Path | None = None
    """File with the CA certificates that verify the clients' certificates."""
    ssl_cert_reqs: Literal[0, 1, 2] = 0
    """Whether clients need certificates. 0: no; 1: a certificate is verified if the client sends one; 2: yes."""
    shutdown_timeout_s: Annotated[float, Parameter(name="--shutdown-timeout")] = 30.0
    """Time in seconds for running requests to finish after SIGTERM; then they are aborted. A second signal aborts them
    at once.
    """

    def check(self) -> None:
        check_range("--port: a port", self.port, 0, 65535)
        check_range("--shutdown-timeout", self.shutdown_timeout_s, 0, 86_400, " seconds")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                "--ssl-cert-reqs requires --ssl-ca-certs: give the file of the authorities that sign client "
                "certificates"
            )
        for option, path in (("--ssl-keyfile", self.ssl_keyfile), ("--ssl-ca-certs", self.ssl_ca_certs)):
            if path is not None and self.ssl_certfile is None:
                raise ConfigError(f"{option} requires --ssl-certfile: give the server's own certificate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Options for the names of the model, API keys and tenants."""

    model_names: Annotated[tuple[str, ...], Parameter(name="--served-model-name", consume_multiple=True)] = ()
    """Names by which requests may call the model (default: MODEL)."""
    api_key_file: Annotated[Path | None, Parameter(name=KEY_FILE_OPTION)] = None
    """File with API keys, one per line. Requests then need a key, except for the paths that docs/guides/tenants.md
    lists.
    """
    api_keys: Annotated[tuple[str, ...], Parameter(name=KEY_OPTION)] = field(default=(), repr=False)
    """API key that requests need; can be repeated. The process list shows it for a moment when the server starts, but
    never shows keys from $SSD_API_KEY or --api-key-file.
    """
    tenants_file: Annotated[Path | None, Parameter(name=TENANTS_OPTION)] = None
    """File with tenants, their API keys and quotas, and the operators' keys: see docs/guides/tenants.md. The server
    reads the file again when it changes.
    """
    secret_file: Annotated[Path | None, Parameter(name=SECRET_OPTION)] = None
    """File with the secret from which the names of tenants' caches and the noise of coupled sampling are derived.
    Servers with the same --redis need the same secret. `openssl rand -hex 32` creates one (default: $SSD_SECRET, or a
    secret that the server creates and stores in --cache-dir).
    """
    secret: Annotated[str | None, Parameter(parse=False)] = field(default=None, repr=False)

    def with_environment(self, environment: Mapping[str, str]) -> ServiceOptions:
        """Return these options with the API keys and the secret from environment variables added.

        Raises ConfigError if a model name is empty, or if HTTP headers cannot transmit an API key.
        """
        if not all(name.strip() for name in self.model_names):
            raise ConfigError("--served-model-name must not be empty, because requests must name the model")
        keys = check_keys(self.api_keys, KEY_OPTION)
        if environment.get(KEY_VARIABLE):
            keys += check_keys(environment[KEY_VARIABLE].split("\n"), f"${KEY_VARIABLE}")
        return replace(self, api_keys=keys, secret=environment.get(SECRET_VARIABLE) or None)


def _length(_type: object, tokens: Sequence[Token]) -> int | None:
    return None if tokens[0].value in ("auto", "-1") else parse_number(tokens[0].value)


def _seed(_type: object, tokens: Sequence[Token]) -> int:
    text = tokens[0].value
    if not text.removeprefix("-").isdecimal():
        raise ValueError(f"expected a whole number, got {text[:80]!r}")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options for the number and length of sequences, and for their memory."""

    max_num_seqs: int = _ENGINE.max_num_seqs
    """Maximum number of sequences that are decoded at once. Each sequence has a slot in the KV cache."""
    max_model_len: Annotated[int | None, Parameter(converter=_length)] = None
    """Maximum number of prompt and output tokens of a sequence, e.g. 32k (default: the model's limit, or less if memory
    is short).
    """
    max_waiting: int = _ENGINE.max_waiting
    """Maximum number of requests that wait for a slot; further requests are rejected with 503."""
    max_num_batched_tokens: int = _ENGINE.prefill_chunk_tokens
    """Maximum number of prompt tokens that are prefilled in one step, so that long prompts do not delay running
    requests.
    """
    kv_cache_memory_bytes: int | None = None
    """Memory for the KV cache, e.g. 4GiB. If --max-num-seqs sequences do not fit, fewer are decoded at once (default:
    half of the free memory).
    """
    gpu_memory_utilization: float | None = None
    """Share of the device's memory (on a CPU: of main memory) that may be in use once the KV cache is allocated, e.g.
    0.9. Memory used by the model and by other processes counts too. Without effect if --kv-cache-memory-bytes is set.
    """
    scheduling_policy: SchedulingPolicy = _ENGINE.scheduling_policy
    """Order of waiting requests. fcfs: first come, first served; priority: requests with lower values of the field
    `priority` first.
    """
    enable_prefix_caching: Annotated[bool, Parameter(negative="--no-enable-prefix-caching")] = True
    """Keep the KV cache of finished requests, so that later requests with the same prefix reuse it."""
    batch_invariant: BatchInvariant = _ENGINE.batch_invariant
    """Whether outputs are bit-identical with and without drafts. auto: if the normal kernels allow it; on: always, and
    the server does not start if this is impossible; off: not required.
    """
    enforce_eager: bool = False
    """Disable CUDA graphs, which saves memory but makes steps slower (default: a GPU uses CUDA graphs)."""
    seed: Annotated[int | None, Parameter(converter=_seed)] = None
    """Seed from which the server derives the seeds of requests that set no seed. After a restart with the same --seed,
    the same requests in the same order get the same seeds (default: random).
    """
    coupled_sampling: int = _ENGINE.coupled_streams
    """Number of sequences of random numbers that sampled requests without a seed share, so that answers recur and can
    be drafted: see docs/concepts/coupled-sampling.md. 0: each request has its own random numbers.
    """

    @property
    def config(self) -> EngineConfig:
        check_range("--coupled-sampling", self.coupled_sampling, 0, MAX_COUPLED_STREAMS)
        same = {each.name: getattr(self, each.name) for each in fields(EngineConfig) if hasattr(self, each.name)}
        return EngineConfig(
            **same, prefill_chunk_tokens=self.max_num_batched_tokens, coupled_streams=self.coupled_sampling
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Options for the sources and the length of drafts."""

    num_speculative_tokens: int = _DRAFT.num_speculative_tokens
    """Maximum number of draft tokens per sequence and step."""
    draft_model: str | None = None
    """Directory or hub id of a smaller model with the same tokenizer, for drafts of text that is not in the cache."""
    draft_head: str | None = None
    """Directory or hub id of a draft head of the model (EAGLE, EAGLE-3, Medusa, multi-token prediction), for drafts of
    text that is not in the cache.
    """
    no_speculation: bool = False
    """Disable drafts and the retrieval cache."""

    @property
    def draft(self) -> DraftConfig:
        return DraftConfig(num_speculative_tokens=0 if self.no_speculation else self.num_speculative_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options for the retrieval cache: its size, directory, and sharing."""

    cache_tokens: int = _INDEX.capacity_tokens
    """Capacity of the retrieval cache in tokens, e.g. 16M."""
    rebuild_interval: float = _INDEX.rebuild_interval_s
    """Interval in seconds at which new text is written to the cache directory as an indexed segment. After a crash,
    text that was not written yet is lost.
    """
    cache_dir: Path | None = None
    """Directory in which the cache is stored (default: none, so the cache is lost when the process ends)."""
    warm_directories: Annotated[tuple[Path, ...], Parameter(name="--warm")] = ()
    """Cache directory, built by `ssd-cache build`, from which the server also drafts; can be repeated."""
    redis: str | None = field(default=None, repr=False)
    """URL of the Redis server through which replicas share their caches (default: $SSD_REDIS_URL, which the process
    list does not show).
    """
    namespace: str = "default"
    """Name of this server's cache. With --redis, replicas share text if the names are the same."""

    @property
    def config(self) -> CacheConfig:
        index = IndexConfig(capacity_tokens=self.cache_tokens, rebuild_interval_s=self.rebuild_interval)
        return CacheConfig(index=index, directory=self.cache_dir, redis_url=self.redis)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveOptions:
    """Options for logs, traces and draft statistics."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of log messages."""
    log_format: LogFormat = "text"
    """Format of log messages: text, or one JSON object per line. Log messages never contain text of requests."""
    no_access_log: Annotated[bool, Parameter(name=("--no-access-log", "--disable-log-requests"))] = False
    """Disable the access log (default: one line per request; health checks, /metrics and the web UI's counters are only
    logged with --log-level debug).
    """
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector to which the server sends a span of each generation by HTTP. It requires the
    package extra "telemetry".
    """
    spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"], Parameter(name="--per-request-spec-decode-metrics")
    ] = "none"
    """Draft statistics in responses with one choice. summary: totals of the response; detailed: also the counts of each
    draft.
    """


def read_adapters(words: Collection[str], *, model_names: Collection[str] = ()) -> dict[str, str]:
    """Parse LoRA adapters given as ``NAME=PATH`` or as JSON objects with ``name`` and ``path``.

    Raises ConfigError if a name is invalid, or is used by another adapter or by the model.
    """
    found: dict[str, str] = {}
    for word in words:
        for name, path in _adapters(word):
            if not _ADAPTER_NAME.fullmatch(name):
                raise ConfigError(
                    f"--lora-modules: {name[:80]!r} is not a valid name: use 1 to 31 characters of A-Z a-z 0-9 _ -"
                )
            if name in found or name in model_names:
                raise ConfigError(f"--lora-modules: the name {name} is given twice")
            found[name] = path
    return found


def _adapters(word: str) -> list[tuple[str, str]]:
    if not word.lstrip().startswith(("{", "[")):
        name, separator, path = word.partition("=")
        if not separator or not path:
            raise ConfigError(f"--lora-modules: expected NAME=PATH, got {word[:80]!r}")
        return [(name, path)]
    try:
        content = json.loads(word)
        objects = content if isinstance(content, list) else [content]
        return [(str(each["name"]), str(each["path"])) for each in objects]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'--lora-modules: expected JSON such as {{"name": "sql", "path": "adapters/sql"}}, got {word[:80]!r}'
        ) from error
