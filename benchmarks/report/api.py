"""The table of the API, made from the schemas: field by field what is honoured, ignored and refused, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.report.reference import cell
from server.intake.learning import NO_LEARN_HEADER
from server.schema import anthropic_fields, fields, response_fields
from server.schema.anthropic_body import AnthropicBody, CountTokensBody
from server.schema.body import Body
from server.schema.chat import ChatBody
from server.schema.completions import CompletionBody
from server.schema.fields import BEST_OF, Refused
from server.schema.responses import ResponsesBody
from server.schema.tokenize import DetokenizeBody, TokenizeChatBody, TokenizeTextBody


@dataclass(frozen=True)
class _Endpoint:
    """``ignored``, ``refused`` : fields outside the schema, and why."""

    title: str
    body: type[Body]
    ignored: Mapping[str, str]
    refused: Refused


_GENERATES = (fields.IGNORED, {**fields.REFUSED, "best_of": ((), BEST_OF)})
_ENDPOINTS = (
    _Endpoint("POST /v1/chat/completions", ChatBody, *_GENERATES),
    _Endpoint("POST /v1/completions", CompletionBody, *_GENERATES),
    _Endpoint("POST /v1/responses", ResponsesBody, response_fields.IGNORED, response_fields.REFUSED),
    _Endpoint("POST /v1/messages", AnthropicBody, anthropic_fields.IGNORED, anthropic_fields.REFUSED),
    _Endpoint("POST /v1/messages/count_tokens", CountTokensBody, anthropic_fields.IGNORED, anthropic_fields.REFUSED),
    _Endpoint("POST /tokenize, of text", TokenizeTextBody, {}, {}),
    _Endpoint("POST /tokenize, of messages", TokenizeChatBody, {}, {}),
    _Endpoint("POST /detokenize", DetokenizeBody, {}, {}),
)


def api_section() -> str:
    """Every endpoint with a body, every field that it knows, and the parts that fields are made of."""
    lines: list[str] = []
    parts: dict[str, Any] = {}
    for endpoint in _ENDPOINTS:
        schema = endpoint.body.model_json_schema()
        parts |= schema.get("$defs", {})
        lines += [f"### {endpoint.title}", "", "| field | | type, default | |", "|---|---|---|---|"]
        for name, field in schema["properties"].items():
            required = name in schema.get("required", ())
            type_ = _type(field) + (", required" if required else _default(field))
            lines.append(f"| `{name}` | honoured | {cell(type_)} | {cell(field.get('description', ''))} |")
        for name, reason in sorted(endpoint.ignored.items()):
            if name not in schema["properties"]:
                lines.append(f"| `{name}` | ignored | | {cell(reason)} |")
        for name, (values, reason) in sorted(endpoint.refused.items()):
            if name not in schema["properties"]:
                unless = ", ".join(f"`{json.dumps(value)}`" for value in values)
                lines.append(f"| `{name}` | refused | {f'but for {unless}' if unless else ''} | {cell(reason)} |")
        lines.append("")
    lines += ["### Parts", "", "| part | fields |", "|---|---|"]
    for name, schema in sorted(parts.items()):
        found = (f"`{field}` {_type(of)}" for field, of in schema.get("properties", {}).items())
        lines.append(f"| `{name}` | {cell(', '.join(found))} |")
    lines += ["", "### Headers", "", "| header | |", "|---|---|", *_headers()]
    return "\n".join(lines)


def _headers() -> list[str]:
    meanings = {
        "authorization": "`Bearer KEY`, where the server has keys",
        "x-api-key": "`KEY`, the same as Anthropic's clients send it; on any path",
        "x-request-id": "up to 128 visible characters: comes back, and stands in the log; without one it is made",
        NO_LEARN_HEADER: "1: as `store: false`, for clients that cannot send that",
        "anthropic-version, anthropic-beta": "ignored: fields are known by their names",
        "traceparent": "W3C trace context, where the server traces",
    }
    return [f"| `{name}` | {cell(meaning)} |" for name, meaning in meanings.items()]


def _default(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    return "" if default is None else f", `{json.dumps(default)}`"


def _type(schema: Mapping[str, Any]) -> str:
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(alternatives, list):
        return " or ".join(dict.fromkeys(name for each in alternatives if (name := _type(each)) != "null"))
    if "$ref" in schema:
        return f"`{str(schema['$ref']).rsplit('/', 1)[-1]}`"
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"])
    if schema.get("type") == "array" and schema.get("items"):
        return f"list of {_type(schema['items'])}"
    return str(schema.get("type", "any"))
