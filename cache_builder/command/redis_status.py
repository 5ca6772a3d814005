"""``ssd-cache redis-status``."""

from __future__ import annotations

import argparse
import json

from cache_builder.command.parsers import Commands, add_command, redis_url_of
from ssd.sharing.connection import URL_VARIABLE

_DESCRIPTION = "Look at a Redis that servers share through: what is there, and whether they may do what they need."


def add(commands: Commands) -> None:
    """Its arguments."""
    command = add_command(
        commands, "redis-status", _run, help="what the servers' Redis holds, and what its user may do",
        description=_DESCRIPTION,
    )  # fmt: skip
    command.add_argument("redis", nargs="?", metavar="URL", help=f"the servers' --redis (default: ${URL_VARIABLE})")
    command.add_argument("--exact", action="store_true", help="read all entries, not some, to count their tokens")
    command.add_argument("--json", action="store_true", help="print one JSON line")


def _run(options: argparse.Namespace) -> int:
    from cache_builder.shared.status import read_status

    status = read_status(redis_url_of(options), exact=options.exact)
    print(json.dumps(status.as_json()) if options.json else status.as_text())
    return 0
