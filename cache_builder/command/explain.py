"""``ssd-cache explain``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cache_builder.command.parsers import CACHE_DIRECTORY, Commands, add_command, codec_of
from ssd.config import MAX_SPECULATIVE_TOKENS, DraftConfig
from ssd.errors import ConfigError

_DESCRIPTION = """\
What would be drafted after a text from a cache, and why: the draft as a tree with the chance of every token, why it
ends where it does, and the places that it was made of. It is what the servers' own drafter does at that text.

FILE is text; a name that ends in .json holds the body of a request, {"messages": [...]} or {"prompt": "..."}.
"""


def add(commands: Commands) -> None:
    """Its arguments."""
    command = add_command(
        commands, "explain", _run, help="what would be drafted after a text, and why", description=_DESCRIPTION
    )
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    text = command.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="FILE", help="the prompt; - is standard input")
    text.add_argument("--token-ids", metavar="FILE", help="prompt and output as a JSON array of ids")
    command.add_argument("--output", metavar="FILE", help="what was said after the prompt so far")
    command.add_argument("--tokenizer", metavar="DIR_OR_MODEL", help="the served model's; with --token-ids not needed")
    command.add_argument(
        "--draft-limit", type=int, default=DraftConfig().num_speculative_tokens, metavar="K",
        help=f"most tokens of the draft, 1 to {MAX_SPECULATIVE_TOKENS} (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--shape", choices=("tree", "chain"), default="tree",
        help="a server drafts trees for one sequence alone, chains for many (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--price", type=float, default=0.1, metavar="P",
        help="what drafting a token costs, in accepted tokens; a server measures it (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _run(options: argparse.Namespace) -> int:
    from cache_builder.caches.explain import explain
    from cache_builder.caches.explained_text import as_text
    from cache_builder.caches.prompt import read_output, read_prompt, read_token_ids

    codec = codec_of(options)
    if options.prompt is not None:
        if codec is None:
            raise ConfigError("--prompt is text: give the model's --tokenizer, or ids with --token-ids")
        prompt = read_prompt(options.prompt, codec)
        output = [] if options.output is None else read_output(options.output, codec)
    else:
        if options.output is not None:
            raise ConfigError("--output goes with --prompt: append its ids to those of --token-ids")
        prompt, output = read_token_ids(options.token_ids), []
    explanation = explain(
        options.directory,
        [*prompt, *output],
        prompt_length=len(prompt),
        fingerprint=None if codec is None else codec.fingerprint,
        is_tree=options.shape == "tree",
        limit=options.draft_limit,
        price=options.price,
    )
    decode = None if codec is None else codec.decode
    print(json.dumps(explanation.as_json(decode), indent=1) if options.json else as_text(explanation, decode))
    return 0
