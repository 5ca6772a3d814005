"""Options of the service: what it is called, whom it lets in, what requests may do."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server.command.keys import FILE_OPTION, KEY_OPTION, PIPE_OPTION, checked_keys, read_pipe
from server.tenants.rules_file import OPTION as TENANTS_OPTION
from server.tenants.secret import OPTION as SECRET_OPTION
from server.tenants.secret import VARIABLE as SECRET_VARIABLE
from ssd.errors import ConfigError

API_KEY_VARIABLE = "SSD_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Checked."""

    model_names: tuple[str, ...]
    """Empty: the model's own name."""
    api_keys: tuple[str, ...]
    api_key_file: Path | None
    tenants_file: Path | None
    secret_file: Path | None
    secret: str | None
    share_cache_across_keys: bool
    share_prefix_cache: bool
    trust_request_chat_template: bool
    allow_special_tokens: bool


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """The group "service"."""
    add = parser.add_argument_group("service").add_argument
    add("--served-model-name", nargs="+", metavar="NAME", help="names requests call the model by (default: MODEL)")
    add(
        FILE_OPTION, type=Path, metavar="FILE",
        help="API keys, one a line, # begins a comment; requests without one of them get /live, /health, /version, "
        "/metrics and /docs alone",
    )  # fmt: skip
    add(
        KEY_OPTION, action="append", metavar="KEY",
        help=f"one more key; repeatable; it shows in the process list for the first moment (also: ${API_KEY_VARIABLE})",
    )  # fmt: skip
    add(PIPE_OPTION, type=int, help=argparse.SUPPRESS)
    add(
        TENANTS_OPTION, type=Path, metavar="FILE",
        help="tenants, their keys and quotas, and who is an operator, see docs/tenants.md; read again when it changes",
    )  # fmt: skip
    add(
        SECRET_OPTION, type=Path, metavar="FILE",
        help="what the names of tenants' caches and the noise of --coupled-sampling are derived from, the same for all "
        f"servers of one --redis (also: ${SECRET_VARIABLE}; default: made once and kept in --cache-dir)",
    )  # fmt: skip
    add(
        "--share-cache-across-keys", action="store_true",
        help="all API keys draft from one cache and teach it (default: each tenant has its own)",
    )  # fmt: skip
    add(
        "--share-prefix-cache", action="store_true",
        help="requests of different API keys go on with each other's keys and values, and can then find out what "
        "others have asked",
    )  # fmt: skip
    add("--trust-request-chat-template", action="store_true", help="run chat templates that requests bring")
    add(
        "--allow-special-tokens", action="store_true",
        help="special tokens that messages spell out are control tokens, as those of the chat template (default: text)",
    )  # fmt: skip


def service_options_of(found: argparse.Namespace, environment: Mapping[str, str]) -> ServiceOptions:
    """What was asked for; raises ConfigError."""
    if not all(name.strip() for name in found.served_model_name or ()):
        raise ConfigError("--served-model-name must not be empty: requests could not name the model")
    return ServiceOptions(
        model_names=tuple(found.served_model_name or ()),
        api_keys=_keys(found, environment),
        api_key_file=found.api_key_file,
        tenants_file=found.tenants,
        secret_file=found.secret_file,
        secret=environment.get(SECRET_VARIABLE) or None,
        share_cache_across_keys=found.share_cache_across_keys,
        share_prefix_cache=found.share_prefix_cache,
        trust_request_chat_template=found.trust_request_chat_template,
        allow_special_tokens=found.allow_special_tokens,
    )


def _keys(found: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...]:
    piped = [] if found.api_key_fd is None else read_pipe(found.api_key_fd)
    keys = checked_keys([*(found.api_key or []), *piped], KEY_OPTION)
    if environment.get(API_KEY_VARIABLE):
        keys += checked_keys([environment[API_KEY_VARIABLE]], f"${API_KEY_VARIABLE}")
    return keys
