"""What the endpoints need to know about the service they belong to: options, a field a flag, and what they come to.

Names and meanings of options are those of ``vllm serve`` where it has them.
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
"""Fields of a model's generation_config.json that stand in for what a request leaves out."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What requests may do."""

    share_cache_across_keys: bool = False
    """all API keys draft from one cache and teach it (default: each tenant has its own)"""
    share_prefix_cache: bool = False
    """requests of different API keys share keys and values, and can then find out what others have asked"""
    ignore_unknown_fields: bool = False
    """leave fields of requests unread that this server does not know (default: 400, with the name that may be meant)"""
    allow_special_tokens: bool = False
    """special tokens that messages spell out are control tokens, as those of the chat template (default: text)"""


def _names(_type: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    """A JSON list of texts, as for ``vllm serve``, or texts between commas."""
    found: list[object] = []
    for text in (token.value for token in tokens):
        try:
            found += json.loads(text) if text.lstrip().startswith("[") else text.split(",")
        except ValueError as error:
            raise ValueError(f"not a JSON list: {error}") from error
    if not all(isinstance(name, str) for name in found):
        raise ValueError("expected a JSON list of texts, or texts between commas")
    return tuple(str(name).strip() for name in found if str(name).strip())


_Names = Annotated[tuple[str, ...], Parameter(converter=_names, n_tokens=1, accepts_keys=False)]


@dataclass(frozen=True, kw_only=True)
class CorsOptions:
    """What browsers let pages of other sites do here."""

    allowed_origins: _Names = ()
    """sites whose pages may call from a browser, as a JSON list or with commas; * for all (default: none)"""
    allowed_methods: _Names = ("*",)
    """methods they may use"""
    allowed_headers: _Names = ("*",)
    """headers they may send"""
    allow_credentials: bool = False
    """they may send cookies, which no part of this server reads; not with origins *"""
    allowed_hosts: _Names = ()
    """host names that a server without keys is called by, as a JSON list or with commas; *.example.com for all names
    below it, * for all (default: IP addresses, localhost and --host)"""


@dataclass(frozen=True, kw_only=True)
class ObfuscationOptions:
    """What the sizes and times of streams may tell."""

    obfuscation: Literal["asked", "default", "always"] = "asked"
    """which streams come in even, padded pieces: those that ask for it (include_obfuscation), those that do not
    decline, or all, and whole answers too"""
    obfuscation_tokens: int = 16
    """tokens of each piece of an obfuscated stream"""
    obfuscation_interval_s: Annotated[float, Parameter(name="--obfuscation-interval")] = 0.25
    """seconds between the pieces of an obfuscated stream; 0 sends each when it is complete"""


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """The page at /, and what streams say about drafts."""

    no_page: bool = False
    """no page at /, and no details of drafts in streams (default: both)"""


_CALLS = "how the model writes tool calls: auto (as its chat template says), none, or one of " + ", ".join(TOOL_FORMATS)
_THOUGHTS = "how it writes what it thinks before it answers: auto, none, or one of " + ", ".join(REASONING_FORMATS)


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """How the model writes tool calls, and what it thinks."""

    tool_call_parser: Annotated[str, Parameter(help=_CALLS)] = AUTO
    reasoning_parser: Annotated[str, Parameter(help=_THOUGHTS)] = AUTO
    exclude_tools_when_tool_choice_none: bool = False
    """do not tell the model of tools where a request's tool_choice is none"""

    def check(self) -> None:
        for option, name, known in (
            ("--tool-call-parser", self.tool_call_parser, TOOL_FORMATS),
            ("--reasoning-parser", self.reasoning_parser, REASONING_FORMATS),
        ):
            if name not in (AUTO, OFF, *known):
                raise ConfigError(f"{option}: no parser {name!r}: give {AUTO}, {OFF} or one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class ServerSettings(RequestOptions, CorsOptions, ObfuscationOptions, PageOptions, ToolOptions):
    """Fixed for the life of the process."""

    model_names: tuple[str, ...]
    """Names a request may call the model by; the first is the one in responses and metrics."""
    model: str
    """The model's path or id."""
    namespace: str | None = "default"
    """Cache namespace of every request; None neither drafts from a cache nor learns."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters by the names that requests call them by, and where each came from."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Values for sampling fields that a request leaves out, by the names of ``SAMPLING_DEFAULTS``."""
    keep_alive_s: float = 15.0
    """A stream that had nothing to send for this long gets a comment line, so that proxies keep it open."""
    spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    """What answers say of their own drafts: who may read that can tell what the cache holds."""
    no_access_log: bool = False
    """No line of log for each request."""
    limits: Limits = field(default_factory=Limits)
    """What is too much for one request, or for all."""
    host: str = ""
    """The name or address to listen on."""
    root_path: str = ""
    """Path that a proxy serves all this under; requests come with it or without."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Start of the service, seconds since the epoch."""

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def all_names(self) -> tuple[str, ...]:
        """Everything that a request may name: the model, then its adapters."""
        return (*self.model_names, *self.adapters)

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request's model name means; None for the model itself."""
        return name if name in self.adapters else None

    def namespace_of(self, name: str | None) -> str | None:
        """The cache namespace of requests for a model name: each adapter has its own."""
        adapter = self.adapter_of(name)
        return self.namespace if adapter is None or self.namespace is None else f"{self.namespace}.{adapter}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those of the model and of its adapters."""
        return tuple(name for each in (None, *self.adapters) if (name := self.namespace_of(each)) is not None)

    @property
    def system_fingerprint(self) -> str:
        """Changes when the same seed may give another output: with the model or this program."""
        return "ssd-" + hashlib.sha256(f"{VERSION}\0{self.model}".encode()).hexdigest()[:12]


def read_sampling_defaults(path: Path) -> dict[str, float]:
    """Sampling defaults of a ``generation_config.json``; raises ConfigError where it is no JSON object of numbers."""
    try:
        content: Any = json.loads(path.read_text())
        found = {name: content[name] for name in SAMPLING_DEFAULTS if content.get(name) is not None}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"cannot read sampling defaults from {path}: {error}") from error
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name} in {path} must be a number, got {value!r}")
    return found
