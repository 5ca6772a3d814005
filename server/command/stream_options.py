"""Options of streams: what their sizes and times may tell."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from server.base.settings import OBFUSCATION_INTERVAL_S, OBFUSCATION_TOKENS, OBFUSCATIONS
from server.command.checked_numbers import require_seconds
from ssd.errors import ConfigError

_MOST_OBFUSCATION_INTERVAL_S = 60
_MOST_OBFUSCATION_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Checked."""

    obfuscation: str
    obfuscation_tokens: int
    obfuscation_interval_s: float


def add_stream_options(parser: argparse.ArgumentParser) -> None:
    """The group "streams"."""
    add = parser.add_argument_group("streams").add_argument
    add(
        "--obfuscation", default="asked", choices=OBFUSCATIONS,
        help="which streams come in even, padded pieces at a steady pace, so that sizes and times do not tell what was "
        "drafted: those that ask for it (include_obfuscation), those that do not decline it, or all, and whole "
        "answers at that pace too (default: %(default)s)",
    )  # fmt: skip
    add(
        "--obfuscation-tokens", type=int, default=OBFUSCATION_TOKENS, metavar="N",
        help="tokens of each piece of an obfuscated stream (default: %(default)s)",
    )  # fmt: skip
    add(
        "--obfuscation-interval", type=float, default=OBFUSCATION_INTERVAL_S, metavar="SECONDS",
        help="obfuscated streams get one piece this often: not less than the model takes for it without drafts, when "
        "busy; 0 sends each when it is complete (default: %(default)s)",
    )  # fmt: skip


def stream_options_of(found: argparse.Namespace) -> StreamOptions:
    """What was asked for; raises ConfigError."""
    if not 1 <= found.obfuscation_tokens <= _MOST_OBFUSCATION_TOKENS:
        raise ConfigError(
            f"--obfuscation-tokens must be within 1..{_MOST_OBFUSCATION_TOKENS}, got {found.obfuscation_tokens}"
        )
    require_seconds("--obfuscation-interval", found.obfuscation_interval, _MOST_OBFUSCATION_INTERVAL_S)
    return StreamOptions(
        obfuscation=found.obfuscation,
        obfuscation_tokens=found.obfuscation_tokens,
        obfuscation_interval_s=found.obfuscation_interval,
    )
