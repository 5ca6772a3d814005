"""``ssd-cache merge``."""

from __future__ import annotations

import argparse
from pathlib import Path

from cache_builder.caches.merge import merge
from cache_builder.command.parsers import Commands, add_command
from cache_builder.command.progress import progress_bar
from ssd.retrieval.names import check_namespace

_DESCRIPTION = """\
Write what several caches hold into one directory of few large segments: lookups take less time in fewer segments.

Caches that `ssd-cache build` made and a server's own (CACHE_DIR/NAMESPACE) may be given, of one tokenizer. They stay as
they are. Equal texts are kept as often as they are stored, since that is what drafts are ranked by.
"""


def add(commands: Commands) -> None:
    """Its arguments."""
    command = add_command(commands, "merge", _run, help="make one cache of several", description=_DESCRIPTION)
    command.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="in order, what counts as newest last"
    )
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write; created if missing")
    command.add_argument("--namespace", help="name kept in the files (default: the caches' own, where it is one)")
    command.add_argument("--force", action="store_true", help="replace the cache in the --out directory")
    command.add_argument("--unique", action="store_true", help="of equal sequences keep the first only")


def _run(options: argparse.Namespace) -> int:
    namespace = None if options.namespace is None else check_namespace(options.namespace)
    with progress_bar(0, " tokens") as progress:
        result = merge(
            options.directories, options.out, namespace=namespace, force=options.force, unique=options.unique,
            progress=progress,
        )  # fmt: skip
    print(
        f"{options.out}: {result.num_tokens:,} tokens in {result.num_sequences:,} sequences from "
        f"{result.num_segments} segments of {result.num_directories} caches, namespace {result.namespace}"
    )
    if result.num_repeated:
        print(f"  {result.num_repeated:,} sequences were there already and not stored again")
    return 0
