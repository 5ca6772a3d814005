"""``ssd-cache build``."""

from __future__ import annotations

import argparse
from pathlib import Path

from cache_builder.building.build import build
from cache_builder.command.parsers import Commands, add_command
from cache_builder.command.progress import progress_bar
from cache_builder.inputs.fields import FieldNames
from cache_builder.inputs.records import check_inputs
from ssd.retrieval.cache import DEFAULT_NAMESPACE
from ssd.retrieval.names import check_namespace

_DESCRIPTION = """\
Write text into a directory that `ssd-serve --warm DIR` searches from its first request.

Inputs ending in .jsonl, .ndjson or .json (or these with .gz) hold one JSON object a line, or an array of them:
  {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
  {"prompt": "...", "completion": "..."}
  {"text": "..."}
  {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
  {"request": {...}, "response": {...}}     bodies of OpenAI-compatible calls; a batch's output file has no request
All other inputs are plain text, one document each. Prompts and messages are encoded exactly as the server does.
"""


def add(commands: Commands) -> None:
    """Its arguments."""
    command = add_command(commands, "build", _run, help="make a cache directory from files", description=_DESCRIPTION)
    command.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, also .gz; - is standard input")
    command.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR_OR_MODEL",
        help="the served model's directory or id, or a tokenizer.json",
    )
    command.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="the server's --chat-template (default: the model's)"
    )
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write; created if missing")
    command.add_argument("--namespace", default=DEFAULT_NAMESPACE, help="name kept in the files (default: %(default)s)")
    command.add_argument(
        "--format", choices=("auto", "text", "jsonl"), default="auto", help="of all inputs (default: by their names)"
    )
    command.add_argument("--add", action="store_true", help="add to the cache in DIR")
    command.add_argument("--force", action="store_true", help="replace the cache in DIR")
    command.add_argument(
        "--field", action="append", default=[], metavar="OURS=THEIRS",
        help="what records call text, prompt, completion or messages; repeatable; THEIRS alone is the text",
    )  # fmt: skip
    command.add_argument("--skip-invalid", action="store_true", help="count lines that cannot be used and go on")


def _run(options: argparse.Namespace) -> int:
    from ssd.text.codec import TextCodec

    check_namespace(options.namespace)
    fields = FieldNames.parse(options.field)
    num_bytes = check_inputs(options.inputs)
    template = None if options.chat_template is None else options.chat_template.read_text()
    codec = TextCodec.load(options.tokenizer, chat_template=template)
    with progress_bar(num_bytes, "B") as progress:
        result = build(
            options.inputs,
            options.out,
            codec=codec,
            namespace=options.namespace,
            format=options.format,
            add=options.add,
            force=options.force,
            skip_invalid=options.skip_invalid,
            fields=fields,
            progress=progress,
        )
    print(
        f"{options.out}: {result.num_tokens:,} tokens in {result.num_sequences:,} sequences from "
        f"{result.num_records:,} records, namespace {options.namespace}"
    )
    if result.num_skipped_prompt_tokens:
        print(f"  {result.num_skipped_prompt_tokens:,} prompt tokens were stored before and not repeated")
    if result.num_stored_sequences:
        print(f"  {result.num_stored_sequences:,} sequences were there already and not stored again")
    if result.num_invalid:
        print(f"  {result.num_invalid:,} invalid lines were left out")
    return 0
