"""Reading of OpenTelemetry spans of model calls as records, from ``gen_ai`` attributes (standard or OpenLLMetry)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cache_builder.inputs.recorded_responses import as_mapping

_IDS: Final = ("span_id", "spanId", "trace_id", "traceId", "context")
_CALLS: Final = (None, "chat", "text_completion", "generate_content")


def find_spans(line: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return the OpenTelemetry spans in a record that is a span or an OTLP export; None for any other record."""
    if isinstance(line.get("resourceSpans"), list):
        scopes = [scope for each in line["resourceSpans"] for scope in _objects(as_mapping(each).get("scopeSpans"))]
        return [span for scope in scopes for span in _objects(scope.get("spans"))]
    attributes = line.get("attributes")
    if not isinstance(attributes, dict | list) or "messages" in line or "request" in line:
        return None
    is_span = any(key in line for key in _IDS) or (isinstance(attributes, dict) and "gen_ai" in str([*attributes]))
    return [line] if is_span else None


def parse_model_call(span: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert an OpenTelemetry span to a record with ``messages`` and ``response``; None if it is no model call."""
    attributes: dict[str, Any] = {}
    for part in (span, *_objects(span.get("events"))):
        for name, value in _attributes(part.get("attributes")):
            _set_at_path(attributes, name.split("."), value)
    said = as_mapping(attributes.get("gen_ai"))
    if as_mapping(said.get("operation")).get("name") not in _CALLS:
        return None
    asked = as_mapping(said.get("input")).get("messages", said.get("prompt"))
    answers = as_mapping(said.get("output")).get("messages", said.get("completion"))
    if asked is None and answers is None:
        return None
    messages = [message for each in _as_list(asked) for message in _messages_of(each)]
    system = _text_of_parts(_as_list(said.get("system_instructions")))
    functions = as_mapping(as_mapping(attributes.get("llm")).get("request")).get("functions")
    tools = as_mapping(said.get("tool")).get("definitions", functions)
    return {
        "messages": [{"role": "system", "content": system}, *messages] if system else messages,
        "response": {"choices": [{"message": message} for each in _as_list(answers) for message in _messages_of(each)]},
        "tools": [
            {**tool, "parameters": _parse_nested_json(tool.get("parameters"))} for tool in _objects(_as_list(tools))
        ],
    }


def is_openinference(span: Mapping[str, Any]) -> bool:
    """Return whether an OpenTelemetry span comes from Phoenix (OpenInference), which has no ``gen_ai`` attributes."""
    names = [name for name, _ in _attributes(span.get("attributes"))]
    return any(name.startswith(("openinference.", "llm.input_messages")) or name == "llm" for name in names)


def _attributes(given: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of an OpenTelemetry span's attributes, which OTLP stores as a list of typed values."""
    if isinstance(given, dict):
        yield from given.items()
    for each in _objects(given):
        if isinstance(each.get("key"), str):
            yield each["key"], _unwrap_value(each.get("value"))


def _unwrap_value(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, inner),) = value.items()
    if kind == "arrayValue":
        return [_unwrap_value(each) for each in as_mapping(inner).get("values", [])]
    if kind == "kvlistValue":
        return dict(_attributes(as_mapping(inner).get("values")))
    return inner


def _set_at_path(whole: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(whole.get(name), dict):
            whole[name] = {}
        whole = whole[name]
    whole[path[-1]] = value


def _as_list(value: Any) -> list[Any]:
    value = _parse_nested_json(value)
    if isinstance(value, dict) and all(key.isdecimal() for key in value):
        return [value[key] for key in sorted(value, key=int)]
    return value if isinstance(value, list) else [] if value is None else [value]


def _messages_of(message: Any) -> Iterator[Any]:
    """Convert a span's message to messages of chat completions; tool results in it become messages of their own."""
    if isinstance(message, str):
        yield {"role": "user", "content": message}
    elif isinstance(message, dict) and isinstance(message.get("parts"), list):
        parts = _objects(message["parts"])
        for part in parts:
            if part.get("type") == "tool_call_response":
                result = part.get("response", part.get("result"))
                text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
                yield {"role": "tool", "tool_call_id": part.get("id"), "content": text}
        calls = [part for part in parts if part.get("type") == "tool_call"]
        text, thought = _text_of_parts(parts), _text_of_parts(parts, "reasoning")
        if text or calls:
            has = {"tool_calls": calls, "reasoning_content": thought}
            yield {"role": message.get("role"), "content": text, **{key: value for key, value in has.items() if value}}
    elif isinstance(message, dict):
        calls = _as_list(message.get("tool_calls"))
        yield {**message, "tool_calls": calls} if calls else message


def _text_of_parts(parts: list[Any], kind: str = "text") -> str:
    texts = [part.get("content") for part in _objects(parts) if part.get("type") == kind]
    return "\n".join(text for text in texts if isinstance(text, str))


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _parse_nested_json(value: Any) -> Any:
    if not isinstance(value, str) or value[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
