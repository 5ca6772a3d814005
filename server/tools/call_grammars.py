"""Grammars of calls in the formats that models were trained to write, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from server.tools.formats import JSON
from server.tools.functions import Functions
from server.tools.harmony import CHANNEL, CONSTRAIN, MESSAGE
from ssd.text.json_schema import JSON_OPTIONS, closed

_PLAIN = frozenset({"type", "description", "title", "default", "examples", "enum", "const"})
"""Keywords of a string's schema that a string without quotation marks can be held to."""


@dataclass(frozen=True)
class _Written:
    """How a message of calls is written; ``call`` has NAME, ARGUMENTS and NUMBER where those stand.

    The lexer of the grammar never goes back, so nothing may begin with all of what may stand in its place.
    """

    call: str
    before: str = ""
    between: str = "\n"
    after: str = ""
    several: bool = True


@dataclass(frozen=True)
class _Tagged:
    """The same for parameters between tags; ``parameter`` has KEY where it stands, and its value follows."""

    call: str
    parameter: str
    value_end: str
    call_end: str
    before: str = ""
    between: str = "\n"
    after: str = ""
    several: bool = True


_OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
_PARAMETERS = '{"name": "NAME", "parameters": ARGUMENTS}'
_HERMES = _Written(f"<tool_call>\n{_OBJECT}\n</tool_call>")
_QWEN = _Tagged(
    "<tool_call>\n<function=NAME>\n", "<parameter=KEY>\n", "\n</parameter>\n", "</function>\n</tool_call>"
)  # fmt: skip

_FORMATS: Mapping[str, _Written | _Tagged] = {
    JSON: _Written(_PARAMETERS, "[", ", ", "]"),
    "hermes": _HERMES,
    "granite4": _HERMES,
    "longcat": _Written(f"<longcat_tool_call>\n{_OBJECT}\n</longcat_tool_call>"),
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "seed_oss": _Tagged(
        "<seed:tool_call>\n<function=NAME>\n", "<parameter=KEY>", "</parameter>\n", "</function>\n</seed:tool_call>"
    ),
    "minimax_m2": _Tagged(
        '<invoke name="NAME">\n', '<parameter name="KEY">', "</parameter>\n", "</invoke>\n",
        before="<minimax:tool_call>\n", between="", after="</minimax:tool_call>",
    ),
    "llama3_json": _Written(_PARAMETERS, between="; "),
    "llama4_json": _Written(_PARAMETERS, between="; "),
    "granite": _Written(_OBJECT, "<|tool_call|>[", ", ", "]"),
    "granite-20b-fc": _Written(f"<function_call> {_OBJECT}"),
    "internlm": _Written(f"<|action_start|><|plugin|>\n{_PARAMETERS}<|action_end|>", several=False),
    "jamba": _Written(_OBJECT, "<tool_calls>[", ", ", "]</tool_calls>"),
    "hunyuan_a13b": _Written(_OBJECT, "<tool_calls>[", ", ", "]</tool_calls>"),
    "phi4_mini_json": _Written(_OBJECT, "functools[", ", ", "]"),
    "xlam": _Written(_OBJECT, "[", ", ", "]"),
    "mistral": _Written(_OBJECT, "[TOOL_CALLS][", ", ", "]"),
    "deepseek_v3": _Written(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": _Written(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": _Written(
        "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>",
    ),
    "openai": _Written(
        f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}ARGUMENTS",
        several=False,
    ),
}  # fmt: skip
_MISTRAL_NAMED = _Written("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", between="")


def call_grammar(
    tool_call: str | None, functions: Functions, *, parallel: bool = True, special: Mapping[str, int] | None = None
) -> str | None:
    """A grammar of one call, or of several where ``parallel``, as the format writes them; None where it has none.

    `JSON` is a format of its own that any model can be made to write. ``special`` : added tokens of the vocabulary and
    their ids; where one of them is a marker it is written, and not its letters. All added tokens belong to them, those
    that are not "special" to the tokenizer as well. Values follow the schemas of ``functions``, of which there is at
    least one. O(characters) of the schemas; nothing is compiled here.
    """
    form = _FORMATS.get(tool_call or "")
    special = special or {}
    if tool_call == "mistral" and "[ARGS]" in special:
        form = _MISTRAL_NAMED
    if form is None:
        return None
    rules: dict[str, str] = {}
    for number, (name, schema) in enumerate(functions.items()):
        call = _call(form, number, name, schema, special, rules)
        if call is None:
            return None
        rules[f"call_{number}"] = call
    rules["call"] = " | ".join(f"call_{number}" for number in range(len(functions)))
    start = [_text(form.before, special), "call"]
    if parallel and form.several:
        start.append(f"({_text(form.between, special)} call)*")
    start.append(_text(form.after, special))
    lines = [f"start: {' '.join(filter(None, start))}", *(f"{name}: {body}" for name, body in rules.items())]
    return "\n".join(lines)


def _call(
    form: _Written | _Tagged, number: int, name: str, schema: Mapping[str, Any], special: Mapping[str, int],
    rules: dict[str, str],
) -> str | None:  # fmt: skip
    """The rule of one function; what it is made of goes into ``rules``."""
    if isinstance(form, _Written):
        rules[f"arguments_{number}"] = _json({**schema, "type": "object"})
        return " ".join(_parts(form.call, name, number, special, rules))
    parameters = _tagged(form, number, schema, special, rules)
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
    """A text as literals, and tokens where it has markers that are."""
    markers = [token for token in sorted(special, key=len, reverse=True) if token and token in text]
    pieces = re.split("(" + "|".join(map(re.escape, markers)) + ")", text) if markers else [text]
    return " ".join(f"<[{special[piece]}]>" if piece in special else json.dumps(piece) for piece in pieces if piece)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**closed(schema), "x-guidance": JSON_OPTIONS})


def _tagged(
    form: _Tagged, number: int, schema: Mapping[str, Any], special: Mapping[str, int], rules: dict[str, str]
) -> str | None:
    """Rules of one function's parameters, in their order; None where tags cannot be held to the schema."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    known = {"type", "properties", "required", "description", "title", "additionalProperties", "$defs", "$schema"}
    if not isinstance(properties, dict) or not isinstance(required, list) or not schema.keys() <= known:
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
