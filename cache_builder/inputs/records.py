"""Reading of files in any supported format as records, and tokenization of records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from cache_builder.inputs.chat_formats import UNDERSTOOD, Exchange, find_nested_records, parse_exchanges
from cache_builder.inputs.conversations import EncodedAnswer, encode_answer, encode_answers
from cache_builder.inputs.detect import detect_format
from cache_builder.inputs.input_streams import input_errors, open_stream
from cache_builder.inputs.lines import csv_rows, documents, join_requests, json_lines
from cache_builder.inputs.record import (
    DEFAULT_FIELD_NAMES,
    FieldNames,
    InputError,
    InputRecord,
    Progress,
    display_name,
)
from cache_builder.inputs.sessions import read_sessions
from cache_builder.inputs.sources import Source
from cache_builder.inputs.tables import arrow_rows, parquet_rows
from ssd.errors import RequestError, quote_value
from ssd.text.codec import Example, TextCodec
from ssd.text.messages import normalize_messages


def read_sources(
    sources: Iterable[Source], progress: Progress, fields: FieldNames = DEFAULT_FIELD_NAMES
) -> Iterator[InputRecord]:
    return chain.from_iterable(read_part(source, progress, fields) for source in sources)


def read_part(part: Source, progress: Progress, fields: FieldNames = DEFAULT_FIELD_NAMES) -> Iterator[InputRecord]:
    """Yield the records of a file, or of the part of a file that ``part`` describes, in order.

    A text file is one record, but above 4 MB it is split at line ends into several records. Raises InputError if the
    file cannot be read or is damaged.
    """
    with input_errors(part.name):
        if part.format == "parquet":
            yield from parquet_rows(part.name, fields.columns(), progress, part.start, part.stop)
            return
        shown = display_name(part.name)
        with open_stream(part.name, progress) as file:
            kind = detect_format(part.format, file.peek(1), shown)
            if kind == "parquet":
                yield from parquet_rows(part.name, fields.columns(), progress, part.start, part.stop)
            elif kind == "arrow":
                yield from arrow_rows(part.name, file, fields.columns())
            elif kind == "csv":
                yield from csv_rows(shown, file)
            elif kind == "text":
                yield from documents(shown, file, part.start, part.stop)
            else:
                lines = json_lines(shown, file, part.start, part.stop)
                if part.requests:
                    yield from join_requests(lines, part.requests)
                else:
                    yield from _unwrap_nested_records(read_sessions(lines), fields)


def _unwrap_nested_records(records: Iterator[InputRecord], fields: FieldNames) -> Iterator[InputRecord]:
    """Yield the records of a file. If the file is one JSON object with a list of records, yield the list's records."""
    beginning = list(islice(records, 2))
    if len(beginning) == 1 and (within := _find_inner_records(beginning[0], fields)):
        name, lines = within
        where = beginning[0].where
        beginning = [InputRecord(f"{where}: {name}[{n}]", "", is_json=True, line=line) for n, line in enumerate(lines)]
    yield from chain(beginning, records)


def _find_inner_records(record: InputRecord, fields: FieldNames) -> tuple[str, list[Mapping[str, Any]]] | None:
    try:
        line = fields_of(record)
        is_understood = fields.rename(line) is not line or not line.keys().isdisjoint(("text", "token_ids"))
        return None if is_understood or parse_exchanges(line) is not None else find_nested_records(line)
    except (InputError, RequestError):  # `encode_record` raises the error again
        return None


class EncodedRecord(NamedTuple):
    """The token ids of a log record's sequences, and whether the record contains a prompt and an answer."""

    examples: Sequence[Example | EncodedAnswer]
    has_prompt: bool = True
    has_answer: bool = True


def encode_record(record: InputRecord, codec: TextCodec, fields: FieldNames = DEFAULT_FIELD_NAMES) -> EncodedRecord:
    """Tokenize the texts or conversations of a log record.

    Raises InputError, with the file and line in its message, if the record is invalid or its format is not supported.
    """
    if not record.is_json:
        return EncodedRecord([codec.encode_text_example(record.text)])
    line = fields_of(record)
    try:
        return _encode_line(fields.rename(line), record.where, codec)
    except RequestError as error:
        raise InputError(f"{record.where}: {error}") from error


def encode_usable_record(
    record: InputRecord, codec: TextCodec, fields: FieldNames, *, skip_invalid: bool
) -> EncodedRecord | None:
    """Tokenize a log record; with ``skip_invalid``, return None for an invalid record instead of raising InputError."""
    try:
        return encode_record(record, codec, fields)
    except InputError:
        if not (skip_invalid and record.is_json):
            raise
        return None


def fields_of(record: InputRecord) -> Mapping[str, Any]:
    """Return the fields of a JSON record or a table's row. Raises InputError if the record is not a JSON object."""
    if record.line is not None:
        return record.line
    try:
        record.text.encode()  # invalid UTF-8 was decoded to lone surrogates
        line = json.loads(record.text)
    except (ValueError, RecursionError) as error:
        what = "not UTF-8 text" if isinstance(error, UnicodeEncodeError) else f"not JSON ({error})"
        raise InputError(
            f"{record.where}: the line is {what}. Correct it, or skip such lines with --skip-invalid"
        ) from None
    if not isinstance(line, dict):
        raise InputError(f"{record.where}: the record must be a JSON object, got {type(line).__name__}; {UNDERSTOOD}")
    return line


def _encode_line(line: Mapping[str, Any], where: str, codec: TextCodec) -> EncodedRecord:
    if "token_ids" in line:
        return EncodedRecord([_example_of_ids(line, where, codec)])
    exchanges = parse_exchanges(line)
    if exchanges is None:
        if "text" in line:
            return EncodedRecord([codec.encode_text_example(_string(line["text"], "text", where))])
        found = ", ".join(f'"{str(key)[:40]}"' for key in list(line)[:8]) or "nothing"
        raise InputError(f"{where}: the record has no usable fields (found: {found}); {UNDERSTOOD}")
    examples = [example for exchange in exchanges for example in _encode_exchange(exchange, where, codec)]
    has_prompt = any(exchange.prompt is not None for exchange in exchanges) or not examples
    return EncodedRecord(examples, has_prompt, has_answer=bool(examples))


def _encode_exchange(exchange: Exchange, where: str, codec: TextCodec) -> Iterator[Example | EncodedAnswer]:
    prompt = exchange.prompt
    if prompt is None:
        for answer in exchange.answers:
            text = answer if isinstance(answer, str) else answer["content"]
            if text:
                yield codec.encode_text_example(text)
    elif exchange.is_conversation or _is_chat(prompt):
        kwargs = _template_kwargs(exchange, where)
        if exchange.is_conversation and isinstance(prompt, list) and not prompt:
            return  # an empty chat
        messages = normalize_messages(prompt)  # type: ignore[arg-type]  # it names what is wrong
        if exchange.is_conversation:
            yield from encode_answers(messages, kwargs, codec)
        for answer in exchange.answers:
            message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
            yield from encode_answer(messages, message, kwargs, codec)
    else:
        for answer in exchange.answers:
            text = _string(answer, "completion", where)
            if isinstance(prompt, str):
                yield codec.encode_completion_example(prompt, text)
            elif len(prompt) and not isinstance(prompt[0], str):
                yield codec.encode_answer_example(_ids(prompt, where, codec), text)
            else:
                raise InputError(f'{where}: "prompt" must be a string or token ids, got {type(prompt).__name__}')


def _is_chat(prompt: str | Sequence[Any]) -> bool:
    return not isinstance(prompt, str) and any(isinstance(each, dict) for each in prompt)


def _template_kwargs(exchange: Exchange, where: str) -> dict[str, Any]:
    given = exchange.template_kwargs
    if not isinstance(given, dict):
        raise InputError(f'{where}: "chat_template_kwargs" must be an object, got {type(given).__name__}')
    return {**given, "tools": exchange.tools} if exchange.tools else dict(given)


def _example_of_ids(line: Mapping[str, Any], where: str, codec: TextCodec) -> Example:
    """Return the sequence in a log record whose field "token_ids" contains token ids instead of text.

    Raises InputError if a token id or the record's "prompt_length" is invalid.
    """
    token_ids = _ids(line["token_ids"], where, codec)
    length = line.get("prompt_length", 0)
    if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= len(token_ids):
        raise InputError(f'{where}: "prompt_length" must be within 0..{len(token_ids)}, got {quote_value(length)}')
    return Example(token_ids, length)


def _ids(value: Any, where: str, codec: TextCodec) -> list[int]:
    try:
        ids = np.asarray(value)
    except (ValueError, OverflowError):
        ids = np.empty(0)
    if ids.size == 0 and isinstance(value, list | np.ndarray) and len(value) == 0:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"{where}: token ids must be one list of integers, got {quote_value(value)}")
    if ids.min() < 0 or ids.max() >= codec.vocab_size:
        raise InputError(
            f"{where}: token ids must be within 0..{codec.vocab_size - 1}, got {ids.min()}..{ids.max()}: use "
            "the tokenizer that produced them"
        )
    found: list[int] = ids.tolist()
    return found


def _string(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f'{where}: "{name}" must be a string, got {type(value).__name__}')
    return value
