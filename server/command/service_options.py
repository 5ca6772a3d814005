"""Options of the service: what it is called, whom it lets in, what requests may do."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server.command.keys import FILE_OPTION, KEY_OPTION, PIPE_OPTION, checked_keys, read_pipe
from ssd.errors import ConfigError

API_KEY_VARIABLE = "SSD_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Checked."""

    model_names: tuple[str, ...]
    """Empty: the model's own name."""
    api_keys: tuple[str, ...]
    api_key_file: Path | None
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
