"""Logs on a command line: how they are named, and reading them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cache_builder.command.progress import progress_bar
from cache_builder.inputs.fields import FieldNames
from cache_builder.inputs.record import FORMATS

if TYPE_CHECKING:
    from cache_builder.evaluation.reading import ReadLog
    from ssd.text.codec import TextCodec


def add_log_arguments(command: argparse.ArgumentParser, *, needs_tokenizer: bool = True) -> None:
    """How logs are read: as ``ssd-cache build`` reads its inputs."""
    command.add_argument(
        "--tokenizer",
        required=needs_tokenizer,
        metavar="DIR_OR_MODEL",
        help="the served model's directory or id, or a tokenizer.json",
    )
    command.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="the server's --chat-template (default: the model's)"
    )
    command.add_argument("--format", choices=FORMATS, default="auto", help="of all logs (default: by their names)")
    command.add_argument("--split", metavar="NAME", help="of datasets on disk that have several")
    command.add_argument(
        "--field", action="append", default=[], metavar="OURS=THEIRS",
        help="what records call text, prompt, completion, messages, token_ids or prompt_length; repeatable",
    )  # fmt: skip
    command.add_argument("--time-field", metavar="FIELD", help="order requests by it: numbers or ISO 8601; a.b nests")
    command.add_argument("--skip-invalid", action="store_true", help="leave out lines that cannot be used")


def read_logs(options: argparse.Namespace, names: list[str], class_by: str | None = None) -> tuple[TextCodec, ReadLog]:
    """The tokenizer and the requests of the logs ``names``, with a bar. Raises InputError, ConfigError, SSDError."""
    from cache_builder.evaluation.reading import read_log
    from cache_builder.inputs.sources import find_sources
    from ssd.text.codec import TextCodec

    fields = FieldNames.parse(options.field)
    sources = find_sources(names, options.format, options.split)
    template = None if options.chat_template is None else options.chat_template.read_text()
    codec = TextCodec.load(options.tokenizer, chat_template=template)
    with progress_bar(sum(source.size or 0 for source in sources), "B") as progress:
        read = read_log(
            sources, codec, fields=fields, class_by=class_by, time_by=options.time_field,
            skip_invalid=options.skip_invalid, progress=progress,
        )  # fmt: skip
    return codec, read
