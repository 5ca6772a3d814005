"""Reading of session logs of the coding agents Claude Code and Codex, which have several lines per turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any, Final

from cache_builder.inputs.chat_formats import ANSWER_KEYS, PROMPT_KEYS
from cache_builder.inputs.record import BYTE_ORDER_MARK, InputError, InputRecord
from cache_builder.inputs.recorded_responses import as_mapping

_MAX_BYTES: Final = 1 << 30
_CODEX: Final = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_CODEX_ITEMS: Final = tuple(
    "message function_call function_call_output custom_tool_call custom_tool_call_output local_shell_call".split()
)

_OTHERS: Final = (*PROMPT_KEYS, *ANSWER_KEYS, "text")
"""Fields that never occur in a coding agent's session log, so a file that has one is another kind of file."""

Line = Mapping[str, Any]


def is_session(line: bytes | str) -> bool:
    """Return whether a file is a session log of a coding agent, judging by its first line."""
    return (
        _reader_of(_parse_or_none(line.removeprefix(BYTE_ORDER_MARK) if isinstance(line, bytes) else line)) is not None
    )


def read_sessions(records: Iterator[InputRecord]) -> Iterator[InputRecord]:
    """Convert the lines of an agent's session log to conversations; records of other files are yielded unchanged.

    A line that is not JSON remains a record. Raises InputError for a session of more than 1 GiB.
    """
    first = next(records, None)
    if first is None:
        return
    read = _reader_of(_parse_or_none(first.text))
    if read is None:
        yield from chain((first,), records)
        return
    lines, num_bytes = list[Line](), 0
    for record in chain((first,), records):
        line = _parse_or_none(record.text)
        num_bytes += len(record.text)
        if num_bytes > _MAX_BYTES:
            raise InputError(f"{record.where}: the session has more than {_MAX_BYTES >> 30} GiB: split its file")
        if isinstance(line, dict):
            lines.append(line)
        else:
            yield record
    number = 0
    for number, conversation in enumerate(filter(itemgetter("messages"), read(lines)), start=1):
        yield InputRecord(f"{first.where}: conversation {number}", "", is_json=True, line=conversation)
    if number == 0:
        raise InputError(
            f"{first.where}: the file begins like the session of a coding agent, but has no message: omit this file"
        )


def _reader_of(line: Any) -> Callable[[list[Line]], Iterator[dict[str, Any]]] | None:
    if not isinstance(line, dict) or not isinstance(line.get("type"), str) or not line.keys().isdisjoint(_OTHERS):
        return None
    if line["type"] in _CODEX and isinstance(line.get("payload"), dict):
        return _codex
    is_claude = "sessionId" in line or "leafUuid" in line or line["type"] == "file-history-snapshot"
    return _claude if is_claude else None


def _parse_or_none(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _claude(lines: list[Line]) -> Iterator[dict[str, Any]]:
    """Yield the conversations of a Claude Code session: the main one, one after each summary, and one per subagent.

    If the user returned to an earlier message, the messages of the abandoned branch are left out. Messages stay in the
    order of the file, because parallel tool calls are siblings in Claude's tree of messages, not a chain.
    """
    parents = {line["uuid"]: line.get("parentUuid") for line in lines if isinstance(line.get("uuid"), str)}
    roots: dict[str, str] = {}
    conversations: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for line in lines:
        uuid, parent, message = line.get("uuid"), line.get("parentUuid"), as_mapping(line.get("message"))
        if not isinstance(uuid, str):
            continue
        root = roots[uuid] = roots.get(parent, uuid) if isinstance(parent, str) else uuid
        if (
            not message
            or line.get("type") not in ("user", "assistant")
            or line.get("isApiErrorMessage")
            or line.get("isVisibleInTranscriptOnly")
        ):
            continue
        turns = conversations.setdefault(root, [])
        content = message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        same = [turn for _, turn in turns[-8:] if turn["id"] is not None and turn["id"] == message.get("id")]
        if same:  # a block of the message on each line
            same[-1]["content"] += blocks
            continue
        if message.get("role") == "user" and not any(as_mapping(each).get("type") == "tool_result" for each in blocks):
            places = {name: place for place, (name, _) in enumerate(turns)}
            while isinstance(parent, str) and parent not in places:
                parent = parents.get(parent)
            if isinstance(parent, str):
                del turns[places[parent] + 1 :]
        turns.append((uuid, {"id": message.get("id"), "role": message.get("role"), "content": [*blocks]}))
    for turns in conversations.values():
        yield {"messages": [{"role": turn["role"], "content": turn["content"]} for _, turn in turns]}


def _codex(lines: list[Line]) -> Iterator[dict[str, Any]]:
    """Yield the conversations of a Codex session: one up to each compaction of the context, and the last one."""
    begin: dict[str, Any] = {}
    items: list[Any] = []
    for line in lines:
        payload = as_mapping(line.get("payload"))
        if line.get("type") == "session_meta":
            given = payload.get("instructions") or as_mapping(payload.get("base_instructions")).get("text")
            begin = {"instructions": given} if isinstance(given, str) else {}
        elif line.get("type") == "compacted":
            yield {**begin, "messages": items}
            shorter = payload.get("replacement_history")
            text = {"role": "user", "content": payload.get("message") or ""}
            items = [_codex_item(item) for item in shorter] if isinstance(shorter, list) else [text]
        elif line.get("type") == "response_item" and payload.get("type") in _CODEX_ITEMS:
            items.append(_codex_item(payload))
    yield {**begin, "messages": items}


def _codex_item(item: Line) -> Line:
    """Convert a line of a Codex session to an item of OpenAI's Responses API; all calls become function calls."""
    kind = item.get("type")
    if kind in ("custom_tool_call", "local_shell_call"):
        name, given = item.get("name", "local_shell"), item.get("action", {"input": item.get("input")})
        return {"type": "function_call", "call_id": item.get("call_id"), "name": name, "arguments": json.dumps(given)}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        text = output.get("content") if isinstance(output, dict) else output
        return {"type": "function_call_output", "call_id": item.get("call_id"), "output": text}
    return item
