"""Grammars of calls in the formats that models were trained to write, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from server.tools.formats import JSON, REASONING_FORMATS
from server.tools.functions import Functions
from server.tools.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from server.tools.reasoning import ReasoningFormat, begins_inside

TokenIds = Mapping[str, int]
"""Added tokens of the vocabulary and their ids: where one of them is a marker the model writes it, not its letters."""

_WHITE_SPACE = r"[\x20\n\r\t]{1,40}"
"""What may stand between two tokens of JSON; without a bound small models write it for ever."""
_PLAIN = frozenset({"type", "description", "title", "default", "examples", "enum", "const"})
"""Keywords of a string's schema that a string without quotation marks can be held to."""


@dataclass(frozen=True)
class _Written:
    """How a message of calls is written; ``call`` has NAME, ARGUMENTS and NUMBER where those stand."""

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
    after: str = ""


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
        '<invoke name="NAME">\n', '<parameter name="KEY">', "</parameter>\n", "</invoke>",
        before="<minimax:tool_call>\n", after="\n</minimax:tool_call>",
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
        before=f"(ANALYSIS{END}{START}assistant)?", several=False,
    ),
}  # fmt: skip
_MISTRAL_NAMED = _Written("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", between="")


def call_grammar(
    tool_call: str | None,
    functions: Functions,
    *,
    reasoning: str | None = None,
    prompt: str = "",
    parallel: bool = True,
    token_ids: TokenIds | None = None,
) -> str | None:
    """A grammar of one call, or of several where ``parallel``, as the format writes them; None where it has none.

    `JSON` is a format of its own that any model can be made to write. ``reasoning`` : a format that may come first;
    ``prompt`` : the end of what the model continues, as `make_parser` takes it. ``token_ids`` : added tokens of the
    vocabulary; all the markers among them are enough. Values follow the schemas of ``functions``, of which there is at
    least one. O(characters) of the schemas; nothing is compiled here.
    """
    form = _FORMATS.get(tool_call or "")
    token_ids = token_ids or {}
    if tool_call == "mistral" and "[ARGS]" in token_ids:
        form = _MISTRAL_NAMED
    if form is None:
        return None
    rules: dict[str, str] = {}
    thinking = REASONING_FORMATS[reasoning].form if reasoning is not None else None
    start = [_think(thinking, prompt, token_ids, rules)] if thinking is not None else []
    calls = []
    for number, (name, schema) in enumerate(functions.items()):
        if isinstance(form, _Tagged):
            parameters = _tagged(form, number, schema, token_ids, rules)
            if parameters is None:
                return None
            rules[f"call_{number}"] = (
                f"{_text(form.call.replace('NAME', name), token_ids)} {parameters} {_text(form.call_end, token_ids)}"
            )
        else:
            rules[f"arguments_{number}"] = _json({**schema, "type": "object"})
            rules[f"call_{number}"] = " ".join(_parts(form.call, name, number, token_ids, rules))
        calls.append(f"call_{number}")
    rules["call"] = " | ".join(calls)
    several = parallel and not (isinstance(form, _Written) and not form.several)
    between = _text("\n" if isinstance(form, _Tagged) else form.between, token_ids)
    start += [*_before(form, token_ids, rules), "call"]
    if several:
        start.append(f"({between} call)*")
    start.append(_text(form.after, token_ids))
    lines = [f"start: {' '.join(filter(None, start))}", *(f"{name}: {body}" for name, body in rules.items())]
    return "\n".join(lines)


def _before(form: _Written | _Tagged, token_ids: TokenIds, rules: dict[str, str]) -> Iterator[str]:
    if not form.before.startswith("(ANALYSIS"):
        yield _text(form.before, token_ids)
        return
    rules["analysis"] = r"/(?s:.*)/"
    opens, closes = _text(f"{CHANNEL}analysis{MESSAGE}", token_ids), _text(f"{END}{START}assistant", token_ids)
    yield f"({opens} analysis {closes})?"


def _parts(call: str, name: str, number: int, token_ids: TokenIds, rules: dict[str, str]) -> Iterator[str]:
    for piece in re.split("(NAME|ARGUMENTS|NUMBER)", call):
        if piece == "NAME":
            yield json.dumps(name)
        elif piece == "ARGUMENTS":
            yield f"arguments_{number}"
        elif piece == "NUMBER":
            rules["NUMBER"] = "/[0-9]{1,3}/"
            yield "NUMBER"
        else:
            yield _text(piece, token_ids)


def _text(text: str, token_ids: TokenIds) -> str:
    """A text as literals, and tokens where it has markers that are."""
    markers = [token for token in sorted(token_ids, key=len, reverse=True) if token and token in text]
    pieces = re.split("(" + "|".join(map(re.escape, markers)) + ")", text) if markers else [text]
    return " ".join(f"<[{token_ids[piece]}]>" if piece in token_ids else json.dumps(piece) for piece in pieces if piece)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITE_SPACE}})


def _think(form: ReasoningFormat, prompt: str, token_ids: TokenIds, rules: dict[str, str]) -> str:
    """The reasoning, which may be left out where the prompt has not begun it, and the line ends after it."""
    inside = begins_inside(form, prompt)
    if inside is None:
        return ""
    end = next((marker for marker in form.end if marker in token_ids), form.end[-1])
    begin = _text(next((marker for marker in form.begin if marker in token_ids), form.begin[0]), token_ids)
    if end in token_ids:
        rules["thought"] = r"/(?s:.*)/"
        thought = f"thought {_text(end, token_ids)} LINE_ENDS"
    else:
        rules[f"thought[suffix={json.dumps(end)}]"] = r"/(?s:.*)/"
        thought = "thought LINE_ENDS"
    rules["LINE_ENDS"] = r"/\n{0,2}/"
    return thought if inside else f"({begin} {thought})?"


def _tagged(
    form: _Tagged, number: int, schema: Mapping[str, Any], token_ids: TokenIds, rules: dict[str, str]
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
        tag, end = _text(form.parameter.replace("KEY", key), token_ids), _text(form.value_end, token_ids)
        choices = value.get("enum", [value["const"]] if "const" in value else None)
        if value.get("type") == "string" or (
            isinstance(choices, list) and all(isinstance(each, str) for each in choices)
        ):
            if not value.keys() <= _PLAIN:
                return None
            if isinstance(choices, list) and choices:
                rules[name] = f"{tag} ({' | '.join(json.dumps(str(each)) for each in choices)}) {end}"
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
