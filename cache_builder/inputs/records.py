"""Reading what people have, in any of the formats, whole or a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from cache_builder.inputs.arrays import array_sequences
from cache_builder.inputs.batches import Requests
from cache_builder.inputs.fields import AS_WE_CALL_THEM, FieldNames
from cache_builder.inputs.lines import documents, json_lines
from cache_builder.inputs.record import STANDARD_INPUT, Format, InputError, Progress, Record, shown_name
from cache_builder.inputs.sources import Part, Source, find_sources
from cache_builder.inputs.streams import open_stream, readable
from cache_builder.inputs.tables import arrow_rows, parquet_rows
from cache_builder.inputs.vllm_logs import MARKS, vllm_exchanges

__all__ = ["STANDARD_INPUT", "Format", "InputError", "Record", "check_inputs", "read_part", "read_records"]

_PEEKED = 1 << 16


def check_inputs(names: list[str], format: Format = "auto", split: str | None = None) -> int:
    """Bytes of all inputs together, as far as they have a size; raises InputError for one that is not there."""
    return sum(source.size or 0 for source in find_sources(names, format, split))


def read_records(
    name: str,
    format: Format,
    progress: Progress,
    *,
    fields: FieldNames = AS_WE_CALL_THEM,
    split: str | None = None,
) -> Iterator[Record]:
    """The records of one input, which may be a pattern, a directory or a URL; raises InputError.

    ``progress`` is told how many bytes were read. Of tables the columns that ``fields`` names are read.
    """
    return read_sources(find_sources([name], format, split), progress, fields)


def read_sources(sources: list[Source], progress: Progress, fields: FieldNames = AS_WE_CALL_THEM) -> Iterator[Record]:
    """The records of all ``sources``, one after the other; raises InputError."""
    parts = (Part(source.name, source.format, requests=source.requests) for source in sources)
    return chain.from_iterable(read_part(part, progress, fields) for part in parts)


def read_part(part: Part, progress: Progress, fields: FieldNames = AS_WE_CALL_THEM) -> Iterator[Record]:
    """The records of a part, in order; raises InputError.

    A text file is one document; beyond some 4 MB it becomes several, cut at ends of lines. Empty ones and blank lines
    are left out.
    """
    with readable(part.name):
        if part.format == "parquet":
            yield from parquet_rows(part.name, fields.columns(), progress, part.start, part.stop)
        elif part.format == "arrow":
            yield from arrow_rows(part.name, fields.columns(), progress, part.start, part.stop)
        else:
            yield from _of_stream(part, progress)


def _of_stream(part: Part, progress: Progress) -> Iterator[Record]:
    shown = shown_name(part.name)
    with open_stream(part.name, progress) as file:
        format = part.format
        if format == "auto":  # standard input has no name that tells
            format = _format_of(file.peek(_PEEKED)) if hasattr(file, "peek") else "text"
        if format == "npy":
            yield from array_sequences(shown, file, part.start, part.stop)
        elif format == "vllm":
            yield from vllm_exchanges(shown, file)
        elif format == "text":
            yield from documents(shown, file, part.start, part.stop)
        else:
            lines = json_lines(shown, file, part.start, part.stop)
            yield from Requests(part.requests).join(lines) if part.requests else lines


def _format_of(beginning: bytes) -> Format:
    first = beginning.lstrip().partition(b"\n")[0].strip()
    if first.startswith((b"{", b"[{")) or first == b"[":
        return "jsonl"
    return "vllm" if any(mark in beginning for mark in MARKS[:2]) else "text"
