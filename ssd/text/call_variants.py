"""Rewrites conversations with tool calls in equivalent forms, for chat templates that refuse or drop the usual form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ssd.text.messages import Message, equivalent_forms, hermes_calls

WriteCalls = Callable[[Sequence[Mapping[str, Any]]], str]
"""The type of a function that writes tool calls as text in the model's own format.

Its argument is a list of mappings with ``name`` and ``arguments``.
"""


class Variant(NamedTuple):
    """A conversation with the meaning of the client's, but with messages that were rewritten for a chat template."""

    messages: list[Message]
    one_call_each: bool = False  # whether each message has at most one tool call


def variants(messages: list[Message], write_calls: WriteCalls) -> Iterator[Variant]:
    """Yield a conversation and rewritings of it with the same meaning, the least changed first.

    Some chat templates refuse or drop tool calls in the usual form. The caller uses the first rewriting that the
    template renders without leaving out a part. A rewriting makes one or more of these changes:

    - Text next to a tool call becomes a message before the call.
    - Each call becomes a message of its own, followed by its result.
    - Results become user messages.
    - Calls become text.
    - Arguments that are not a JSON object are wrapped in an object with the key "arguments".

    Each rewriting is yielded in every form of `equivalent_forms`. The order and number of the rewritings depend only on
    the roles and parts of the messages, so conversations with the same roles and parts can use the same rewriting.
    """
    seen: list[list[Message]] = []
    for arrangement, one_call_each in _arrangements(messages, write_calls):
        for conversation in (arrangement, _with_object_arguments(arrangement)):
            if conversation in seen:
                continue
            seen.append(conversation)
            for way in equivalent_forms(conversation):
                yield Variant(way, one_call_each)


def _arrangements(messages: list[Message], write_calls: WriteCalls) -> Iterator[tuple[list[Message], bool]]:
    yield messages, False
    yield _split_text_from_calls(messages), False
    yield _one_call_each(messages), True
    yield _one_call_each(_split_text_from_calls(messages)), True
    yield _results_as_users(messages), False
    yield _results_as_users(_one_call_each(messages)), True
    yield _calls_as_text(messages, write_calls, beside_text=True), False
    yield _calls_as_text(messages, write_calls), False
    yield _results_as_users(_calls_as_text(messages, write_calls)), False


def functions_of(message: Message) -> list[Mapping[str, Any]]:
    """Return the field ``function`` (name and arguments) of each tool call in a message; skip malformed tool calls."""
    functions = [call.get("function") for call in message.get("tool_calls", ())]
    return [function for function in functions if isinstance(function, Mapping)]


def has_object_arguments(function: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a tool call are a JSON object or missing, as the API requires."""
    return isinstance(function.get("arguments", {}), Mapping)


def _split_text_from_calls(messages: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            found.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
        found.append(message)
    return found


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        end = next((n for n in range(at, len(messages)) if messages[n]["role"] != "tool"), len(messages))
        results, at = list(messages[at:end]), end
        named = [call["id"] for call in calls if call.get("id") is not None]
        for number, call in enumerate(calls):
            first = {**message, "tool_calls": [call]}
            found.append(first if number == 0 else {"role": message["role"], "content": "", "tool_calls": [call]})
            own = [n for n, result in enumerate(results) if result.get("tool_call_id") == call.get("id") in named]
            own = own or [n for n, result in enumerate(results) if result.get("tool_call_id") not in named][:1]
            found += [results.pop(n) for n in own[:1]]
        found += results
    return found


def _results_as_users(messages: Sequence[Message]) -> list[Message]:
    return [
        {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def _calls_as_text(messages: Sequence[Message], write_calls: WriteCalls, *, beside_text: bool = False) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        functions = functions_of(message)
        if functions and (message["content"] or not beside_text):
            written = [message["content"], write_calls(functions)] if message["content"] else [write_calls(functions)]
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = "\n".join(written)
        found.append(message)
    return found


def _with_object_arguments(messages: Sequence[Message]) -> list[Message]:
    def with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function")
        if not isinstance(function, Mapping) or has_object_arguments(function):
            return call
        given = function["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": {"arguments": text}}}

    return [
        {**message, "tool_calls": [with_object(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def write_hermes_calls(functions: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(hermes_calls(functions))
