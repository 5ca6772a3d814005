"""Command line options that several ``ssd-cache`` commands share: tokenizers, logs, Redis and progress."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cache_builder.inputs.input_streams import input_errors
from cache_builder.inputs.record import FORMATS, FieldNames
from ssd.bundled import MODEL_PATH
from ssd.errors import SSDError, StoreUnavailable
from ssd.numbers import parse_number
from ssd.replication.connection import URL_VARIABLE

if TYPE_CHECKING:
    import redis

    from cache_builder.evaluation.log import Log
    from ssd.text.codec import TextCodec


CACHE_DIRECTORY = "Cache directory that `ssd-cache build` wrote, or the directory CACHE_DIR/NAMESPACE of a server"
"""The text that ``--help`` shows for an argument that names an existing cache directory."""


def token_count(text: str) -> int:
    try:
        return parse_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_redis_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--redis", metavar="URL", help=f"URL of the Redis server that replicas share (default: ${URL_VARIABLE})"
    )


def redis_url_from_options(options: argparse.Namespace) -> str:
    url = options.redis or os.environ.get(URL_VARIABLE)
    if not url:
        raise SSDError(f"no Redis URL is given: use --redis URL, or set {URL_VARIABLE}")
    return str(url)


def codec_from_options(options: argparse.Namespace) -> TextCodec | None:
    """Load the tokenizer from ``--tokenizer``, with the chat template from ``--chat-template`` if given.

    Returns None if neither option is given. Raises ModelError if the tokenizer cannot be loaded, and InputError if the
    file of the chat template cannot be read.
    """
    template = chat_template_from_options(options)
    if options.tokenizer is None and template is None:
        return None
    from ssd.text.codec import TextCodec

    return TextCodec.load(options.tokenizer or str(MODEL_PATH), chat_template=template)


def add_log_of_namespace(command: argparse.ArgumentParser, what: str, default: str | None = None) -> None:
    """Add the options ``--redis``, ``--namespace`` and ``--fingerprint``, which select a namespace in Redis."""
    add_redis_argument(command)
    text = what if default is None else f"{what} (default: {default})"
    command.add_argument("--namespace", required=default is None, default=default, help=text)
    command.add_argument(
        "--fingerprint",
        metavar="HEX",
        help="Only text of the tokenizer with this fingerprint (shown by redis-status --json)",
    )


_LONGEST_SHOWN: Final = 120
_SECONDS_BETWEEN_LINES: Final = 30.0


def escape_value(value: object) -> str:
    """Return a value from Redis for display: at most 120 characters, with unprintable characters escaped."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    text = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text[: 2 * _LONGEST_SHOWN])
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


@contextmanager
def redis_client(url: str, describe_failure: Callable[[], str] = lambda: "failed") -> Iterator[redis.Redis]:
    """Yield a Redis client for a ``with`` block, and convert errors of Redis in the block to StoreUnavailable.

    The error message has one line and contains no password. ``describe_failure`` returns the part of the message that
    describes the step that failed. Raises ConfigError for an invalid URL.
    """
    from ssd.replication.connection import connect, redact_password, redacted_address

    client = connect(url)
    try:
        yield client
    except (SSDError, OSError):  # errors of files; redis-py converts errors of sockets
        raise
    except Exception as error:  # redis-py may raise any exception if the server is not Redis
        reason = escape_value(redact_password(f"{type(error).__name__}: {error}", url))
        raise StoreUnavailable(
            f"{redacted_address(url)} {describe_failure()} ({reason}): check the address, the rights of the "
            "user and maxmemory (ssd-cache redis-status)"
        ) from None
    finally:
        client.close()


def find_fingerprints(client: redis.Redis, options: argparse.Namespace) -> list[str]:
    """Return the fingerprint of each tokenizer whose text Redis contains in the namespace that ``--namespace`` names.

    If ``--fingerprint`` is given, only this fingerprint is returned, without a search in Redis. Raises ConfigError if
    one of the two options is invalid, and the errors of redis-py.
    """
    from ssd.replication.entry import stream_key
    from ssd.retrieval.files import check_fingerprint, check_namespace

    check_namespace(options.namespace)
    if options.fingerprint is not None:
        return [check_fingerprint(options.fingerprint)]
    pattern = stream_key("?" * 32, options.namespace)
    names = (key.partition(b"{")[2][:32] for key in client.scan_iter(match=pattern + "*", count=1000))
    return sorted({name.decode() for name in names if re.fullmatch(rb"[0-9a-f]{32}", name)})


def progress_bar(total: int, unit: str, *, quiet: bool = False) -> Any:
    """Return a progress bar: drawn by tqdm on a terminal, else printed as a line every 30 seconds.

    ``total=0`` means that the final count is unknown. With ``quiet`` nothing is shown.
    """
    from tqdm import tqdm

    class Lines(tqdm):  # type: ignore[misc, unused-ignore]
        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if msg is None and self._time() - self.start_t >= self.delay:
                left = " of {total_fmt}, {rate_fmt}, {remaining} left" if self.total else ", {rate_fmt}"
                text = self.format_meter(**self.format_dict | {"bar_format": "{n_fmt}" + left})
                print(f"ssd-cache: {text}", file=sys.stderr)

    shown = {"total": total or None, "unit": unit, "unit_scale": True, "leave": False, "disable": quiet}
    if sys.stderr.isatty():
        return tqdm(**shown)
    return Lines(**shown, mininterval=_SECONDS_BETWEEN_LINES, delay=_SECONDS_BETWEEN_LINES)


def add_log_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of ``ssd-cache build`` that determine how logs are read."""
    command.add_argument(
        "--tokenizer",
        default=str(MODEL_PATH),
        metavar="DIR_OR_MODEL",
        help="Directory, hub id or tokenizer.json of the served model's tokenizer (default: that of the small model "
        "included in SSD)",
    )
    add_chat_template(command)
    command.add_argument(
        "--format",
        choices=FORMATS,
        default="auto",
        help="Format of all inputs (default: detected from file names and first bytes)",
    )
    command.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="OURS=THEIRS",
        help="Name of a field in the records: read OURS (text, prompt, completion, messages, token_ids or "
        "prompt_length) from THEIRS, e.g. prompt=a.b.0. THEIRS alone means text=THEIRS. Can be repeated",
    )
    command.add_argument("--skip-invalid", action="store_true", help="Skip invalid records, and count them")


def add_chat_template(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="File with the chat template that the server uses (default: the tokenizer's chat template)",
    )


def chat_template_from_options(options: argparse.Namespace) -> str | None:
    name = getattr(options, "chat_template", None)
    if name is None:
        return None
    with input_errors(str(name)):
        return str(name.read_text(encoding="utf-8"))


def read_logs(options: argparse.Namespace, names: list[str], class_by: str | None = None) -> tuple[TextCodec, Log]:
    """Load the tokenizer and read the recorded requests in log files, with a progress bar.

    ``class_by`` is the name of the record's field by which the report groups requests. Raises ConfigError if
    ``--field`` is invalid, ModelError if the tokenizer cannot be loaded, and InputError if a log cannot be read.
    """
    from cache_builder.evaluation.log import read_log
    from cache_builder.inputs.sources import find_sources
    from ssd.text.codec import TextCodec

    fields = FieldNames.parse(options.field)
    sources = find_sources(names, options.format)
    codec = TextCodec.load(options.tokenizer, chat_template=chat_template_from_options(options))
    with progress_bar(sum(source.size or 0 for source in sources), "B") as bar:
        log = read_log(
            sources, codec, fields=fields, class_by=class_by, skip_invalid=options.skip_invalid, progress=bar.update
        )
    return codec, log
