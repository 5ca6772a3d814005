"""``ssd-cache inspect``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cache_builder.caches.inspect import inspect_directory
from cache_builder.command.parsers import CACHE_DIRECTORY, Commands, add_command


def add(commands: Commands) -> None:
    """Its arguments."""
    command = add_command(commands, "inspect", _run, help="what a cache directory holds, and whether it is intact")
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _run(options: argparse.Namespace) -> int:
    report = inspect_directory(options.directory)
    print(json.dumps(report.as_json(), indent=1) if options.json else report.as_text())
    return 0 if report.is_intact else 1
