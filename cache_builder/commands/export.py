"""``ssd-cache export``: the sequences of a cache as JSON lines, which ``ssd-cache build`` reads back."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from cache_builder.commands.options import CACHE_DIRECTORY, codec_of, progress_bar
from cache_builder.held import open_held
from cache_builder.inputs.record import STANDARD_INPUT
from ssd.errors import ConfigError, TokenizerMismatch
from ssd.retrieval.files import FILE_MODE
from ssd.retrieval.ring import sequences_of
from ssd.text.codec import TextCodec

STANDARD_OUTPUT = STANDARD_INPUT


@dataclass(slots=True)
class ExportResult:
    """What was written. Tokens are without separators."""

    num_sequences: int = 0
    num_tokens: int = 0


def export(
    path: Path,
    out: str,
    *,
    codec: TextCodec | None = None,
    progress: Callable[[int], None] = lambda num_tokens: None,
) -> ExportResult:
    """Write every sequence of the cache ``path``, in order, as one line: its ids, or with ``codec`` its text.

    ``out`` : a file, compressed where its name ends in .gz or .zst and there whole or not at all, or - for standard
    output. ``progress`` is told of tokens. Text is for reading: encoded again it may give other ids.
    Raises TokenizerMismatch, CacheError, ConfigError, OSError.
    """
    (cache,) = open_held([path])
    if codec is not None and codec.fingerprint != cache.fingerprint:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {cache.fingerprint}, this one is {codec.fingerprint}: its token ids mean "
            "other text. Give the tokenizer it was made with"
        )
    result = ExportResult()
    with _writer(out) as file:
        for sequence in sequences_of(cache.segments):
            ids: Sequence[int] = sequence.tolist()
            record = {"token_ids": ids} if codec is None else {"text": codec.decode(ids)}
            file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
            result.num_sequences += 1
            result.num_tokens += len(ids)
            progress(len(ids) + 1)
    return result


@contextmanager
def _writer(out: str) -> Iterator[IO[bytes]]:
    if out == STANDARD_OUTPUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(out)
    if target.is_dir():
        raise ConfigError(f"{out} is a directory: give a file with --out")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with os.fdopen(descriptor, "wb") as raw:
            with _compressed(target.name, raw) as file:
                yield file
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def _compressed(name: str, raw: BinaryIO) -> Iterator[IO[bytes]]:
    if name.endswith(".gz"):
        with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:
            yield cast(IO[bytes], file)
    elif name.endswith(".zst"):
        try:
            import zstandard
        except ModuleNotFoundError:
            raise ConfigError(
                "writing .zst needs zstandard: pip install 'ssd-serving[builder]', or name the file .gz"
            ) from None
        with zstandard.ZstdCompressor().stream_writer(raw, closefd=False) as file:
            yield cast(IO[bytes], file)
    else:
        yield raw


_DESCRIPTION = """\
Write every sequence of a cache as a JSON line, oldest first: {"token_ids": [...]}, of which `ssd-cache build` makes the
same cache again; or with --tokenizer {"text": "..."}, to be read. A name that ends in .gz or .zst compresses.
"""


def add(command: argparse.ArgumentParser) -> None:
    """Its arguments."""
    command.description = _DESCRIPTION
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    command.add_argument("--out", required=True, metavar="FILE", help="where to write; - is standard output")
    command.add_argument("--tokenizer", metavar="DIR_OR_MODEL", help="write text, not ids")


def run(options: argparse.Namespace) -> int:
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
