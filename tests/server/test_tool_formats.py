"""Messages are taken apart the same however they are cut; texts are written as the named models print them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tools.formats import REASONING_FORMATS, TOOL_FORMATS, detect, make_parser, special_tokens
from ssd.errors import ConfigError
from tests.reference.messages import Hermes

Message = tuple[str, str, list[tuple[str, str]]]

FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]},
            "exact": {"type": "boolean"}, "places": {"type": "array"}, "note": {"type": ["string", "null"]},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}  # fmt: skip


def message(tool_call: str | None, reasoning: str | None, pieces: Sequence[str], *, prompt: str = "") -> Message:
    """Content, reasoning and calls of a message that arrives in ``pieces``."""
    parser = make_parser(tool_call, reasoning, functions=FUNCTIONS, prompt=prompt)
    content = thought = ""
    calls: list[list[str]] = []
    for delta in [*map(parser.push, pieces), parser.finish()]:
        content += delta.content
        thought += delta.reasoning
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            assert call.index == len(calls) - 1
            calls[-1][1] += call.arguments
    return content, thought, [(name, arguments) for name, arguments in calls]


def cut(text: str, places: Sequence[float]) -> list[str]:
    """``text`` in pieces; ``places`` : of its cuts, within [0, 1]."""
    ends = [0, *sorted(round(place * len(text)) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(ends)]


WEATHER = ("get_weather", '{"city": "Paris"}')
TWICE = [WEATHER, ("get_weather", '{"city": "Rome", "days": 2}')]

# Of each: tool-call and reasoning parser, the text, content, reasoning, calls.
RECORDED: list[tuple[str | None, str | None, str, str, str, list[tuple[str, str]]]] = [
    # Qwen3-8B, thinking
    (
        "hermes", "qwen3",
        '<think>\nThe user asks for two.\n</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Paris"}}\n</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", '
        '"days": 2}}\n</tool_call>',
        "I look.", "The user asks for two.", TWICE,
    ),
    # Qwen3-8B, enable_thinking=False: the prompt holds an empty block, the answer none
    (None, "qwen3", "Paris is **dry**.\n", "Paris is **dry**.\n", "", []),
    # Hermes-2-Pro-Llama-3: arguments first
    (
        "hermes", None, '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>\n',
        "", "", [WEATHER],
    ),
    # Qwen3-Coder-30B: text in front, values on lines of their own
    (
        "qwen3_coder", None,
        "Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n"
        "5\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=places>\n[1, 2]\n</parameter>\n"
        "<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>",
        "Let me see.", "",
        [("get_weather", '{"city": "Paris", "days": 5, "exact": true, "places": [1, 2], "note": null}')],
    ),
    # Qwen3-Coder leaves out the outer tag now and then
    (
        "qwen3_xml", None,
        "<function=get_weather>\n<parameter=city>\nif a < b:\n    \"x\"\n\n</parameter>\n</function>\n</tool_call>",
        "", "", [("get_weather", '{"city": "if a < b:\\n    \\"x\\"\\n"}')],
    ),
    # Llama-3.1-8B-Instruct
    ("llama3_json", None, '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", "", [WEATHER]),
    (
        "llama3_json", None, '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": '
        '"get_weather", "parameters": {"city": "Rome", "days": 2}}', "", "", TWICE,
    ),
    # Llama-4-Scout
    ("llama4_json", None, '{"type": "function", "name": "now", "parameters": {}}', "", "", [("now", "{}")]),
    (
        "llama4_pythonic", None, '<|python_start|>[get_weather(city="Paris"), get_weather(city=\'Rome\', days=2)]'
        "<|python_end|>", "", "", TWICE,
    ),
    # Llama-3.2-3B-Instruct
    (
        "pythonic", None, '[get_weather(city="Par\\u0069s", days=-1, exact=True, places=[1.5, (None, \'a"b\'), '
        "{'k': 0x1f,}], note=\"\"), now()]",
        "", "",
        [
            ("get_weather", '{"city": "Paris", "days": -1, "exact": true, "places": [1.5, [null, "a\\"b"], '
             '{"k": 31}], "note": ""}'),
            ("now", "{}"),
        ],
    ),
    # Olmo-3-7B-Instruct
    (
        "olmo3", None, '<function_calls>\nget_weather(city="Paris")\nget_weather(city="Rome", days=2)\n'
        "</function_calls>", "", "", TWICE,
    ),
    # LFM2-1.2B-Tool
    ("lfm2", None, 'So:<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>', "So:", "", [WEATHER]),
    # Mistral-7B-Instruct-v0.3
    (
        "mistral", None, '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}, '
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]', "", "", TWICE,
    ),
    # Mistral-Small-3.2 and Magistral-Small-2509
    (
        "mistral", "mistral", '[THINK]Two.[/THINK]Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]'
        'get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Rome", "days": 2}', "Sure.", "Two.", TWICE,
    ),
    # DeepSeek-V3-0324
    (
        "deepseek_v3", None,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n'
        '{"city": "Rome", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", "", TWICE,
    ),
    # DeepSeek-R1-0528: the template begins the reasoning
    ("deepseek_v3", "deepseek_r1", "Easy.\n</think>\n\nParis.", "Paris.", "Easy.", []),
    # DeepSeek-V3.1
    (
        "deepseek_v31", "deepseek_v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome", "days": 2}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "I look.", "", TWICE,
    ),
    # DeepSeek-V3.2
    (
        "deepseek_v32", None,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
        'Rome</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>", "", "", TWICE[1:],
    ),
    # gpt-oss-20b
    (
        "openai", "openai_gptoss",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        '<|message|>{"city": "Paris"}<|call|>', "One moment.", "Need the weather.", [WEATHER],
    ),
    (
        "openai", "openai_gptoss", ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}',
        "", "", [WEATHER],
    ),
    (
        None, "openai_gptoss", "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello.\n<|return|>", "Hello.\n", "So.", [],
    ),
    # Kimi-K2-Thinking: calls end the reasoning
    (
        "kimi_k2", "kimi_k2",
        "Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>', "", "Look.", [WEATHER],
    ),
    # GLM-4.5 and 4.7
    (
        "glm45", "glm45",
        "\n<think>Look.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>", "", "Look.", TWICE[1:],
    ),
    (
        "glm47", None, "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
        "<tool_call>now</tool_call>", "", "", [WEATHER, ("now", "{}")],
    ),
    # MiniMax-M2
    (
        "minimax_m2", "minimax_m2",
        'Look.\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>', "", "Look.", TWICE[1:],
    ),
    # Seed-OSS-36B
    (
        "seed_oss", "seed_oss",
        "<seed:think>\nLook.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>", "", "Look.", TWICE[1:],
    ),
    # Granite-3.2-8B and 3.0
    (
        "granite", "granite", "Here is my thought process: Hm.\n\nHere is my response: Wait. <|tool_call|>"
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}]', "Wait.", "Hm.", [WEATHER],
    ),
    ("granite-20b-fc", None, '<function_call> {"name": "now", "arguments": {}}', "", "", [("now", "{}")]),
    # InternLM2.5-7B-Chat
    (
        "internlm", None, 'I look.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}'
        "<|action_end|>\n", "I look.", "", [WEATHER],
    ),
    # Jamba-1.5-Mini
    (
        "jamba", None, '<tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Paris"}}\n]</tool_calls>',
        "", "", [WEATHER],
    ),
    # Phi-4-mini-instruct, with vLLM's template and with its own
    ("phi4_mini_json", None, 'functools[{"name": "now", "arguments": {}}]', "", "", [("now", "{}")]),
    ("phi4_mini_json", None, '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", "", [("now", "{}")]),
    # xLAM-2
    ("xlam", None, '[{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", "", [WEATHER]),
    # what tool_choice makes any model write
    ("json", None, '[{"name": "get_weather", "parameters": {"city": "Paris"}}]', "", "", [WEATHER]),
    # Gemma 4, Kimi K3, DeepSeek V4.1
    (
        "gemma4", "gemma4", "<|channel>thought\nTwo.\n<channel|>See: <|tool_call>call:get_weather{city:<|\"|>Paris"
        "<|\"|>}<tool_call|><|tool_call>call:get_weather{city:<|\"|>Rome<|\"|>,days:2}<tool_call|>",
        "See: ", "Two.", TWICE,
    ),
    (
        "kimi_k3", "kimi_k3", "<|open|>think<|sep|>Look.<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>"
        'response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument '
        'key="city" type="string"<|sep|>Rome<|close|>argument<|sep|><|open|>argument key="days" type="integer"<|sep|>2'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        "So.", "Look.", TWICE[1:],
    ),
    (
        "deepseek_v41", "deepseek_v3", "<think>Look.</think>\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="get_weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
        '<｜DSML｜ invoke name="now"/>\n</｜DSML｜ calls>', "", "Look.", [WEATHER, ("now", "{}")],
    ),
    # Muse Glimmer, by its template: messages to itself, to functions, to the user
    (
        "muse_glimmer", "muse_glimmer", " to=self<|message|>Two.<|eom|><|start|>assistant to=get_weather<|message|>"
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=user<|message|>Asked.<|eom|><|start|>"
        'assistant to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter '
        'name="city">Rome</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls><|eot|>", "Asked.", "Two.", TWICE,
    ),
    (None, "muse_glimmer", " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.", "Yes.", "Hm.", []),
    # what models do wrong, and what speaks of markers
    (
        "hermes", None, '<tool_call>\n{"name": "now", "arguments": {"a": 1\n</tool_call>\n<tool_call>\n{"name": "now", '
        '"arguments": {}\n</tool_call>', "", "", [("now", '{"a": 1\n'), ("now", "{}")],
    ),
    (
        "qwen3_coder", "qwen3", "<think>\nI look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
        "</parameter>\n</function>\n</tool_call>", "", "I look.", [WEATHER],
    ),
    (
        "qwen3_coder", None, "<function=get_weather>\n<parameter=city>\nParis\n<parameter=note>\n</parameter> and "
        "</function>\n</parameter>\n</function>", "", "",
        [("get_weather", '{"city": "Paris", "note": "</parameter> and </function>"}')],
    ),
    ("glm47", None, "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</tool_call>", "", "", [WEATHER]),
    (
        "glm47", None, "<tool_call>get_weather<arg_key>city</arg_key><arg_value> x\n</arg_value></tool_call>", "", "",
        [("get_weather", '{"city": " x\\n"}')],
    ),
    (
        "kimi_k2", None, "So.<|tool_calls_section_begin|> noise <|tool_call_begin|>now:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>", "So.", "", [("now", "{}")],
    ),
    (
        "openai", "openai_gptoss", "<|channel|>analysis<|message|>Not <|call|> or <|channel|>final yet.<|end|><|start|>"
        'assistant to=functions.now<|channel|>commentary<|message|>{"a": "<|call|>"}<|call|>',
        "", "Not <|call|> or <|channel|>final yet.", [("now", '{"a": "<|call|>"}')],
    ),
    (
        "openai", "openai_gptoss", "<|channel|>analysis<|message|>So.<|end|><|start|>assistant to=functions.now"
        "<|channel|>commentary <|constrain|>json", "", "So.", [],
    ),
    # what is no call, or none yet
    ("hermes", None, "Write <tool_call> and </tool_call>.", "Write <tool_call> and </tool_call>.", "", []),
    ("hermes", None, 'So:\n<tool_call>\n{"name": "now"', "So:\n", "", []),  # cut
    ("hermes", None, '<tool_call>{"name": "now", "arguments": {"a": [', "", "", [("now", '{"a": [')]),
    ("hermes", None, '<tool_call>{"name": "now", "arguments": {"a": ]}', "]}", "", [("now", '{"a": ')]),
    ("hermes", None, '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', "", "", [("now", '{"a": 1}')]),
    ("hermes", None, '<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', "", []),
    ("llama3_json", None, '{"city": "Paris"} is it.', '{"city": "Paris"} is it.', "", []),
    ("llama3_json", None, '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', "", []),
    ("pythonic", None, "[1] says so, [now](there).", "[1] says so, [now](there).", "", []),
    ("pythonic", None, '[get_weather(city="Par', "", "", [("get_weather", '{"city": "Par')]),
    ("openai", None, "No channel at all.", "No channel at all.", "", []),
    ("deepseek_v3", None, "<｜tool▁calls▁begin｜>none", "<｜tool▁calls▁begin｜>none", "", []),
    ("glm45", None, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", "", []),
    (None, "qwen3", "<think>\nNever ends\n\n", "", "Never ends\n\n", []),
    (None, None, " <think> is text \n", " <think> is text \n", "", []),
]  # fmt: skip


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
    *("[TOOL_CALLS]", "now", "[ARGS]", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json", "```", "<|python_tag|>"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)
CUTS = st.lists(st.floats(0, 1), max_size=12)


@given(TEXTS, CUTS)
def test_a_message_is_what_its_twin_reads(text: str, places: list[float]) -> None:
    twin = Hermes(text)
    assert message("hermes", "qwen3", cut(text, places)) == (twin.content, twin.reasoning, twin.calls)


@given(st.sampled_from([*TOOL_FORMATS]), st.sampled_from([None, *REASONING_FORMATS]), TEXTS, CUTS)
def test_cuts_change_nothing_and_no_text_is_lost(
    tool_call: str, reasoning: str, text: str, places: list[float]
) -> None:
    whole = message(tool_call, reasoning, [text])
    assert message(tool_call, reasoning, cut(text, places)) == whole
    if reasoning is None and tool_call != "openai" and not whole[2]:
        assert whole[0] == text


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


@given(st.text().filter(lambda value: "</parameter>" not in value), CUTS)
def test_a_string_between_tags_is_taken_as_it_stands(value: str, places: list[float]) -> None:
    call = f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
    _, _, calls = message("qwen3_coder", None, cut(call, places))
    assert json.loads(calls[0][1]) == {"city": value}


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
        (call,) = make_parser(name, None, functions=FUNCTIONS).push(text).tool_calls
        assert call.arguments.endswith('"some text'), name


@pytest.mark.parametrize(("prompt", "inside"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)])
def test_the_prompt_says_where_reasoning_begins(prompt: str, inside: bool) -> None:
    content, thought, _ = message(None, "qwen3", ["So be it."], prompt=f"<|im_start|>assistant\n{prompt}")
    assert (thought if inside else content) == "So be it."
    assert message(None, "deepseek_r1", ["So be it."], prompt=prompt)[0] == ("So be it." if "</" in prompt else "")


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no tool-call parser 'x': give auto, none or one of openai, "):
        make_parser("x", None)
    with pytest.raises(ConfigError, match="no reasoning parser 'x': give auto, none or one of openai_gptoss, "):
        make_parser(None, "x")


def test_markers_that_are_special_tokens_are_named() -> None:
    assert "[TOOL_CALLS]" in special_tokens("mistral", None)
    assert {"<|channel|>", "<think>"} <= special_tokens("openai", "qwen3")
    assert special_tokens(None, None) == frozenset()


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
    (None, None): "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}",
}


@pytest.mark.parametrize("names", TEMPLATES, ids=str)
def test_formats_are_told_by_the_chat_template(names: tuple[str | None, str | None]) -> None:
    assert detect(TEMPLATES[names]) == names
