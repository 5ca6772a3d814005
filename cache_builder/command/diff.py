"""``ssd-cache diff``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cache_builder.caches.diff import as_text, diff
from cache_builder.command.parsers import Commands, add_command, codec_of
from cache_builder.command.progress import progress_bar

_DESCRIPTION = """\
What each of two caches holds that the other does not: whole sequences, and of short windows of text the share that
stands in the other all the same, which is what drafts are made from.
"""


def add(commands: Commands) -> None:
    """Its arguments."""
    command = add_command(commands, "diff", _run, help="what two caches do not share", description=_DESCRIPTION)
    command.add_argument("one", type=Path, metavar="A", help="a cache directory")
    command.add_argument("other", type=Path, metavar="B", help="another one of the same tokenizer")
    command.add_argument("--tokenizer", metavar="DIR_OR_MODEL", help="show the newest difference as text")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _run(options: argparse.Namespace) -> int:
    codec = codec_of(options)
    with progress_bar(0, " tokens") as progress:
        sides = diff(options.one, options.other, progress=progress)
    if options.json:
        print(json.dumps({"a": sides[0].as_json(), "b": sides[1].as_json()}, indent=1))
    else:
        print(as_text(sides, None if codec is None else codec.decode))
    return 0
