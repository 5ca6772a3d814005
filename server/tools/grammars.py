"""Grammars that force tool calls in a model's own format, after optional reasoning; counting of reasoning tokens.

The grammars are written in llguidance's dialect of Lark.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from server.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from server.tools.reasoning import begins_inside
from server.tools.tool_call_parser import CallTemplate
from server.tools.values import Functions
from ssd.errors import RequestError
from ssd.text.grammar_compiler import JSON_OPTIONS
from ssd.text.schema import prepare_schema
from ssd.text.schema_tree import SchemaError

_PLAIN = frozenset({"type", "description", "title", "default", "examples", "enum", "const"})
"""JSON schema keywords that a grammar can enforce for a string that is written without quotation marks."""
_OF_AN_OBJECT = frozenset(
    "type properties required description title additionalProperties $comment $defs $schema".split()
)
"""JSON schema keywords that a grammar can enforce for parameters in tags."""
_ANYTHING = "/(?s:.*)/"
_BEGINNING = 16
"""The number of output tokens that are decoded to see whether the output begins with reasoning."""


def call_grammar(
    tool_call: str | None,
    functions: Functions,
    *,
    parallel: bool = True,
    special: Mapping[str, int] | None = None,
    strict: Collection[str] = (),
) -> str | None:
    """Return a grammar of one or more tool calls in a model's format; None if the format has no grammar.

    ``special`` maps the tokenizer's added tokens to ids; markers among these are generated as single tokens. The
    schemas of the functions in ``strict`` must be enforced completely; for other functions, constraints that cannot be
    enforced are removed. Raises RequestError if a schema cannot be used.
    """
    form = TOOL_FORMATS[tool_call].template if tool_call is not None else None
    special = special or {}
    if form is None:
        return None
    if tool_call == "mistral" and "[ARGS]" in special:
        form = CallTemplate(call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", between="")
    rules: dict[str, str] = {}
    for number, (name, schema) in enumerate(functions.items()):
        call = _call(form, number, name, _prepare_parameters(name, schema, name in strict), special, rules)
        if call is None:
            return None
        rules[f"call_{number}"] = call
    rules["call"] = " | ".join(f"call_{number}" for number in range(len(functions)))
    start = [_text(form.before, special), "call"]
    if parallel and form.allows_several_calls:
        start.append(f"({_text(form.between, special)} call)*")
    start.append(_text(form.after, special))
    lines = [f"start: {' '.join(filter(None, start))}", *(f"{name}: {body}" for name, body in rules.items())]
    return "\n".join(lines)


def _call(
    form: CallTemplate,
    number: int,
    name: str,
    schema: Mapping[str, Any],
    special: Mapping[str, int],
    rules: dict[str, str],
) -> str | None:
    """Return the body of the grammar rule for a call of one function, and add the rules that it uses to ``rules``."""
    if not form.parameter:
        rules[f"arguments_{number}"] = _json(schema)
        return " ".join(_parts(form.call, name, number, special, rules))
    parameters = _add_tag_rules(form, number, schema, special, rules)
    if parameters is None:
        return None
    return f"{_text(form.call.replace('NAME', name), special)} {parameters} {_text(form.call_end, special)}"


def _parts(call: str, name: str, number: int, special: Mapping[str, int], rules: dict[str, str]) -> Iterator[str]:
    for piece in re.split("(NAME|ARGUMENTS|NUMBER)", call):
        if piece == "NAME":
            yield json.dumps(name)
        elif piece == "ARGUMENTS":
            yield f"arguments_{number}"
        elif piece == "NUMBER":
            rules["NUMBER"] = "/[0-9]{1,3}/"
            yield "NUMBER"
        else:
            yield _text(piece, special)


def _text(text: str, special: Mapping[str, int]) -> str:
    """Write a text as grammar literals. Markers in it that are special tokens become references to these tokens."""
    markers = [token for token in sorted(special, key=len, reverse=True) if token and token in text]
    pieces = re.split("(" + "|".join(map(re.escape, markers)) + ")", text) if markers else [text]
    return " ".join(f"<[{special[piece]}]>" if piece in special else json.dumps(piece) for piece in pieces if piece)


def _prepare_parameters(name: str, schema: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    parameters = f"the parameters of {name}"
    try:
        return {**prepare_schema({**schema, "type": "object"}, strict=strict), "$comment": parameters}
    except SchemaError as error:
        raise RequestError(f"tools cannot be used: {parameters}: {error!s:.500}", param="tools") from None


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {**JSON_OPTIONS, "lenient": True}})


def _add_tag_rules(
    form: CallTemplate, number: int, schema: Mapping[str, Any], special: Mapping[str, int], rules: dict[str, str]
) -> str | None:
    """Add grammar rules for a function's parameters, where each parameter is enclosed in tags.

    Returns the body of the function's rule, or None if such rules cannot enforce the schema.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or not schema.keys() <= _OF_AN_OBJECT:
        return None
    if not set(map(str, required)) <= properties.keys() or not (
        properties or schema.get("additionalProperties") is False
    ):
        return None
    names = []
    for index, (key, value) in enumerate(properties.items()):
        if not isinstance(value, dict) or re.search(r"[<>\n\"]", key):
            return None
        name = f"value_{number}_{index}"
        tag, end = _text(form.parameter.replace("KEY", key), special), _text(form.value_end, special)
        choices = value.get("enum", [value["const"]] if "const" in value else None)
        if value.get("type") == "string" or (
            isinstance(choices, list) and all(isinstance(each, str) for each in choices)
        ):
            if not value.keys() <= _PLAIN:
                return None
            if isinstance(choices, list) and choices:
                rules[name] = f"{tag} ({' | '.join(json.dumps(f'{each}{form.value_end}') for each in choices)})"
            else:
                rules[f"text[suffix={json.dumps(form.value_end)}]"] = r"/(?s:.*)/"
                rules[name] = f"{tag} text"
        elif isinstance(value.get("type"), str):
            rules[f"json_{number}_{index}"] = _json({**value, **{k: v for k, v in schema.items() if k == "$defs"}})
            rules[name] = f"{tag} json_{number}_{index} {end}"
        else:
            return None
        names.append(name if key in required else f"{name}?")
    return " ".join(names)


def reasoning_rule(name: str | None, prompt: str, added: Mapping[str, int]) -> str | None:
    """Return a grammar rule ``reasoning`` for the reasoning before an answer, with the rules that it refers to.

    Returns None if the output cannot contain reasoning.
    """
    form = REASONING_FORMATS[name] if name is not None else None
    inside = None if form is None else begins_inside(form, prompt)
    if form is None or inside is None:
        return None
    end, after = _text(form.end[0], added), _text(form.header, added) or "SPACE?"
    is_token = any(token in form.end[0] for token in added)
    thought = f"thought: {_ANYTHING} {end}" if is_token else f"thought[suffix={end}]: {_ANYTHING}"
    rules = thought + "\n" + ("" if form.header else "SPACE: /[ \\n]{1,4}/\n")
    opening = " | ".join(_text(begin, added) for begin in form.begin)
    if prompt.rstrip().endswith(form.begin):
        return f"reasoning: thought {after}\n{rules}"
    if inside:
        return f"reasoning: ({opening})? thought {after}\n{rules}"
    return f"reasoning: (({opening}) thought {after})?\n{rules}"


def count_reasoning_tokens(
    name: str, prompt: str, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> int:
    """Return the number of output tokens up to the end of the reasoning; all tokens if it does not end. O(n log n)."""
    form = REASONING_FORMATS[name]
    beginning, inside = decode(token_ids[:_BEGINNING]).lstrip(), begins_inside(form, prompt)
    if not inside and (inside is None or not beginning.startswith(tuple(begin.lstrip() for begin in form.begin))):
        return 0
    ends = re.compile("|".join(map(re.escape, (*form.end, *form.next_starts))))
    ends_within = bisect_left(
        range(len(token_ids)), True, key=lambda last: ends.search(decode(token_ids[: last + 1])) is not None
    )
    return min(ends_within + 1, len(token_ids))
