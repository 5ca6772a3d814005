"""``ssd-cache check``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cache_builder.caches.check import check
from cache_builder.command.parsers import CACHE_DIRECTORY, Commands, add_command, codec_of
from cache_builder.command.progress import progress_bar

_DESCRIPTION = """\
Everything `inspect` reads, and what takes longer: that every segment is sorted right, that all token ids are the
tokenizer's, that manifest and files agree, that what was learned can be used, and what else lies in the directory.
Changes nothing. Ends with status 1 where there is a fault.
"""


def add(commands: Commands) -> None:
    """Its arguments."""
    command = add_command(
        commands, "check", _run, help="whether all of a cache directory is right", description=_DESCRIPTION
    )
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    command.add_argument("--tokenizer", metavar="DIR_OR_MODEL", help="whose ids it should hold")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _run(options: argparse.Namespace) -> int:
    codec = codec_of(options)
    with progress_bar(0, " tokens") as progress:
        report = check(options.directory, codec=codec, progress=progress)
    print(json.dumps(report.as_json(), indent=1) if options.json else report.as_text())
    return 1 if report.faults else 0
