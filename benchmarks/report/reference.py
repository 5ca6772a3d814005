"""Tables made from the code itself: flags of the server, fields of the API."""

from __future__ import annotations

import argparse

from server.command.arguments import build_parser
from server.schema.chat import ChatBody
from server.schema.completions import CompletionBody
from server.schema.fields import IGNORED, NEUTRAL
from server.schema.generate import GenerateBody


def flags_section() -> str:
    """Every flag of ``ssd-serve``, a table a group, with its default."""
    parser = build_parser()
    formatter = argparse.HelpFormatter("ssd-serve")
    lines: list[str] = []
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help not in (None, argparse.SUPPRESS)]
        if not shown:
            continue
        lines += [f"**{group.title}**", "", "| flag | meaning |", "|---|---|"]
        for action in shown:
            names = " ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
            choices = f" {' / '.join(map(str, action.choices))}." if action.choices else ""
            lines.append(f"| {names} |{choices} {_cell(formatter._expand_help(action))} |")
        lines.append("")
    return "\n".join(lines)


def fields_section() -> str:
    """Every field of a request's body, which call takes it, and those that are passed over or refused."""
    bodies: dict[str, type[GenerateBody]] = {"completions": CompletionBody, "chat": ChatBody}
    names = dict.fromkeys(name for body in bodies.values() for name in body.model_fields)
    lines = ["| field | type | default | calls |", "|---|---|---|---|"]
    for name in names:
        calls = [call for call, body in bodies.items() if name in body.model_fields]
        field = bodies[calls[0]].model_fields[name]
        schema = bodies[calls[0]].model_json_schema()["properties"][field.alias or name]
        default = "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        lines.append(f"| `{name}` | {_cell(_type(schema))} | {_cell(default)} | {', '.join(calls)} |")
    neutral = [
        f"`{name}`" + (f" ({', '.join(map(repr, values))})" if values else "") for name, values in NEUTRAL.items()
    ]
    lines += [
        "",
        f"Accepted and not used: {', '.join(f'`{name}`' for name in sorted(IGNORED))}.",
        "",
        f"Refused, but for the values that mean nothing: {_cell(', '.join(neutral))}; `best_of` unless it equals `n`.",
    ]
    return "\n".join(lines)


def _type(schema: dict[str, object]) -> str:
    alternatives = schema.get("anyOf")
    if isinstance(alternatives, list):
        return " or ".join(dict.fromkeys(name for each in alternatives if (name := _type(each)) != "null"))
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "const" in schema:
        return repr(schema["const"])
    return str(schema.get("type", "any"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
