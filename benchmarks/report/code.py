"""Reference lists that are generated from the code: the fields of the API, the server's flags, and the defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as fields_of
from typing import Any, TypeVar

from cyclopts import Argument, Group

from benchmarks.report.choices import CHOICES, Choice
from server.admission.auth_middleware import CACHE_CONTROL_HEADER
from server.command.arguments import build_app
from server.command.flags import shown_default
from server.schema.anthropic import AnthropicBody, CountTokensBody
from server.schema.body import Body
from server.schema.chat import ChatBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from server.schema.generate import CompletionBody
from server.schema.responses import ResponsesBody
from ssd import config

_Row = TypeVar("_Row", bound=tuple[str, ...])


def flags_section() -> str:
    """Return a list of all flags of ``ssd-serve`` with their defaults, by group."""
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


def _line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


_ENDPOINTS: dict[str, type[Body]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesBody,
    "messages": AnthropicBody,
    "count_tokens": CountTokensBody,
    "tokenize (text)": TokenizeTextBody,
    "tokenize (messages)": TokenizeChatBody,
    "detokenize": DetokenizeBody,
}
_HEADERS = (
    ("authorization", "`Bearer KEY`. Required if the server has API keys."),
    ("x-api-key", "`KEY`, in place of `authorization`. Anthropic's clients send it. Accepted on all paths."),
    (
        "x-request-id",
        "The request id, at most 128 visible characters. The response and the log contain it. Default: created.",
    ),
    (CACHE_CONTROL_HEADER, "`no-store` has the effect of `store: false`, for clients that cannot set this field."),
    ("anthropic-version", "With it, `/v1/models` answers in Anthropic's format. Ignored on other paths."),
    ("anthropic-beta", "Ignored."),
    ("traceparent", "W3C trace context. Used if the server exports traces."),
)


def api_section() -> str:
    """Return the lists of honoured, ignored and refused fields, grouped by their endpoints, and of headers."""
    honoured: dict[tuple[str, str], list[str]] = {}
    ignored: dict[tuple[str, str], list[str]] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for title, body in _ENDPOINTS.items():
        schema = body.model_json_schema()
        known = schema["properties"]
        for name, field in known.items():
            parts = ("Required." if name in schema.get("required", ()) else _default(field), field.get("description"))
            honoured.setdefault((name, " ".join(filter(None, parts))), []).append(title)
        if "tokenize" in title:  # what generation takes is left unread there, and nobody sends it
            continue
        for name, reason in body.ignored.items():
            if name not in known:
                ignored.setdefault((name, reason), []).append(title)
        for name, (values, _) in body.refused.items():
            if name not in known:
                unless = ", ".join(f"`{json.dumps(value)}`" for value in values)
                refused.setdefault((name, unless), []).append(title)
    lines = ["### Honoured", ""]
    for titles, rows in _by_endpoints(honoured):
        names = ", ".join(f"`{name}`" for name, about in rows if not about)
        lines.append(f"- **{titles}**{f': {names}' if names else ''}")
        lines += [f"  - `{name}`: {_line(about)}" for name, about in rows if about]
    lines += ["", "### Ignored", ""]
    for titles, found in _by_endpoints(ignored):
        reasons: dict[str, list[str]] = {}
        for name, reason in found:
            reasons.setdefault(reason, []).append(f"`{name}`")
        lines += [f"- **{titles}**", *(f"  - {', '.join(names)}: {reason}" for reason, names in reasons.items())]
    lines += [
        "",
        "### Refused",
        "",
        "A request with one of these fields gets 400, unless the field has the value that the list shows in brackets.",
        "",
    ]
    for titles, those in _by_endpoints(refused):
        named = (f"`{name}`{f' ({unless})' if unless else ''}" for name, unless in those)
        lines += [f"- **{titles}**: {', '.join(named)}"]
    lines += ["", "### Headers", "", *(f"- `{name}`: {meaning}" for name, meaning in _HEADERS)]
    return "\n".join(lines)


def _by_endpoints(found: Mapping[_Row, Sequence[str]]) -> Iterator[tuple[str, list[_Row]]]:
    """Yield the fields of each set of endpoints, first those of the largest set."""
    groups: dict[tuple[str, ...], list[_Row]] = {}
    for row, titles in found.items():
        groups.setdefault(tuple(titles), []).append(row)
    for titles in sorted(groups, key=len, reverse=True):
        yield ", ".join(titles), sorted(groups[titles])


def _default(schema: Mapping[str, Any]) -> str:
    if "const" in schema:
        return f"Only `{json.dumps(schema['const'])}` is accepted."
    default = schema.get("default")
    return f"Default: `{json.dumps(default)}`." if default else ""  # none, false and zero need no mention


def constants_section(choices: Sequence[Choice] = CHOICES) -> str:
    """Return a table of the defaults with reasons. Raises SystemExit if a default in the code is another one."""
    lines = ["| setting | default | meaning | reason for the default |", "|---|---|---|---|"]
    for choice in choices:
        for name, value in choice.values.items():
            owner, _, field = name.partition(".")
            there = {each.name: each.default for each in fields_of(getattr(config, owner))}.get(field)
            if there != value:
                raise SystemExit(f"{name} is {there}, benchmarks/report/choices.py says what chose {value}")
        names = ", ".join(f"`{name.rpartition('.')[2]}`" for name in choice.values)
        values = ", ".join(f"`{value}`" for value in choice.values.values())
        lines.append(f"| {names} | {values} | {choice.decides} | {choice.chosen_by or 'not measured'} |")
    return "\n".join(lines)
