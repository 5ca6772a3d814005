"""``ssd-cache export``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from cache_builder.caches.export import STANDARD_OUTPUT, export
from cache_builder.command.parsers import CACHE_DIRECTORY, Commands, add_command, codec_of
from cache_builder.command.progress import progress_bar

_DESCRIPTION = """\
Write every sequence of a cache as a JSON line, oldest first: {"token_ids": [...]}, of which `ssd-cache build` makes the
same cache again; or with --tokenizer {"text": "..."}, to be read. A name that ends in .gz or .zst compresses.
"""


def add(commands: Commands) -> None:
    """Its arguments."""
    command = add_command(commands, "export", _run, help="a cache as JSON lines", description=_DESCRIPTION)
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    command.add_argument("--out", required=True, metavar="FILE", help="where to write; - is standard output")
    command.add_argument("--tokenizer", metavar="DIR_OR_MODEL", help="write text, not ids")


def _run(options: argparse.Namespace) -> int:
    codec = codec_of(options)
    try:
        with progress_bar(0, " tokens") as progress:
            result = export(options.directory, options.out, codec=codec, progress=progress)
    except BrokenPipeError:  # who read it has read enough; what is left must not be written at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    file = sys.stderr if options.out == STANDARD_OUTPUT else sys.stdout
    print(f"{options.out}: {result.num_tokens:,} tokens in {result.num_sequences:,} sequences", file=file)
    return 0
