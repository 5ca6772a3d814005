"""Options of ``ssd-serve``, a field a flag; names and meanings are those of ``vllm serve`` where it has them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, Token

from server.admission.rules import (
    KEY_FILE_OPTION,
    KEY_OPTION,
    KEY_VARIABLE,
    SECRET_OPTION,
    SECRET_VARIABLE,
    TENANTS_OPTION,
    checked_keys,
)
from server.command.flags import require_within
from server.observe.logs import LogFormat
from ssd.config import MAX_COUPLED_STREAMS, CacheConfig, DraftConfig, EngineConfig, Exact, IndexConfig, SchedulingPolicy
from ssd.errors import ConfigError
from ssd.numbers import number
from ssd.text.load_tokenizer import HubOptions

BUNDLED_NAME = "ssd-bundled"
"""Name of the model that comes with the package."""

_ENGINE, _DRAFT, _INDEX, _CACHE = EngineConfig(), DraftConfig(), IndexConfig(), CacheConfig()
_DTYPE_NAMES = {"half": "float16", "float": "float32"}
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,30}")
"""It becomes part of a namespace's name and of module names, where a dot would be a level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, from where, how it is read."""

    model: Annotated[str | None, Parameter(show=False)] = None
    revision: str | None = None
    """branch, tag or commit of a model from the hub (default: main)"""
    tokenizer: str | None = None
    """directory, tokenizer.json or id of another tokenizer than the model's"""
    tokenizer_revision: str | None = None
    """its branch, tag or commit (default: as --revision)"""
    chat_template: str | None = None
    """chat template, a file or the text itself, in place of the tokenizer's"""
    download_dir: Path | None = None
    """where models from the hub are kept (default: its own cache); $HF_TOKEN opens those that need it"""
    trust_remote_code: bool = False
    """run Python code that comes with a model; who wrote it can then do here what you can"""
    lora_modules: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    """NAME=PATH of LoRA adapters, each a model name and a cache namespace of its own; JSON as for vLLM too"""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "half", "float"] = "auto"
    """of weights and activations; auto: the checkpoint's; on a CPU float32 if that is as fast"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one"""
    generation_config: str = "auto"
    """sampling defaults: the model's generation_config.json (auto), OpenAI's (vllm), or those of another directory"""

    @property
    def path(self) -> str:
        from ssd.bundled import MODEL_PATH

        return str(MODEL_PATH) if self.model is None else self.model

    @property
    def name(self) -> str:
        """What it is called where the service says nothing else."""
        return BUNDLED_NAME if self.model is None else self.model

    @property
    def hub(self) -> HubOptions:
        return replace(self.draft_hub, revision=self.revision)

    @property
    def draft_hub(self) -> HubOptions:
        """How models and heads that draft are fetched."""
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
        """Without the names that ``vllm serve`` has besides."""
        return _DTYPE_NAMES.get(self.dtype, self.dtype)

    @property
    def adapters(self) -> dict[str, str]:
        """LoRA adapters, directories or ids, by their names."""
        return read_adapters(self.lora_modules)


def _root_path(_type: object, tokens: Sequence[Token]) -> str:
    text = tokens[0].value
    path = text.rstrip("/")
    if path and (not path.startswith("/") or "//" in path or any(character in path for character in "?#% ")):
        raise ConfigError(f"--root-path: a path begins with / and is written as the proxy gets it, got {text!r}")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Where the service listens, with which certificate, behind which proxy, for which pages."""

    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 for all"""
    port: int = 8000
    """port to listen on; 0 takes a free one"""
    uds: Path | None = None
    """listen on a Unix domain socket at this path instead"""
    root_path: Annotated[str, Parameter(converter=_root_path)] = ""
    """path that a proxy serves this server under, /llm for instance; requests are answered with and without it"""
    ssl_certfile: Path | None = None
    """certificate in PEM form: answer https alone"""
    ssl_keyfile: Path | None = None
    """its key, where it is not in the same file"""
    ssl_ca_certs: Path | None = None
    """authorities that clients' certificates must be signed by"""
    ssl_cert_reqs: Literal[0, 1, 2] = 0
    """clients' certificates: 0 not asked for, 1 checked where sent, 2 required"""
    shutdown_timeout_s: Annotated[float, Parameter(name="--shutdown-timeout")] = 30.0
    """after SIGTERM requests in flight have this long to end, in seconds; a second signal ends them at once"""

    def check(self) -> None:
        require_within("--port: a port", self.port, 0, 65535)
        require_within("--shutdown-timeout", self.shutdown_timeout_s, 0, 86_400, " seconds")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs: who signs the clients' certificates")
        for option, path in (("--ssl-keyfile", self.ssl_keyfile), ("--ssl-ca-certs", self.ssl_ca_certs)):
            if path is not None and self.ssl_certfile is None:
                raise ConfigError(f"{option} needs --ssl-certfile, the server's own certificate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """What the service is called, whom it lets in, what requests may do."""

    model_names: Annotated[tuple[str, ...], Parameter(name="--served-model-name", consume_multiple=True)] = ()
    """names requests call the model by (default: MODEL)"""
    api_key_file: Annotated[Path | None, Parameter(name=KEY_FILE_OPTION)] = None
    """API keys, one a line; docs/tenants.md says what needs none"""
    api_keys: Annotated[tuple[str, ...], Parameter(name=KEY_OPTION)] = field(default=(), repr=False)
    """one more key; repeatable; it shows in the process list for the first moment (also: $SSD_API_KEY)"""
    tenants_file: Annotated[Path | None, Parameter(name=TENANTS_OPTION)] = None
    """tenants, their keys and quotas, and who is an operator, see docs/tenants.md; read again when it changes"""
    secret_file: Annotated[Path | None, Parameter(name=SECRET_OPTION)] = None
    """what names tenants' caches and coupled noise, one for all servers of a --redis (also: $SSD_SECRET; default: made
    once and kept in --cache-dir)"""
    secret: Annotated[str | None, Parameter(parse=False)] = field(default=None, repr=False)

    def with_environment(self, environment: Mapping[str, str]) -> ServiceOptions:
        """With keys and secret that come by other ways than the command line; raises ConfigError."""
        if not all(name.strip() for name in self.model_names):
            raise ConfigError("--served-model-name must not be empty: requests could not name the model")
        keys = checked_keys(self.api_keys, KEY_OPTION)
        if environment.get(KEY_VARIABLE):
            keys += checked_keys(environment[KEY_VARIABLE].split("\n"), f"${KEY_VARIABLE}")
        return replace(self, api_keys=keys, secret=environment.get(SECRET_VARIABLE) or None)


def _length(_type: object, tokens: Sequence[Token]) -> int | None:
    return None if tokens[0].value in ("auto", "-1") else number(tokens[0].value)


def _seed(_type: object, tokens: Sequence[Token]) -> int:
    text = tokens[0].value
    if not text.removeprefix("-").isdecimal():
        raise ValueError(f"expected a whole number, got {text[:80]!r}")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How many sequences at once, how long, in how much memory."""

    max_num_seqs: int = _ENGINE.max_num_seqs
    """slots"""
    max_model_len: Annotated[int | None, Parameter(converter=_length)] = None
    """prompt and output tokens together, 32k for instance (default: the model's limit, or less where memory lacks)"""
    max_waiting: int = _ENGINE.max_waiting
    """requests that may wait for a slot; more are answered 503"""
    max_num_batched_tokens: int = _ENGINE.prefill_chunk_tokens
    """prompt tokens computed in one step beside running requests"""
    kv_cache_memory_bytes: int | None = None
    """memory for keys and values, 4GiB for instance; fewer slots where not all fit (default: half of what is free)"""
    gpu_memory_utilization: float | None = None
    """or: share of the device's memory (on a CPU: main memory) that may be in use once keys and values have theirs"""
    scheduling_policy: SchedulingPolicy = _ENGINE.scheduling_policy
    """fcfs: first come, first served; priority: by the field `priority` of requests, lower is earlier"""
    enable_prefix_caching: Annotated[bool, Parameter(negative="--no-enable-prefix-caching")] = True
    """keep the keys and values of ended requests for those that begin alike"""
    exact: Exact = _ENGINE.exact
    """outputs equal to the bit. auto: where they can be; on: or the model is not served"""
    enforce_eager: bool = False
    """record no CUDA graphs: slower steps, less memory (default: graphs where there is a GPU)"""
    seed: Annotated[int | None, Parameter(converter=_seed)] = None
    """where the seeds of requests without one begin, so that a run can be repeated (default: drawn at random)"""
    coupled_sampling: int = _ENGINE.coupled_streams
    """streams of noise that sampled requests without a seed share, so that earlier answers can be drafted, and come
    again; 0: none"""

    @property
    def config(self) -> EngineConfig:
        """Raises ConfigError."""
        require_within("--coupled-sampling", self.coupled_sampling, 0, MAX_COUPLED_STREAMS)
        same = {each.name: getattr(self, each.name) for each in fields(EngineConfig) if hasattr(self, each.name)}
        return EngineConfig(
            **same, prefill_chunk_tokens=self.max_num_batched_tokens, coupled_streams=self.coupled_sampling
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """How drafts are made and by what."""

    num_speculative_tokens: int = _DRAFT.num_speculative_tokens
    """most draft tokens per step"""
    draft_model: str | None = None
    """smaller model with the same tokenizer that drafts where the cache does not"""
    draft_head: str | None = None
    """draft head (EAGLE, EAGLE-3, Medusa, multi-token prediction) that drafts where the cache does not"""
    no_speculation: bool = False
    """plain decoding: no drafts"""

    @property
    def draft(self) -> DraftConfig:
        """Raises ConfigError."""
        return DraftConfig(num_speculative_tokens=0 if self.no_speculation else self.num_speculative_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How large the retrieval cache is, where it is kept, whom it is shared with."""

    cache_tokens: int = _INDEX.capacity_tokens
    """capacity in tokens, 16M for instance"""
    rebuild_interval: float = _INDEX.rebuild_interval_s
    """new text is indexed at the latest after this time, in seconds"""
    cache_dir: Path | None = None
    """keep the cache here (default: nothing outlives the process)"""
    warm_directories: Annotated[tuple[Path, ...], Parameter(name="--warm")] = ()
    """draft from what `ssd-cache build` wrote; repeatable"""
    redis: str | None = field(default=None, repr=False)
    """learn from other servers, and they from this one (default: $SSD_REDIS_URL, not in the process list)"""
    namespace: str = "default"
    """what this server's cache is called"""

    @property
    def config(self) -> CacheConfig:
        """Raises ConfigError."""
        index = IndexConfig(capacity_tokens=self.cache_tokens, rebuild_interval_s=self.rebuild_interval)
        return CacheConfig(index=index, directory=self.cache_dir, redis_url=self.redis)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveOptions:
    """What an operator sees: logs, spans, what answers tell of their drafts."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """what is logged"""
    log_format: LogFormat = "text"
    """lines for people, or one JSON object a line; neither holds any text of a request"""
    no_access_log: Annotated[bool, Parameter(name=("--no-access-log", "--disable-log-requests"))] = False
    """no line for each request (default: one; of probes, metrics and the page's counters at --log-level debug)"""
    otlp_traces_endpoint: str | None = None
    """send a span of each generation to this OpenTelemetry collector, by HTTP; needs the extra telemetry"""
    spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"], Parameter(name="--per-request-spec-decode-metrics")
    ] = "none"
    """answers of one choice say how their drafts fared, detailed: each draft"""


def read_adapters(words: Collection[str], *, model_names: Collection[str] = ()) -> dict[str, str]:
    """Paths by name, of words ``NAME=PATH`` or JSON objects of ``name`` and ``path``, or a list. Raises ConfigError."""
    found: dict[str, str] = {}
    for word in words:
        for name, path in _adapters(word):
            if not _ADAPTER_NAME.fullmatch(name):
                raise ConfigError(
                    f"--lora-modules: {name[:80]!r} cannot be a name: take 1 to 31 characters of A-Z a-z 0-9 _ -"
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
