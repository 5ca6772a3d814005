"""Messages are taken apart the same however they are cut; texts are written as the named models print them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from server.tools.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    detect,
    make_parser,
    write_calls,
)
from server.tools.grammars import count_reasoning_tokens
from server.tools.message_parser import Messages, ToolCallDelta
from server.tools.reasoning import ends_within_reasoning
from ssd.text.chat_template import ChatTemplate
from tests.reference.messages import Hermes
from tests.tokenizers_for_tests import byte_level_tokenizer

Message = tuple[str, str, list[tuple[str, str]]]

FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "exact": {"type": "boolean"},
            "places": {"type": "array"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
    "srv/f-1.g:2": {"type": "object"},
}


def message(tool_call: str | None, reasoning: str | None, pieces: Sequence[str], *, prompt: str = "") -> Message:
    """Content, reasoning and calls of a message that arrives in ``pieces``."""
    parser = make_parser(tool_call, reasoning, functions=FUNCTIONS, prompt=prompt)
    content = thought = ""
    calls: list[list[str]] = []
    for delta in [*map(parser.push, pieces), parser.finish()]:
        for said in delta:
            if not isinstance(said, ToolCallDelta):
                content += said[1] if said[0] == "content" else ""
                thought += said[1] if said[0] == "reasoning" else ""
                continue
            if said.name is not None:
                assert said.index == len(calls)
                calls.append([said.name, ""])
            assert said.index == len(calls) - 1
            calls[-1][1] += said.arguments
    return content, thought, [(name, arguments) for name, arguments in calls]


def cut(text: str, places: Sequence[float]) -> list[str]:
    """``text`` in pieces; ``places`` : of its cuts, within [0, 1]."""
    ends = [0, *sorted(round(place * len(text)) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(ends)]


WEATHER = ("get_weather", '{"city": "Paris"}')
# Of each: tool-call and reasoning parser, the text, content, reasoning, calls.
RECORDED: list[tuple[str | None, str | None, str, str, str, list[tuple[str, str]]]] = [
    # Llama-3.2-3B-Instruct
    (
        "pythonic",
        None,
        '[get_weather(city="Par\\u0069s", days=-1, exact=True, places=[1.5, (None, \'a"b\'), '
        "{'k': 0x1f,}], note=\"\"), now()]",
        "",
        "",
        [
            (
                "get_weather",
                '{"city": "Paris", "days": -1, "exact": true, "places": [1.5, [null, "a\\"b"], {"k": 31}], "note": ""}',
            ),
            ("now", "{}"),
        ],
    ),
    # Granite-3.2-8B and 3.0
    (
        "granite",
        "granite",
        "Here is my thought process: Hm.\n\nHere is my response: Wait. <|tool_call|>"
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "Wait.",
        "Hm.",
        [WEATHER],
    ),
    # Llama 4's own template, with text and without
    (
        "llama4_json",
        None,
        '<|python_start|>Let me see.<|python_end|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "Let me see.",
        "",
        [WEATHER],
    ),
    (
        "cohere",
        "cohere",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>So.<|END_RESPONSE|>",
        "So.",
        "Hm.",
        [],
    ),
    (
        "apertus",
        "apertus",
        '<|inner_prefix|>Hm.<|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"now": {}}]<|tools_suffix|>',
        "",
        "Hm.",
        [WEATHER, ("now", "{}")],
    ),
    ("functionary_v32", None, "now\n{}>>>all\nNoon. >>> print(1)", "Noon. >>> print(1)", "", [("now", "{}")]),
    ("phi4_mini_json", None, '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", "", [("now", "{}")]),
    (None, "muse_glimmer", " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.", "Yes.", "Hm.", []),
    (
        "qwen3_coder",
        None,
        "<function=get_weather>\n<parameter=city>\nParis\n<parameter=note>\n</parameter> and "
        "</function>\n</parameter>\n</function>",
        "",
        "",
        [("get_weather", '{"city": "Paris", "note": "</parameter> and </function>"}')],
    ),
    (
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>Not <|call|> or <|channel|>final yet.<|end|><|start|>"
        'assistant to=functions.now<|channel|>commentary<|message|>{"a": "<|call|>"}<|call|>',
        "",
        "Not <|call|> or <|channel|>final yet.",
        [("now", '{"a": "<|call|>"}')],
    ),
    # a bracket too many, before the end of a call or of the text, is nobody's; elsewhere it is content
    (
        "hermes",
        None,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}}\n</tool_call>\nSo.',
        "So.",
        "",
        [WEATHER],
    ),
    ("llama3_json", None, '{"name": "get_weather", "parameters": {"city": "Paris"}}}]', "", "", [WEATHER]),
    ("hermes", None, '<tool_call>{"name": "now", "arguments": {}}</tool_call> } it is', "} it is", "", [("now", "{}")]),
    # what is nearly JSON is made JSON
    (
        "hermes",
        None,
        '<tool_call>{"name": "now", "arguments": {"a": True, "b": [None, False, "True,]",], "c": NaN , '
        '"d": [-Infinity, 1e400, -1e4, 0], }}</tool_call>',
        "",
        "",
        [("now", '{"a": true, "b": [null, false, "True,]"], "c": "NaN" , "d": ["-Infinity", "1e400", -1e4, 0] }')],
    ),
    ("hermes", None, '<tool_call>{"name": "now", "arguments": {"a": [1,', "", "", [("now", '{"a": [1,')]),
    ("pythonic", None, "[now(a=1e400, b=-1.5E3)]", "", "", [("now", '{"a": "1e400", "b": -1.5E3}')]),
    ("llama3_json", None, '{"city": "Paris"} is it.', '{"city": "Paris"} is it.', "", []),
    ("llama3_json", None, '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', "", []),
    ("pythonic", None, "[1] says so, [now](there).", "[1] says so, [now](there).", "", []),
    ("pythonic", None, '[get_weather(city="Par', "", "", [("get_weather", '{"city": "Par')]),
    ("openai", None, "No channel at all.", "No channel at all.", "", []),
    ("deepseek_v3", None, "<｜tool▁calls▁begin｜>none", "<｜tool▁calls▁begin｜>none", "", []),
    ("glm45", None, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", "", []),
    (None, "qwen3", "<think>\nNever ends\n\n", "", "Never ends\n\n", []),
    (None, None, " <think> is text \n", " <think> is text \n", "", []),
]


@pytest.mark.parametrize("case", RECORDED, ids=[f"{case[0]}-{case[2][:24]!r}" for case in RECORDED])
def test_recorded_messages_are_taken_apart_however_they_are_cut(
    case: tuple[str | None, str | None, str, str, str, list[tuple[str, str]]],
) -> None:
    tool_call, reasoning, text, *expected = case
    whole = message(tool_call, reasoning, [text])
    assert whole == tuple(expected)
    assert message(tool_call, reasoning, list(text)) == whole
    for size in (2, 3, 5, 7, 11, 17):
        assert message(tool_call, reasoning, [text[at : at + size] for at in range(0, len(text), size)]) == whole


FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "{", "}", "[", "]", ",", ":", ";", '"', "\\"),
    *('"name"', '"arguments"', '"now"', '{"name": "now"', ', "arguments": {"a": [1, "}"]}', "}", "null", "text", "12"),
    *('{"arguments": {}, "name": "f"}', '"{}"', "<tool", "</thi", "é", '"\\ud800"', "<function=now>", "<parameter=a>"),
    *(
        "</parameter>",
        "</function>",
        "<|channel|>",
        "analysis",
        "commentary to=functions.now",
        "<|message|>",
        "<|end|>",
    ),
    *(
        "[now(",
        "a=",
        "'x'",
        "True",
        ")",
        "get_weather(",
        '"""',
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    *("False", "None", ", ", "-Infinity", "nan", "1e400", "5"),
    *("[TOOL_CALLS]", "now", "[ARGS]", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json", "```", "<|python_tag|>"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)
CUTS = st.lists(st.floats(0, 1), max_size=12)


@given(TEXTS, CUTS)
def test_a_message_is_what_its_twin_reads(text: str, places: list[float]) -> None:
    twin = Hermes(text)
    assert message("hermes", "qwen3", cut(text, places)) == (twin.content, twin.reasoning, twin.calls)


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3_json", "openai", "held"])
def test_line_ends_within_strings_are_passed_on_as_json_has_them(form: str) -> None:
    """A backslash at the end of a line, and of a regular expression or a path, too."""
    value = '{"city": "a\n\tb \\\nc\\n C:\\users \\d+ \\u00e9", "days":\n1}'
    text = {
        "hermes": f'<tool_call>{{"name": "get_weather", "arguments": {value}}}</tool_call>',
        "held": f'<tool_call>{{"arguments": {value}, "name": "get_weather"}}</tool_call>',
        "mistral": f"[TOOL_CALLS]get_weather[ARGS]{value}",
        "llama3_json": f'{{"name": "get_weather", "parameters": {value}}}',
        "openai": f"<|channel|>commentary to=functions.get_weather<|message|>{value}<|call|>",
    }[form]
    ((_, arguments),) = message("hermes" if form == "held" else form, None, list(text))[2]
    assert json.loads(arguments) == {"city": "a\n\tb \\\nc\n C:\\users \\d+ é", "days": 1}


@pytest.mark.parametrize("begun", ["<|start|>", "<|channel|>", "<tool_call>get_weather", "<function=get_weather"])
def test_spaces_without_end_take_no_time(begun: str) -> None:
    """Reading them over and over would take hours."""
    tools, reasoning = ("openai", "openai_gptoss") if begun.startswith("<|") else ("qwen3_coder", None)
    text = begun + " " * 100_000 + "!"
    assert message(tools, reasoning, [text])[0].replace(" ", "") in (text.replace(" ", ""), "!")


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), JSON_VALUES, max_size=3), CUTS)
def test_values_of_python_become_the_same_values_of_json(arguments: dict[str, Any], places: list[float]) -> None:
    call = f"[now({', '.join(f'{name}={value!r}' for name, value in arguments.items())})]"
    content, _, calls = message("pythonic", None, cut(call, places))
    assert content == "" and [name for name, _ in calls] == ["now"]
    assert json.loads(calls[0][1]) == arguments


def test_arguments_are_passed_on_while_they_arrive() -> None:
    begun = {
        "hermes": '<tool_call>{"name": "now", "arguments": {"a": "some text',
        "mistral": '[TOOL_CALLS]now[ARGS]{"a": "some text',
        "pythonic": "[now(a='some text",
        "qwen3_coder": "<function=get_weather><parameter=city>some text",
        "openai": '<|channel|>commentary to=functions.now<|message|>{"a": "some text',
        "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": "some text',
    }
    for name, text in begun.items():
        (call,) = make_parser(name, None, functions=FUNCTIONS).push(text)
        assert isinstance(call, ToolCallDelta) and call.arguments.endswith('"some text'), name


@pytest.mark.parametrize(("prompt", "inside"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)])
def test_the_prompt_says_where_reasoning_begins(prompt: str, inside: bool) -> None:
    content, thought, _ = message(None, "qwen3", ["So be it."], prompt=f"<|im_start|>assistant\n{prompt}")
    assert (thought if inside else content) == "So be it."
    assert message(None, "deepseek_r1", ["So be it."], prompt=prompt)[0] == ("So be it." if "</" in prompt else "")


@pytest.mark.parametrize(
    ("said", "goes_on"),
    [("{", False), ("<think>So", True), ("<think>So</think>\n{", False), ("</think>a <think>b", True), ("", False)],
)
def test_a_message_that_is_to_be_gone_on_with_says_whether_it_thinks(said: str, goes_on: bool) -> None:
    assert ends_within_reasoning(REASONING_FORMATS["deepseek_r1"], said) is goes_on


@pytest.mark.parametrize(
    ("name", "thought"),
    [
        ("granite", ["Here is my thought process:", "\nHm.\n", "Here is my ", "response:"]),
        ("kimi_k2", ["Hm.", "<|tool_calls_section_begin|>"]),
        ("mistral", ["[THINK]", "Hm.", "</think>"]),
    ],
)
def test_what_was_thought_is_counted_up_to_any_end(name: str, thought: list[str]) -> None:
    pieces = [*thought, "\nYes", "."]
    found = count_reasoning_tokens(name, "", range(len(pieces)), lambda ids: "".join(pieces[each] for each in ids))
    assert found == len(thought)


# Lines of the models' own chat templates that tell one format from another.
TEMPLATES = {
    ("hermes", "qwen3"): '<tool_call>\\n{"name": <function-name>... <think>\\n\\n</think>\\n\\n',  # Qwen3-8B
    (
        "hermes",
        None,
    ): '{{- "\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}"',  # Qwen2.5
    ("qwen3_coder", None): "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
    ("llama3_json", None): '{{- \'Respond in the format {"name": function name, "parameters": dictionary of\' }}',
    (
        "llama4_pythonic",
        None,
    ): "<|header_start|>system ... [func_name1(params_name1=params_value1, ...), func_name2(params)]",
    ("pythonic", None): "<|start_header_id|> ... [func_name1(params_name1=params_value1...), func_name2(params)]",
    ("mistral", None): '{{- "[TOOL_CALLS] [" }}',
    (
        "deepseek_v3",
        "deepseek_r1",
    ): "'<｜tool▁calls▁begin｜>' ... '```json' ... content.split('</think>') '<｜Assistant｜><think>\\n'",
    (
        "deepseek_v31",
        "deepseek_v3",
    ): "<｜tool▁calls▁begin｜> ... {%- if thinking %}<｜Assistant｜> '<think>' '</think>'",
    ("openai", "openai_gptoss"): "Valid channels: analysis, commentary, final. <|start|>assistant<|channel|>commentary",
    ("kimi_k2", None): "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    ("glm45", "glm45"): "<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key> ... <think></think>",
    ("granite", None): "<|start_of_role|>assistant<|end_of_role|> starting with <|tool_call|>",
    ("phi4_mini_json", None): "<|tool|>' + message['tools'] + '<|/tool|>",
    (None, "qwen3"): "{%- set content = message['content'].split('</think>')[-1].lstrip() %}",  # Llama-3.3-Nemotron
    (None, None): "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}",
}


@pytest.mark.parametrize("names", TEMPLATES, ids=str)
def test_formats_are_told_by_the_chat_template(names: tuple[str | None, str | None]) -> None:
    assert detect(TEMPLATES[names]) == names


_FIELDS = ("{{ c.function.name }}", "{{ c.function.arguments | tojson }}")
# The format that a template writes, what it mentions beside the tools, and how it writes a call.
WRITING: list[tuple[str | None, str, str]] = [
    (
        "llama4_json",
        '<|header_start|> Respond in the format {"name": function name, "parameters": dictionary}.',
        '<|python_start|>{{ m.content }}<|python_end|>{"name": "NAME", "parameters": ARGUMENTS}',
    ),
    (
        "jamba",
        "Write the calls within <tool_call></tool_call>.",
        '<tool_calls>[{"name": "NAME", "arguments": ARGUMENTS}]</tool_calls>',
    ),
    ("functionary_v31", "<|python_tag|>", "<function=NAME>ARGUMENTS</function>"),
    ("hermes", "<|python_tag|>", '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'),
    ("apertus", "<tool_call>", '<|tools_prefix|>[{"NAME": ARGUMENTS}]<|tools_suffix|>'),
    ("gigachat31", "", '<|function_call|>{"name": "NAME", "arguments": ARGUMENTS}'),
    (None, "<tool_call>", "<call><name>NAME</name><json>ARGUMENTS</json></call>"),
]


def template_writing(mentioned: str, call: str) -> ChatTemplate:
    """A template that mentions some text beside the tools, and writes calls so."""
    call = call.replace("NAME", _FIELDS[0]).replace("ARGUMENTS", _FIELDS[1])
    source = (
        (
            "{% if tools %}{{ tools | tojson }}{{ mentioned }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
            "{% if m.tool_calls %}{% for c in m.tool_calls %}CALL{% endfor %}{% else %}{{ m.content }}{% endif %}"
            "<|eot|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        .replace("{{ mentioned }}", "{% raw %}" + mentioned + "{% endraw %}")
        .replace("CALL", call)
    )
    return ChatTemplate(source, PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer()).apply_chat_template)


@pytest.mark.parametrize(("name", "mentioned", "call"), WRITING, ids=str)
def test_the_format_is_the_one_that_reads_what_the_template_writes(name: str | None, mentioned: str, call: str) -> None:
    template = template_writing(mentioned, call)
    assert detect(template.source, template.sample_call())[0] == name


def test_a_template_that_writes_no_calls_has_the_format_that_it_mentions() -> None:
    template = ChatTemplate(
        "{{ tools }} <|tool_list_start|>{% for m in messages %}{{ m.content }}{% endfor %}",
        PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer()).apply_chat_template,
    )
    assert template.sample_call() is None
    assert detect(template.source, None)[0] == "lfm2"


ARGUMENTS = st.dictionaries(
    st.from_regex(r"[a-z]{1,5}", fullmatch=True),
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Co"], exclude_characters="<>|`\\"), max_size=8)
    | st.integers(-9, 9)
    | st.booleans()
    | st.lists(st.integers(0, 9), max_size=2),
    max_size=3,
)


@given(st.sampled_from(sorted(TOOL_FORMATS)), st.lists(ARGUMENTS, min_size=1, max_size=2))
def test_calls_are_written_as_they_are_read(name: str, several: list[dict[str, Any]]) -> None:
    form = TOOL_FORMATS[name]
    assume(form.template is not None or form.arguments == "python")  # others as Hermes models
    assume(form.template is None or form.template.allows_several_calls or len(several) == 1)
    types = {dict: "object", list: "array", bool: "boolean", int: "integer", str: "string"}
    schemas = {
        f"f{number}": {"properties": {key: {"type": types[type(value)]} for key, value in arguments.items()}}
        for number, arguments in enumerate(several)
    }
    text = write_calls(name, [{"name": f"f{n}", "arguments": arguments} for n, arguments in enumerate(several)])
    messages = Messages(lambda: make_parser(name, None, functions=schemas))
    read = [(call.name, json.loads(call.arguments)) for call in messages.parse(0, text).tool_calls]
    assert read == [(f"f{number}", arguments) for number, arguments in enumerate(several)]
