"""Every row of the tables under texts of its own markers: cut anywhere, nothing lost, values and prose as written."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from server.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from server.tools.reasoning import ReasoningFormat
from server.tools.tool_call_parser import CallFormat, CallTemplate
from tests.server.test_tool_formats import CUTS, cut, message

THINKS = {"openai": "openai_gptoss", "muse_glimmer": "muse_glimmer", "kimi_k2": "kimi_k2", "kimi_k3": "kimi_k3"}
THINKS |= {"gemma4": "gemma4", "mistral": "mistral", "seed_oss": "seed_oss", "granite": "granite"}
ROWS = [*{repr(replace(row, template_markers=(), template=None)): name for name, row in TOOL_FORMATS.items()}.values()]
"""Those that are read in different ways."""
PLAIN = [
    *(" ", "\n", "now", "get_weather", "city", "days", "a", "é", "12", "null", "True", "{", "}", "[", "]", "(", ")"),
    *(",", ":", ";", '"', "'", "=", "\\", ">", "/>", '"name"', '"arguments"', '{"name": "now"', '{"a": 1}', "to="),
    *("functions.now", 'string="true"', "commentary", "analysis", "assistant", "[now(", "'x'", "call:", "```json"),
]


def markers(row: CallFormat | ReasoningFormat) -> list[str]:
    """The strings of a row, those of nested tuples too."""

    def strings(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value] if value else []
        return [text for each in value for text in strings(each)] if isinstance(value, tuple) else []

    names = {field.name for field in fields(row)} - {"template_markers", "arguments", "template"}
    return [text for name in names for text in strings(getattr(row, name))]


def texts(name: str) -> st.SearchStrategy[str]:
    own = [*markers(TOOL_FORMATS[name]), *markers(REASONING_FORMATS[THINKS.get(name, "qwen3")])]
    halves = [marker[: len(marker) // 2] for marker in own]
    return st.lists(st.sampled_from(own) | st.sampled_from(PLAIN + halves), max_size=16).map("".join)


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=50)
@given(st.data())
def test_what_streams_is_what_is_read_whole_and_no_text_is_lost(name: str, data: st.DataObject) -> None:
    text, places = data.draw(texts(name)), data.draw(CUTS)
    for reasoning in (None, THINKS.get(name, "qwen3")):
        whole = message(name, reasoning, [text])
        assert message(name, reasoning, cut(text, places)) == message(name, reasoning, list(text)) == whole
    content, _, calls = message(name, None, [text])
    row = TOOL_FORMATS[name]
    if not (calls or row.ignored_markers or row.ends_content or row.message_ends):
        begun = text.removeprefix(content).lstrip()  # the beginning of a call where the text ends
        assert text.startswith(content) and (not begun or row.starts.pattern.match(begun))


DSML = '<｜DSML｜parameter name="KEY" string="true">'
WRITTEN = {
    "deepseek_v32": CallTemplate(
        call='<｜DSML｜tool_calls>\n<｜DSML｜invoke name="NAME">\n',
        parameter=DSML,
        value_end="</｜DSML｜parameter>\n",
        call_end="</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    "deepseek_v41": CallTemplate(
        call='<｜DSML｜ calls>\n<｜DSML｜ invoke name="NAME">\n',
        parameter=DSML.replace("p", " p", 1),
        value_end="</｜DSML｜ parameter>\n",
        call_end="</｜DSML｜ invoke>\n</｜DSML｜ calls>",
    ),
    "muse_glimmer": CallTemplate(
        call='to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n',
        parameter='<atem:parameter name="KEY">',
        value_end="</atem:parameter>\n",
        call_end="</atem:invoke>\n</atem:function_calls><|eom|>",
    ),
    "glm45": CallTemplate(
        call="<tool_call>NAME\n",
        parameter="<arg_key>KEY</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        call_end="</tool_call>",
    ),
    "kimi_k3": CallTemplate(
        call='<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>',
        parameter='<|open|>argument key="KEY" type="string"<|sep|>',
        value_end="<|close|>argument<|sep|>",
        call_end="<|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "gemma4": CallTemplate(call='<|tool_call>call:NAME{city:<|"|>VALUE<|"|>}<tool_call|>', between=""),
    "lfm2": CallTemplate(call="<|tool_call_start|>[NAME(city=REPR)]<|tool_call_end|>"),
    "olmo3": CallTemplate(call="<function_calls>NAME(city=REPR)</function_calls>"),
    "pythonic": CallTemplate(call="NAME(city=REPR)", before="[", between=", ", after="]"),
}
WRITTEN |= {"glm47": WRITTEN["glm45"], "llama4_pythonic": WRITTEN["pythonic"]}


def written(name: str, value: str) -> str:
    """A call with this value, and one with another, as the model writes them."""
    form = TOOL_FORMATS[name].template or WRITTEN[name]

    def call(city: str) -> str:
        begin = form.call.replace("NAME", "get_weather").replace("NUMBER", "0")
        if form.parameter:
            return begin + form.parameter.replace("KEY", "city") + city + form.value_end + form.call_end
        begin = begin.replace("REPR", repr(city)).replace("VALUE", city)
        return begin.replace("ARGUMENTS", json.dumps({"city": city}))

    return form.before + form.between.join([call(value), call("Rome")]) + form.after


@pytest.mark.parametrize("name", ROWS)
def test_functions_are_called_by_every_name_that_a_request_may_give_them(name: str) -> None:
    for function in ("srv/f-1.g:2", "get_weather"):
        _, _, calls = message(name, None, list(written(name, "Paris").replace("get_weather", function)))
        assert {called for called, _ in calls} == {function}


def can_hold(name: str, value: str) -> bool:
    """Whether a value may stand there as it is: without what ends it."""
    row = TOOL_FORMATS[name]
    if row.arguments == "gemma":
        return '<|"|>' not in value
    if row.arguments != "tags":
        return True
    form = row.template or WRITTEN[name]
    ends = row.line_ends if row.has_line_values else row.value_ends
    after = value + form.value_end + form.call_end
    end = ends.pattern.search(after)
    return end is not None and end.start() == len(value)


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=50)
@given(st.data())
def test_values_hold_the_markers_of_their_format(name: str, data: st.DataObject) -> None:
    own = st.sampled_from([*markers(TOOL_FORMATS[name]), "\n", " ", '"', "\\", "x", "{", "</tool_call>"])
    value = "".join(data.draw(st.lists(own | st.text(max_size=3), max_size=8)))
    assume(can_hold(name, value))
    _, _, calls = message(name, None, cut(written(name, value), data.draw(CUTS)))
    cities = [json.loads(arguments) for _, arguments in calls]
    assert cities[0] == {"city": value} and (len(cities) == 1 or cities[1:] == [{"city": "Rome"}])
    several = (TOOL_FORMATS[name].template or WRITTEN[name]).allows_several_calls
    assert len(calls) == 2 or not several


def speaks(row: CallFormat) -> bool:
    """Whether prose may hold its markers: they are no tokens that say where content ends."""
    return bool(row.call) and not (row.ends_content or row.ignored_markers or row.message_ends)


@pytest.mark.parametrize("name", [name for name in ROWS if speaks(TOOL_FORMATS[name])])
@settings(max_examples=50)
@given(st.data())
def test_prose_that_speaks_of_markers_is_content_and_the_call_after_it_is_read(name: str, data: st.DataObject) -> None:
    row = TOOL_FORMATS[name]
    own = [marker for marker in markers(row) if marker not in ("functools", '"', ";", ",")]
    spoken = data.draw(st.lists(st.sampled_from(own), min_size=1, max_size=4))
    prose = " ".join(f"One writes {marker} here." for marker in spoken)
    content, _, calls = message(name, None, cut(f"{prose}\n{written(name, 'Paris')}", data.draw(CUTS)))
    if not (row.bare_starts or re.search(r"[|｜]|\[", prose)):
        assert message(name, None, [prose]) == (prose, "", [])
    if not row.bare_starts:
        assert [json.loads(arguments)["city"] for _, arguments in calls] == ["Paris", "Rome"][: len(calls)] and calls
        assert re.sub(r"\s+", " ", content).strip() == prose
