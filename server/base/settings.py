"""Settings of the running server. Fields of option classes are command line options.

Names and meanings are those of ``vllm serve`` if it has the option.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token

import ssd
from server.base.limits import Limits
from server.tools.formats import AUTO, OFF, REASONING_FORMATS, TOOL_FORMATS
from ssd.errors import ConfigError

VERSION = ssd.__version__

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""The fields of a model's generation_config.json whose values apply to requests that do not set the field themselves.
"""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options for requests: shared caches, unknown fields and special tokens."""

    share_cache_across_keys: bool = False
    """Use one retrieval cache for all API keys. Tenants can then measure response times to find out which text other
    tenants generated. By default, each tenant has its own cache.
    """
    share_prefix_cache: bool = False
    """Use one prefix cache for all API keys. Tenants can then measure response times to find out which prompts other
    tenants sent. By default, each tenant has its own prefix cache.
    """
    ignore_unknown_fields: bool = False
    """Ignore unknown fields of requests. By default a request with an unknown field is rejected with 400."""
    allow_special_tokens: bool = False
    """If a message contains the text of a special token, encode this text as the special token. By default it is
    encoded as ordinary text, so that users cannot inject control tokens.
    """


def _names(_type: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Parse an option that is a list of strings: a JSON list as in ``vllm serve``, or strings separated by commas."""
    found: list[object] = []
    for text in (token.value for token in tokens):
        try:
            found += json.loads(text) if text.lstrip().startswith("[") else text.split(",")
        except ValueError as error:
            raise ValueError(f"not a JSON list: {error}") from error
    if not all(isinstance(name, str) for name in found):
        raise ValueError("expected a JSON list of strings, or strings separated by commas")
    return tuple(str(name).strip() for name in found if str(name).strip())


_Names = Annotated[tuple[str, ...], Parameter(converter=_names, n_tokens=1, accepts_keys=False)]


@dataclass(frozen=True, kw_only=True)
class CorsOptions:
    """Options for access from web pages of other sites (CORS)."""

    allowed_origins: _Names = ()
    """Origins whose pages may call the server from a browser, as a JSON list or separated by commas; * allows all
    (default: none).
    """
    allowed_methods: _Names = ("*",)
    """HTTP methods that pages of allowed origins may use."""
    allowed_headers: _Names = ("*",)
    """HTTP headers that pages of allowed origins may send."""
    allow_credentials: bool = False
    """Let browsers send cookies with requests from pages of allowed origins. The server ignores cookies, but a proxy in
    front of it may need them. Not possible with origin *.
    """
    allowed_hosts: _Names = ()
    """Host names that requests to a server without API keys may have in the Host header, as a JSON list or separated by
    commas; *.example.com allows all subdomains, * allows all names (default: IP addresses, localhost and --host).
    """


@dataclass(frozen=True, kw_only=True)
class ObfuscationOptions:
    """Options that protect streams against observers of packet sizes and times."""

    obfuscation: Literal["on-request", "default", "always"] = "on-request"
    """Which streams are obfuscated: sent in padded chunks at a fixed rate, so that packet sizes and times do not reveal
    drafted text. on-request: if the request sets include_obfuscation; default: unless the request sets it to false;
    always: all streams, and responses without streaming too.
    """
    obfuscation_tokens: int = 16
    """Number of tokens per chunk of an obfuscated stream. Chunks of a fixed size do not show how many tokens a step
    generated.
    """
    obfuscation_interval_s: Annotated[float, Parameter(name="--obfuscation-interval")] = 0.25
    """Time in seconds between the chunks of an obfuscated stream, which hides when each token was generated. 0: each
    chunk is sent as soon as it is complete.
    """


@dataclass(frozen=True, kw_only=True)
class WebUIOptions:
    """Options for the web UI and for draft details in streams."""

    no_web_ui: bool = False
    """Disable the web UI at / and the draft details in streams (include_drafts)."""


_CALLS = "Format of tool calls: auto (detected from the chat template), none, or one of " + ", ".join(TOOL_FORMATS)
_THOUGHTS = "Format of reasoning: auto (detected from the chat template), none, or one of " + ", ".join(
    REASONING_FORMATS
)


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """Options for the formats of tool calls and reasoning."""

    tool_call_parser: Annotated[str, Parameter(help=_CALLS)] = AUTO
    reasoning_parser: Annotated[str, Parameter(help=_THOUGHTS)] = AUTO
    exclude_tools_when_tool_choice_none: bool = False
    """Leave tools out of the prompt if a request's tool_choice is "none"."""

    def check(self) -> None:
        for option, name, known in (
            ("--tool-call-parser", self.tool_call_parser, TOOL_FORMATS),
            ("--reasoning-parser", self.reasoning_parser, REASONING_FORMATS),
        ):
            if name not in (AUTO, OFF, *known):
                raise ConfigError(f"{option}: unknown parser {name!r}: use {AUTO}, {OFF} or one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class ServerSettings(RequestOptions, CorsOptions, ObfuscationOptions, WebUIOptions, ToolOptions):
    """The settings of the running server, which never change."""

    model_names: tuple[str, ...]
    """The names by which requests may call the model; the first appears in responses and metrics."""
    model: str
    namespace: str | None = "default"
    """The cache namespace for requests to the model. None disables the cache."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Values for sampling fields that a request does not set. The keys are names from ``SAMPLING_DEFAULTS``."""
    keep_alive_s: float = 15.0
    """The seconds after which a stream without output sends a comment, so that proxies keep it open."""
    spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    """The draft statistics that responses include. They let a client find out which text the cache contains."""
    no_access_log: bool = False
    limits: Limits = field(default_factory=Limits)
    host: str = ""
    root_path: str = ""
    """The path prefix of the server behind a reverse proxy. Requests are accepted with and without it."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*self.model_names, *self.adapters)

    def adapter_of(self, name: str | None) -> str | None:
        """Return the LoRA adapter that requests with this model name use; None for the model itself."""
        return name if name in self.adapters else None

    def namespace_of(self, name: str | None) -> str | None:
        """Return the cache namespace of requests with this model name. Each LoRA adapter has its own cache."""
        adapter = self.adapter_of(name)
        return self.namespace if adapter is None or self.namespace is None else f"{self.namespace}.{adapter}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(name for each in (None, *self.adapters) if (name := self.namespace_of(each)) is not None)

    @property
    def system_fingerprint(self) -> str:
        """A fingerprint of the model and the server's version. If it changes, a seed may give another output."""
        return "ssd-" + hashlib.sha256(f"{VERSION}\0{self.model}".encode()).hexdigest()[:12]


def read_sampling_defaults(path: Path) -> dict[str, float]:
    """Read sampling defaults from a model's ``generation_config.json``. Raises ConfigError if it is invalid."""
    try:
        content: Any = json.loads(path.read_text())
        found = {name: content[name] for name in SAMPLING_DEFAULTS if content.get(name) is not None}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"cannot read sampling defaults from {path}: {error}. Repair the file, or use --generation-config vllm"
        ) from error
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(
                f"{name} in {path} must be a number, got {value!r}: repair the file, or use --generation-config vllm"
            )
    return found
