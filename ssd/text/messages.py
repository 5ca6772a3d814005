"""Converts chat messages from the formats that clients send to the format that chat templates read.

For templates without support for tools, the tools, tool calls and results are written as text in the format of Nous
Research's Hermes and of Qwen, which the tool parser "hermes" reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ssd.errors import RequestError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SYSTEM_ROLES = ("system", "developer")

# By the type of a content part, the field with its text.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return copies of chat messages with ``content`` as a single string and tool-call arguments as objects.

    Text parts are joined by a line feed, as in vLLM. OpenAI's older ``function_call`` and the role "function" become
    tool calls and the role "tool". Reasoning is stored under both keys that templates read. Other keys are kept unless
    their value is null. If a message is invalid, a RequestError that names it is raised, with ``param="messages"``.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _messages_error(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise _messages_error("messages is empty: give at least one message")
    return [_normalize(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise _messages_error(f'{where} must be an object with "role" and "content", got {type(message).__name__}')
    role = message.get("role")
    if role not in ROLES:
        raise _messages_error(f"{where} has role {role!r:.80}; roles are {', '.join(ROLES)}")
    given = {key: value for key, value in message.items() if value is not None}
    content, tool_calls = given.get("content"), given.pop("tool_calls", None)
    if content is None and role != "assistant" and not (role == "function" and "content" in message):
        raise _messages_error(f"{where} has no content: give a string or a list of text parts")
    if role in ("tool", "function") and isinstance(content, list):
        content = [convert_to_text_part(part) for part in content]
    normalized = {**given, "content": "" if content is None else _text_of(content, where)}
    if role == "function":
        normalized["role"] = "tool"
    if role == "assistant":
        if tool_calls is None and isinstance(older := given.get("function_call"), Mapping):
            del normalized["function_call"]
            tool_calls = [{"type": "function", "function": older}]
        _name_reasoning(normalized)
    if tool_calls is not None and (
        calls := _tool_calls(tool_calls, where)
    ):  # some templates only test whether the key exists
        normalized["tool_calls"] = calls
    return normalized


def _name_reasoning(message: Message) -> None:
    """Store reasoning under both keys that templates read: Qwen's ``reasoning_content`` and gpt-oss's ``thinking``."""
    thought = message.get("reasoning_content", message.get("reasoning"))
    if isinstance(thought, str) and thought:
        message.setdefault("reasoning_content", thought)
        if not message["content"]:
            message.setdefault("thinking", thought)


def _text_of(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _messages_error(
            f"{where} has content of type {type(content).__name__}: give a string or a list of text parts"
        )
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise _messages_error(
                f"{where}.content[{number}] is not a text part: only "
                f'{{"type": "text", "text": ...}} is supported, got type {kind!r:.80}'
            )
        texts.append(text)
    return "\n".join(texts)


def convert_to_text_part(part: object) -> object:
    """Convert a content part of a tool result, such as a document or an image, to a text part.

    Text documents and search results become their text. Any other part becomes a note that the part was left out, since
    a client cannot remove a part from a tool's result.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    return part if not isinstance(kind, str) or kind in _TEXTS else {"type": "text", "text": _part_text(part, kind)}


def _part_text(part: Any, kind: str) -> str:
    if kind == "tool_reference":
        return f"Tool available: {part.get('tool_name')}"
    source = part.get("source")
    held = source if kind == "document" and isinstance(source, Mapping) else part
    content = held.get("data") if held.get("type") == "text" else held.get("content")
    pieces = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [each.get("text") for each in map(convert_to_text_part, pieces) if isinstance(each, Mapping)]
    names = [each for each in map(part.get, ("title", "filename", "context")) if isinstance(each, str)]
    if found := [text for text in texts if isinstance(text, str)]:
        return "\n".join([*names, *([source] if isinstance(source, str) else []), *found])
    name = " ".join([kind.removeprefix("input_").removesuffix("_url"), *names[:1]])
    return f"[{name} left out: this model reads only text]"


def _tool_calls(tool_calls: object, where: str) -> list[Any]:
    if not isinstance(tool_calls, list) or not all(isinstance(call, Mapping) for call in tool_calls):
        raise _messages_error(f"{where}.tool_calls must be a list of objects")
    normalized = []
    for call in tool_calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                arguments = function["arguments"]  # a model may write invalid JSON
            call = {**call, "function": {**function, "arguments": arguments}}
        normalized.append(call)
    return normalized


_ALTERNATING = frozenset({("user", "user"), ("assistant", "assistant")})


def equivalent_forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield a conversation and forms of it with the same meaning, the least changed first.

    Some chat templates require alternating roles, or a single system message or none. The caller takes the first form
    that the template accepts. The forms are, in order: (1) consecutive messages of one role are joined; (2) the system
    messages at the beginning are joined, and later ones become user messages; (3) both 1 and 2; (4) as 3, and a user
    message after a tool result is appended to the result; (5) as 4, and the system message becomes a user message. Each
    form occurs twice: with tool-call arguments as objects, and with arguments as JSON text, which a few templates
    require. ``messages`` must be normalized. O(characters).

    If a conversation gets longer, its beginning keeps its form, so the prompt still hits the prefix cache.
    """
    said = [messages]
    yield messages
    one_system = with_one_system(messages)
    both = _merge_pairs(one_system, _ALTERNATING)
    results = _merge_pairs(both, {("tool", "user")})
    no_system = _merge_pairs(_as_users(results), _ALTERNATING)
    for way in (messages, _merge_pairs(messages, _ALTERNATING), one_system, both, results, no_system):
        for form in (way, _with_written_arguments(way)):
            if form not in said:
                said.append(form)
                yield form


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages at the beginning of a conversation, and turn later ones into user messages."""
    begin = next((at for at, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    first = _merge_pairs([{**message, "role": "system"} for message in messages[:begin]], {("system", "system")})
    return first + _as_users(messages[begin:])


def _as_users(messages: Sequence[Message]) -> list[Message]:
    return [{**message, "role": "user"} if message["role"] in SYSTEM_ROLES else message for message in messages]


def _merge_pairs(messages: Sequence[Message], pairs: Collection[tuple[str, str]]) -> list[Message]:
    """Join consecutive messages if ``pairs`` contains the pair of their roles. The result has the first message's role.

    Nothing is joined to a message with tool calls.
    """
    merged: list[Message] = []
    for message in messages:
        before = merged[-1] if merged else {}
        if (before.get("role"), message["role"]) in pairs and "tool_calls" not in before:
            texts = [text for text in (before["content"], message["content"]) if text]
            merged[-1] = {**message, **before, "content": "\n\n".join(texts)}
        else:
            merged.append(message)
    return merged


def _with_written_arguments(messages: Sequence[Message]) -> list[Message]:
    def written(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function")
        if not isinstance(function, Mapping) or isinstance(function.get("arguments", ""), str):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [written(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _messages_error(message: str) -> RequestError:
    return RequestError(message, param="messages")


_PREAMBLE = """\
You may call functions. These are there, one a line, each with the JSON schema of its arguments:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between these marks, and the next call after it; write nothing \
else then:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
What a function has returned is given to you between <tool_response> and </tool_response>."""

_KNOWS_TOOLS = re.compile(r"\btools\b")


def mentions_tools(template: str) -> bool:
    return _KNOWS_TOOLS.search(template) is not None


def describe_tools_in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, has_system: bool
) -> list[Message]:
    """Rewrite a conversation with tools as plain messages, for a chat template without support for tools.

    The system message describes the tools; if ``has_system`` is False, because the template supports no system message,
    the first message does. ``messages`` are normalized, ``tools`` are in OpenAI's format. O(characters).
    """
    told: list[Message] = []
    before = None
    for message in messages:
        role = message["role"]
        if role == "tool":
            answer = f"<tool_response>\n{message['content']}\n</tool_response>"
            if before == "tool":  # one message for all results: some templates require alternating roles
                told[-1]["content"] += f"\n{answer}"
            else:
                told.append({"role": "user", "content": answer})
        elif message.get("tool_calls"):
            told.append({"role": role, "content": _calls_as_text(message)})
        else:
            told.append(dict(message))
        before = role
    if not tools:
        return told
    preamble = _PREAMBLE.format(tools="\n".join(_json(tool.get("function", tool)) for tool in tools))
    if told[0]["role"] == "system":
        told[0]["content"] = f"{told[0]['content']}\n\n{preamble}"
    elif has_system:
        told.insert(0, {"role": "system", "content": preamble})
    else:
        told[0]["content"] = f"{preamble}\n\n{told[0]['content']}"
    return told


def _calls_as_text(message: Mapping[str, Any]) -> str:
    calls = [call.get("function") for call in message["tool_calls"]]
    written = hermes_calls([call for call in calls if isinstance(call, Mapping)])
    return "\n".join([message["content"], *written] if message["content"] else written)


def hermes_calls(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"<tool_call>\n{_json({'name': call.get('name'), 'arguments': call.get('arguments', {})})}\n</tool_call>"
        for call in functions
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
