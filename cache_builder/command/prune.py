"""``ssd-cache prune``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cache_builder.caches.inspect import fingerprint_of
from cache_builder.command.logs import add_log_arguments, read_logs
from cache_builder.command.parsers import CACHE_DIRECTORY, Commands, add_command
from cache_builder.command.progress import progress_bar
from ssd.errors import ConfigError, TokenizerMismatch

if TYPE_CHECKING:
    from cache_builder.pruning.used import Said

_DESCRIPTION = """\
Make a cache directory smaller: keep what recorded requests are seen to draft from, the most used first.

The logs are decoded over the directory as `ssd-cache evaluate` does; of its text the blocks of 64 tokens that accepted
drafts came from are kept with a lead-in, as many as fit. What room is left goes to a part of all other text.
Without --logs the newest text is kept. Judge the result by logs that were not given here:
`ssd-cache evaluate OTHERS --cache frozen --warm OUT`.
"""


def add(commands: Commands) -> None:
    """Its arguments."""
    command = add_command(
        commands, "prune", _run, help="make a cache directory smaller, by what is used", description=_DESCRIPTION
    )
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    command.add_argument(
        "--budget", required=True, metavar="SIZE", help="tokens, as 4000000 or 4M, or bytes of files, as 64MB or 64MiB"
    )
    command.add_argument(
        "--logs", nargs="+", default=[], metavar="LOG", help="recorded requests, as the inputs of build"
    )
    command.add_argument("--out", type=Path, metavar="OUT", help="where to write (default: DIR itself, with --force)")
    command.add_argument("--force", action="store_true", help="replace the cache that is there")
    add_log_arguments(command, needs_tokenizer=False)


def _run(options: argparse.Namespace) -> int:
    from cache_builder.caches.new_cache import check_out
    from cache_builder.pruning.prune import Budget, prune

    budget = Budget.parse(options.budget)
    out = options.directory if options.out is None else options.out
    if options.logs and options.tokenizer is None:
        raise ConfigError("--logs needs --tokenizer: the served model's directory or id")
    check_out(out, force=options.force)
    pruned = prune(
        options.directory, out, budget, find_said=(lambda: _said(options)) if options.logs else None,
        force=options.force,
    )  # fmt: skip
    print(f"{out}: {pruned.num_tokens:,} of {pruned.num_tokens_before:,} tokens in {pruned.num_sequences:,} sequences")
    if options.logs:
        print(f"  {pruned.num_kept_used:,} of the {pruned.num_used_blocks:,} blocks that drafts came from are kept")
    else:
        print("  the newest are kept: --logs LOG says what is used")
    return 0


def _said(options: argparse.Namespace) -> Said:
    from cache_builder.pruning.used import said_from

    codec, read = read_logs(options, options.logs)
    fingerprint = fingerprint_of(options.directory)
    if codec.fingerprint != fingerprint:
        raise TokenizerMismatch(
            f"{options.directory} was made with another tokenizer than --tokenizer {options.tokenizer}: give that one"
        )
    with progress_bar(int(read.log.output_lengths[read.log.with_prompt].sum()), " tokens") as progress:
        return said_from(options.directory, read.log, fingerprint, progress)
