"""Lists made from the code itself: the API, field by field; the server's flags; tuning constants and their choices."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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

_Row = TypeVar("_Row", bound=tuple[str, ...])


def flags_section() -> str:
    """Every flag of ``ssd-serve``, a list a group, with its default."""
    lines: list[str] = []
    groups: dict[str, list[Argument]] = {}
    for argument in build_app().assemble_argument_collection(parse_docstring=True):
        if argument.show and not argument.children:
            group = argument.parameter.group
            first = group if group is None or isinstance(group, Group | str) else next(iter(group))
            groups.setdefault(first.name if isinstance(first, Group) else "options", []).append(argument)
    for title, arguments in groups.items():
        lines += [f"**{title}**", ""]
        for argument in arguments:
            names = " ".join(f"`{name}`" for name in argument.names)
            found = argument.get_choices()
            choices = f" ({'/'.join(found)})" if found else ""
            default = shown_default(argument.field_info.default)
            about = _line(argument.parameter.help or "")
            lines.append(f"- {names}{choices}: {about}{f' (default: {default})' if default else ''}")
        lines.append("")
    return "\n".join(lines)


def cell(text: str) -> str:
    """``text`` as it stands in a table, on one line."""
    return _line(text).replace("|", "\\|")


def _line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


@dataclass(frozen=True)
class _Endpoint:
    """``ignored``, ``refused`` : fields outside the schema, and why."""

    title: str
    body: type[Body]
    ignored: Mapping[str, str]
    refused: Refused


_GENERATES = (fields.IGNORED, {**fields.REFUSED, "best_of": ((), BEST_OF)})
_ENDPOINTS = (
    _Endpoint("chat", ChatBody, *_GENERATES),
    _Endpoint("completions", CompletionBody, *_GENERATES),
    _Endpoint("responses", ResponsesBody, response_fields.IGNORED, response_fields.REFUSED),
    _Endpoint("messages", AnthropicBody, anthropic_fields.IGNORED, anthropic_fields.REFUSED),
    _Endpoint("count_tokens", CountTokensBody, anthropic_fields.IGNORED, anthropic_fields.REFUSED),
    _Endpoint("tokenize (text)", TokenizeTextBody, {}, {}),
    _Endpoint("tokenize (messages)", TokenizeChatBody, {}, {}),
    _Endpoint("detokenize", DetokenizeBody, {}, {}),
)
_HEADERS = (
    ("authorization", "`Bearer KEY`, where the server has keys"),
    ("x-api-key", "`KEY`, as Anthropic's clients send it; on any path"),
    ("x-request-id", "up to 128 visible characters: comes back, and stands in the log; made where there is none"),
    (NO_LEARN_HEADER, "1: as `store: false`, for clients that cannot send that"),
    ("anthropic-version, anthropic-beta", "ignored"),
    ("traceparent", "W3C trace context, where the server traces"),
)


def api_section() -> str:
    """Every field once, beside the endpoints that have it alike; why others are ignored or refused; headers."""
    honoured: dict[tuple[str, str, str], list[str]] = {}
    ignored: dict[tuple[str, str], list[str]] = {}
    refused: dict[tuple[str, str, str], list[str]] = {}
    parts: dict[str, Any] = {}
    for endpoint in _ENDPOINTS:
        schema = endpoint.body.model_json_schema()
        known = schema["properties"]
        parts |= schema.get("$defs", {})
        for name, field in known.items():
            required = name in schema.get("required", ())
            type_ = _type(field) + (", required" if required else _default(field))
            honoured.setdefault((name, type_, field.get("description", "")), []).append(endpoint.title)
        for name, reason in endpoint.ignored.items():
            if name not in known:
                ignored.setdefault((name, reason), []).append(endpoint.title)
        for name, (values, reason) in endpoint.refused.items():
            if name not in known:
                unless = ", ".join(f"`{json.dumps(value)}`" for value in values)
                refused.setdefault((name, unless, reason), []).append(endpoint.title)
    lines = ["### Honoured", "", "| field | type, default | at | |", "|---|---|---|---|"]
    for (name, type_, about), ends in sorted(honoured.items()):
        at = "all" if len(ends) == len(_ENDPOINTS) else ", ".join(ends)
        lines.append(f"| `{name}` | {cell(type_)} | {at} | {cell(about)} |")
    lines.append("")
    lines += ["### Ignored", ""]
    for titles, found in _by_endpoints(ignored):
        lines += [f"- **{titles}**: {_by_reason((f'`{name}`', reason) for name, reason in found)}"]
    lines += ["", "### Refused", ""]
    for titles, those in _by_endpoints(refused):
        named = ((f"`{name}`{f' (but for {unless})' if unless else ''}", reason) for name, unless, reason in those)
        lines += [f"- **{titles}**: {_by_reason(named)}"]
    lines += ["", "### Parts", ""]
    for name, schema in sorted(parts.items()):
        described = (f"`{field}` {_type(of)}" for field, of in schema.get("properties", {}).items())
        lines.append(f"- `{name}`: {', '.join(described)}")
    lines += ["", "### Headers", "", *(f"- `{name}`: {meaning}" for name, meaning in _HEADERS)]
    return "\n".join(lines)


def _by_endpoints(found: Mapping[_Row, Sequence[str]]) -> Iterator[tuple[str, list[_Row]]]:
    """What the same endpoints have, first what most of them have."""
    groups: dict[tuple[str, ...], list[_Row]] = {}
    for row, titles in found.items():
        groups.setdefault(tuple(titles), []).append(row)
    for titles in sorted(groups, key=len, reverse=True):
        yield ", ".join(titles), sorted(groups[titles])


def _by_reason(found: Iterable[tuple[str, str]]) -> str:
    """Each reason once, behind the names that have it."""
    reasons: dict[str, list[str]] = {}
    for name, reason in found:
        reasons.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


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
