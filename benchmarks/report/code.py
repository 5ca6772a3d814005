"""Tables made from the code itself: the API, field by field; the server's flags; tuning constants and their choices."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import Argument, Group

from benchmarks.report.choices import CHOICES, Choice
from server.command.arguments import build_app
from server.command.flags import shown_default
from server.intake.learning import NO_LEARN_HEADER
from server.schema import anthropic_fields, fields, response_fields
from server.schema.anthropic_body import AnthropicBody, CountTokensBody
from server.schema.body import Body
from server.schema.chat import ChatBody
from server.schema.completions import CompletionBody
from server.schema.fields import BEST_OF, Refused
from server.schema.responses import ResponsesBody
from server.schema.tokenize import DetokenizeBody, TokenizeChatBody, TokenizeTextBody


def flags_section() -> str:
    """Every flag of ``ssd-serve``, a table a group, with its default."""
    lines: list[str] = []
    tables: dict[str, list[Argument]] = {}
    for argument in build_app().assemble_argument_collection(parse_docstring=True):
        if argument.show and not argument.children:
            group = argument.parameter.group
            first = group if group is None or isinstance(group, Group | str) else next(iter(group))
            tables.setdefault(first.name if isinstance(first, Group) else "options", []).append(argument)
    for title, arguments in tables.items():
        lines += [f"**{title}**", "", "| flag | meaning |", "|---|---|"]
        for argument in arguments:
            names = " ".join(f"`{name}`" for name in argument.names)
            found = argument.get_choices()
            choices = f" {' / '.join(found)}." if found else ""
            default = shown_default(argument.field_info.default)
            about = argument.parameter.help or ""
            lines.append(f"| {names} |{choices} {cell(about)}{f' (default: {default})' if default else ''} |")
        lines.append("")
    return "\n".join(lines)


def cell(text: str) -> str:
    """``text`` as it stands in a table, on one line."""
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


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


def constants_section(root: Path, choices: Mapping[str, Sequence[Choice]] = CHOICES) -> str:
    """Every tuning constant with its value and what chose it, a table a subject, behind it those that nothing chose.

    Raises SystemExit where a constant is not what its choice speaks of: who changes one says what chose the new value.
    """
    lines: list[str] = []
    for subject, members in choices.items():
        for choice in members:
            _check(choice, root / "ssd" / choice.file)
        lines += [f"## {subject}", "", "| constant | value | decides | chosen by |", "|---|---|---|---|"]
        lines += [_row(choice) for choice in members if choice.chosen_by]
        guesses = [_guess(choice) for choice in members if not choice.chosen_by]
        lines += ["", *([f"Not measured: {'; '.join(guesses)}.", ""] if guesses else [])]
    return "\n".join(lines)


def _check(choice: Choice, path: Path) -> None:
    there = _values(path)
    for name, value in choice.values.items():
        if there.get(name) != value:
            raise SystemExit(
                f"{path}: {name} is {there.get(name)}, benchmarks/report/choices.py says what chose {value}"
            )


def _row(choice: Choice) -> str:
    values = ", ".join(f"`{value}`" for value in choice.values.values())
    where = "" if choice.file == "config.py" else f"<br>{choice.file}"
    return f"| {', '.join(map(_shown, choice.values))}{where} | {values} | {choice.decides} | {choice.chosen_by} |"


def _guess(choice: Choice) -> str:
    values = ", ".join(f"{_shown(name)} {value}" for name, value in choice.values.items())
    return f"{values} ({choice.file}: {choice.decides})"


def _shown(name: str) -> str:
    return f"`{name.rpartition('.')[2]}`"


def _values(path: Path) -> dict[str, str]:
    """The text of what a file assigns to names: of the module, and of its classes as ``Class.name``."""
    values: dict[str, str] = {}

    def collect(body: Sequence[ast.stmt], prefix: str) -> None:
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                collect(statement.body, f"{statement.name}.")
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        values[prefix + target.id] = ast.unparse(statement.value)

    collect(ast.parse(path.read_text()).body, "")
    return values
