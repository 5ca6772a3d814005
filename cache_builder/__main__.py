"""The ``ssd-cache`` command: build, inspect and push caches."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ssd import __version__
from ssd.errors import SSDError
from ssd.retrieval.cache import DEFAULT_NAMESPACE
from ssd.retrieval.names import check_namespace
from ssd.sharing.connection import URL_VARIABLE
from ssd.text.torchless import hide_torch

from .build import build
from .fields import FieldNames
from .inputs import check_inputs
from .report import fingerprint_of, inspect_directory

_DESCRIPTION = "Fill the retrieval cache of ssd-serve from text that exists already: logs, transcripts, documents."
_EXAMPLES = """\
examples:
  ssd-cache build answers.jsonl --tokenizer ./my-model --out warm/
  ssd-cache build docs/*.md logs.jsonl.gz --tokenizer ./my-model --out warm/ --force
  zcat transcripts.gz | ssd-cache build - --tokenizer ./my-model --out warm/ --add
  ssd-cache build alpaca.json --field prompt=instruction --field completion=output --tokenizer ./my-model --out warm/
  ssd-cache inspect warm/
  ssd-cache push warm/ --redis redis://localhost:6379/0 --namespace default
"""
_BUILD_DESCRIPTION = """\
Write text into a directory that `ssd-serve --warm DIR` searches from its first request.

Inputs ending in .jsonl, .ndjson or .json (or these with .gz) hold one JSON object a line, or an array of them:
  {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
  {"prompt": "...", "completion": "..."}
  {"text": "..."}
  {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
  {"request": {...}, "response": {...}}     bodies of OpenAI-compatible calls; a batch's output file has no request
All other inputs are plain text, one document each. Prompts and messages are encoded exactly as the server does.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 1 damage found by inspect, 2 an error that was explained.

    Without ``arguments`` it is the whole program: it reads those of the process and hides torch from it.
    """
    if arguments is None:
        hide_torch()
        signal.signal(signal.SIGTERM, _terminated)
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except (SSDError, OSError) as error:
        print(f"ssd-cache: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except _Terminated:
        print("ssd-cache: terminated, nothing was changed", file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        print("ssd-cache: interrupted, nothing was changed", file=sys.stderr)
        return 130


class _Terminated(BaseException):
    """SIGTERM: what was begun is taken back on the way out."""


def _terminated(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough, and the way out is short
    raise _Terminated


def _build(options: argparse.Namespace) -> int:
    from ssd.text.codec import TextCodec

    check_namespace(options.namespace)
    fields = FieldNames.parse(options.field)
    num_bytes = check_inputs(options.inputs)
    template = None if options.chat_template is None else options.chat_template.read_text()
    codec = TextCodec.load(options.tokenizer, chat_template=template)
    with _progress(num_bytes, "B") as progress:
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


def _inspect(options: argparse.Namespace) -> int:
    report = inspect_directory(options.directory)
    print(json.dumps(report.as_json(), indent=1) if options.json else report.as_text())
    return 0 if report.is_intact else 1


def _push(options: argparse.Namespace) -> int:
    from ssd.sharing.push import push_segments

    url = options.redis or os.environ.get(URL_VARIABLE)
    if not url:
        raise SSDError(f"no Redis to push to: give --redis URL, or set {URL_VARIABLE}")
    fingerprint = fingerprint_of(options.directory)
    with _progress(0, " tokens") as progress:
        result = push_segments(
            options.directory, url, options.namespace, fingerprint=fingerprint, max_tokens=options.max_tokens,
            progress=progress,
        )  # fmt: skip
    print(f"pushed {result.num_tokens:,} tokens in {result.num_sequences:,} sequences to namespace {options.namespace}")
    if result.num_left_out_tokens:
        print(
            f"  {result.num_left_out_tokens:,} tokens in the {result.num_left_out_sequences:,} oldest sequences were "
            f"left out: the shared log keeps {options.max_tokens:,}. Servers get all with --warm {options.directory}"
        )
    return 0


@contextmanager
def _progress(total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing anywhere else."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda amount: None
        return
    with tqdm(total=total or None, unit=unit, unit_scale=True, leave=False) as bar:
        yield lambda amount: bar.update(amount) and None


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="ssd-cache", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "build", help="make a cache directory from files", description=_BUILD_DESCRIPTION, formatter_class=raw,
        allow_abbrev=False,
    )  # fmt: skip
    command.set_defaults(run=_build)
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

    command = commands.add_parser("inspect", help="what a cache directory holds, and whether it is intact")
    command.set_defaults(run=_inspect)
    command.add_argument("directory", type=Path, metavar="DIR")
    command.add_argument("--json", action="store_true", help="print one JSON object")

    command = commands.add_parser(
        "push", help="send a cache directory to running servers",
        description="Write a cache directory into the shared log, so that running servers use it within seconds.",
    )  # fmt: skip
    command.set_defaults(run=_push)
    command.add_argument("directory", type=Path, metavar="DIR")
    command.add_argument("--redis", metavar="URL", help=f"the servers' --redis (default: ${URL_VARIABLE})")
    command.add_argument("--namespace", default=DEFAULT_NAMESPACE, help="whom it is for (default: %(default)s)")
    command.add_argument(
        "--max-tokens", type=int, default=1 << 22, metavar="N", help="bound of the shared log (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
