"""Reading what people have, in any of the formats, to records and to the token ids of requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from cache_builder.inputs.lines import MARKS, Requests, documents, json_lines, vllm_exchanges
from cache_builder.inputs.record import (
    AS_WE_CALL_THEM,
    STANDARD_INPUT,
    FieldNames,
    Format,
    InputError,
    Progress,
    Record,
    messages_of,
    shown_name,
)
from cache_builder.inputs.sources import Part, Source, find_sources
from cache_builder.inputs.streams import open_stream, readable
from cache_builder.inputs.tables import array_sequences, arrow_rows, parquet_rows
from ssd.errors import RequestError, shown
from ssd.text.codec import Example, TextCodec

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


UNDERSTOOD = (
    'understood are "text", "prompt" with "completion", "messages", "conversations", "token_ids", and "response" '
    'with or without "request"; other names with --field'
)


def examples_of(record: Record, codec: TextCodec, fields: FieldNames = AS_WE_CALL_THEM) -> list[Example]:
    """The sequences of one record, which calls them by ``fields``; raises InputError, which names its place."""
    if not record.is_json:
        return [codec.encode_text_example(record.text)]
    line = line_of(record)
    try:
        return _examples_of_line(fields.of(line), record.where, codec)
    except RequestError as error:
        raise InputError(f"{record.where}: {error}") from error


def line_of(record: Record) -> Mapping[str, Any]:
    """The fields of a record that is JSON, or a row; raises InputError."""
    if record.line is not None:
        return record.line
    try:
        line = json.loads(record.text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{record.where}: not JSON ({error}). Correct the line, or leave such lines out with --skip-invalid"
        ) from None
    if not isinstance(line, dict):
        raise InputError(f"{record.where}: a JSON object was expected, got {type(line).__name__}; {UNDERSTOOD}")
    return line


def _examples_of_line(line: Mapping[str, Any], where: str, codec: TextCodec) -> list[Example]:
    if isinstance(line.get("request"), dict) and isinstance(line.get("response"), dict):
        return _examples_of_exchange(_body(line["request"]), _body(line["response"]), where, codec)
    if isinstance(line.get("response"), dict) and "request" not in line:
        return _examples_of_response(_body(line["response"]), where, codec)
    if line.get("log") == "vllm" and isinstance(line.get("completion"), str):
        return [_logged(line, where, codec)]
    if "token_ids" in line:
        return [_as_they_are(line, where, codec)]
    if "conversations" in line and "messages" not in line:
        return _chat(messages_of(line["conversations"]), line, where, codec)
    if "messages" in line:
        return _chat(line["messages"], line, where, codec)
    if "prompt" in line and "completion" in line:
        return [codec.encode_completion_example(_string(line, "prompt", where), _string(line, "completion", where))]
    if "text" in line:
        return [codec.encode_text_example(_string(line, "text", where))]
    found = ", ".join(f'"{str(key)[:40]}"' for key in list(line)[:8]) or "nothing"
    raise InputError(f"{where}: no usable fields: found {found}; {UNDERSTOOD}")


def _examples_of_exchange(
    request: Mapping[str, Any], response: Mapping[str, Any], where: str, codec: TextCodec
) -> list[Example]:
    """An OpenAI request and its response: every choice is an example, the request's own history is not."""
    examples = []
    choices = response.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        message = choice.get("message") if isinstance(choice, dict) else None
        if "messages" in request and isinstance(message, dict):
            examples += _chat([*_list(request, where), message], request, where, codec)[-1:]
        elif isinstance(request.get("prompt"), str) and isinstance(choice, dict):
            examples.append(codec.encode_completion_example(request["prompt"], _string(choice, "text", where)))
    if not examples:
        raise InputError(f'{where}: its "response" has no choices that belong to its "request"; {UNDERSTOOD}')
    return examples


def _examples_of_response(response: Mapping[str, Any], where: str, codec: TextCodec) -> list[Example]:
    """A response whose request is elsewhere, as in the files that OpenAI's batches give: the text of every choice."""
    choices = response.get("choices")
    texts = []
    for choice in choices if isinstance(choices, list) else []:
        message = choice.get("message") if isinstance(choice, dict) else None
        text = message.get("content") if isinstance(message, dict) else _mapping(choice).get("text")
        if isinstance(text, str) and text:
            texts.append(text)
    if not texts:
        raise InputError(f'{where}: its "response" has no choices with text; {UNDERSTOOD}')
    return [codec.encode_text_example(text) for text in texts]


def _as_they_are(line: Mapping[str, Any], where: str, codec: TextCodec) -> Example:
    """Token ids that some other program made with this tokenizer."""
    token_ids = _ids(line["token_ids"], where, codec)
    length = line.get("prompt_length", 0)
    if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= len(token_ids):
        raise InputError(f'{where}: "prompt_length" must be within 0..{len(token_ids)}, got {shown(length)}')
    return Example(token_ids, length)


def _logged(line: Mapping[str, Any], where: str, codec: TextCodec) -> Example:
    """An exchange of vLLM's log: its prompt is rendered already, or given as ids."""
    if "prompt_token_ids" in line:
        return codec.encode_answer_example(_ids(line["prompt_token_ids"], where, codec), line["completion"])
    if not line.get("prompt"):
        return codec.encode_text_example(line["completion"])
    if line.get("is_rendered"):
        return codec.encode_answer_example(codec.encode_completion(line["prompt"]), line["completion"])
    return codec.encode_completion_example(line["prompt"], line["completion"])


def _ids(value: Any, where: str, codec: TextCodec) -> list[int]:
    try:
        ids = np.asarray(value)
    except (ValueError, OverflowError):
        ids = np.empty(0)
    if ids.size == 0 and isinstance(value, list | np.ndarray) and len(value) == 0:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"{where}: token ids must be one list of integers, got {shown(value)}")
    if ids.min() < 0 or ids.max() >= codec.vocab_size:
        raise InputError(
            f"{where}: token ids of this tokenizer are within 0..{codec.vocab_size - 1}, got {ids.min()}..{ids.max()}"
        )
    found: list[int] = ids.tolist()
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _chat(messages: Any, fields: Mapping[str, Any], where: str, codec: TextCodec) -> list[Example]:
    given = fields.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise InputError(f'{where}: "chat_template_kwargs" must be an object, got {type(given).__name__}')
    template_kwargs = dict(given)
    if fields.get("tools"):
        template_kwargs["tools"] = fields["tools"]
    examples = codec.encode_chat_examples(messages, template_kwargs=template_kwargs)
    if not examples:
        raise InputError(f'{where}: "messages" has no assistant message with text, so there is nothing to learn')
    return examples


def _body(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Batch files wrap the body once more."""
    body = part.get("body")
    return body if isinstance(body, dict) else part


def _list(request: Mapping[str, Any], where: str) -> list[Any]:
    messages = request["messages"]
    if not isinstance(messages, list):
        raise InputError(f'{where}: "messages" must be a list, got {type(messages).__name__}')
    return messages


def _string(fields: Mapping[str, Any], name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise InputError(f'{where}: "{name}" must be a string, got {type(value).__name__}')
    return value
