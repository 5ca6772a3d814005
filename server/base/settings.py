"""What the endpoints need to know about the service they belong to."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ssd
from server.base.limits import Limits
from ssd.errors import ConfigError

VERSION = ssd.__version__

OBFUSCATION_INTERVAL_S = 0.25
OBFUSCATION_TOKENS = 16
OBFUSCATIONS = ("asked", "default", "always")
"""Which streams are obfuscated: those that ask for it; those that do not decline it; all, and whole answers too."""

SpecDecodeMetrics = Literal["none", "summary", "detailed"]

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""Fields of a model's generation_config.json that stand in for what a request leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """What browsers let pages of other sites do here."""

    origins: tuple[str, ...] = ()
    """Sites, as SCHEME://HOST[:PORT], or "*" for all; none: nothing."""
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Fixed for the life of the process."""

    model_names: tuple[str, ...]
    """Names a request may call the model by; the first is the one in responses and metrics."""

    model: str
    """The model's path or id."""

    namespace: str | None = "default"
    """Cache namespace of every request; None neither drafts from a cache nor learns."""

    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters by the names that requests call them by, and where each came from."""

    api_keys: tuple[str, ...] = ()
    """Any of these opens the service; empty leaves it open."""

    share_prefix_cache: bool = False
    """Requests of different keys go on with each other's keys and values; what is cached can then be told by time."""

    share_cache_across_keys: bool = False
    """All keys draft from one cache and teach it; what others have said can then be told by time."""

    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Values for sampling fields that a request leaves out, by the names of ``SAMPLING_DEFAULTS``."""

    trust_request_chat_template: bool = False
    """Run a ``chat_template`` that a request brings; a hostile one can keep the tokenizer's thread busy."""

    allow_special_tokens: bool = False
    """Special tokens that messages spell out are control tokens; else they are text."""

    ignore_unknown_fields: bool = False
    """Fields of a request that nobody here knows are left unread; else they are refused."""

    tool_call_parser: str = "auto"
    """The format of the model's tool calls: a name of ``server.tools.formats``, "none", or "auto" by its template."""

    reasoning_parser: str = "auto"
    """The same for what it thinks."""

    exclude_tools_when_tool_choice_none: bool = False
    """A model that may not call tools is not told of them either."""
    obfuscation: str = "asked"
    """One of ``OBFUSCATIONS``."""

    obfuscation_tokens: int = OBFUSCATION_TOKENS
    """Tokens of every event of an obfuscated stream but the last."""

    obfuscation_interval_s: float = OBFUSCATION_INTERVAL_S
    """Seconds between two events of an obfuscated stream; 0 sends each when it is complete."""

    page: bool = True
    """A page at / shows the drafts at work."""

    allow_draft_details: bool = False
    """Streams may say of each token whether it was drafted, and from what, also where there is no page."""

    keep_alive_s: float = 15.0
    """A stream that had nothing to send for this long gets a comment line, so that proxies keep it open."""

    spec_decode_metrics: SpecDecodeMetrics = "none"
    """What answers say of their own drafts: who may read that can tell what the cache holds."""

    logs_requests: bool = True
    """A line of log for each request."""

    limits: Limits = field(default_factory=Limits)
    """What is too much for one request, or for all."""

    root_path: str = ""
    """Path that a proxy serves all this under; requests come with it or without."""

    cors: Cors = field(default_factory=Cors)
    """Which pages of other sites may call from a browser."""

    created: int = field(default_factory=lambda: int(time.time()))
    """Start of the service, seconds since the epoch."""

    @property
    def model_name(self) -> str:
        """The name in responses and metrics."""
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
