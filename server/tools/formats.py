"""Tables of the formats in which models write tool calls and reasoning, by vLLM's names of their parsers.

The parsers are our own: transformers' ``parse_response`` and parsers of partial JSON read the whole text again for each
chunk, and openai-harmony needs the tokens of a vocabulary that it downloads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from server.tools.message_parser import MessageParser, Messages, Reader
from server.tools.reasoning import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, ReasoningFormat, channels
from server.tools.reasoning import reasoning as reasoning_reader
from server.tools.tool_call_parser import CALL_ID, CallFormat, CallTemplate, ToolCallParser
from server.tools.values import Functions
from ssd.text.chat_template import SAMPLE_ARGUMENTS, SAMPLE_NAME, SAMPLE_SCHEMA, CallSample

AUTO, OFF = "auto", "none"
"""Option values for tool call and reasoning formats: detect the format from the chat template, or do not parse."""

FORMAT_IN_WORDS = "hermes"
"""If a model's chat template does not support tools, the prompt asks the model to write tool calls in this format."""

JSON = "json"
"""The format in which tool calls are forced if the model's own format is unknown or has no grammar."""

_OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
_PARAMETERS = '{"name": "NAME", "parameters": ARGUMENTS}'


def _list_template(before: str, after: str, call: str = _OBJECT) -> CallTemplate:
    return CallTemplate(call=call, before=before, between=", ", after=after)


def _tag_format(call: str, key: str, *sections: str, **others: Any) -> CallFormat:
    """Return a tool call format with tags, as in XML.

    ``call`` begins a tool call, ``key`` begins a parameter, and ``sections`` are tag names that enclose a list of
    calls.
    """
    call_tag, key_tag = (re.split(" name=|=", begin[1:])[0] for begin in (call, key))
    return CallFormat(
        arguments="tags",
        section=tuple(f"<{name}>" for name in sections),
        call=(call,),
        after_name=((">",),),
        key=key,
        after_key=(">",),
        value_end=f"</{key_tag}>",
        call_end=f"</{call_tag}>",
        end=tuple(f"</{name}>" for name in sections),
        **others,
    )


_HEADER = ("<|start_header_id|>", "<|end_header_id|>")
_LLAMA = CallFormat(
    call=("<|python_tag|>",),
    bare_starts=("{", "["),
    space_is_text=True,
    ignored_markers=_HEADER,
    special_markers=("<|python_tag|>", *_HEADER),
    template=CallTemplate(call=_PARAMETERS, between="; "),
    template_markers=(("<|python_tag|>",), ('{"name": function name, "parameters":',)),
)
_HERMES = CallFormat(
    call=("<tool_call>",), end=("</tool_call>",), template=CallTemplate(call=f"<tool_call>\n{_OBJECT}\n</tool_call>")
)
_JAMBA = CallFormat(
    call=("<tool_calls>",), end=("</tool_calls>",), template=_list_template("<tool_calls>[", "]</tool_calls>")
)
_DEEPSEEK_V31 = CallFormat(
    arguments="json",
    section=("<｜tool▁calls▁begin｜>",),
    ends_content=True,
    call=("<｜tool▁call▁begin｜>",),
    after_name=(("<｜tool▁sep｜>",),),
    end=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    space_is_text=True,
    template=CallTemplate(
        call="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        between="",
        after="<｜tool▁calls▁end｜>",
    ),
)
_GLM = CallFormat(
    arguments="tags",
    call=("<tool_call>",),
    key="<arg_key>",
    after_key=("</arg_key>", "<arg_value>"),
    value_end="</arg_value>",
    call_end="</tool_call>",
    template_markers=(("<arg_key>",),),
)
_QWEN = _tag_format(
    "<function=",
    "<parameter=",
    "tool_call",
    has_line_values=True,
    template=CallTemplate(
        call="<tool_call>\n<function=NAME>\n",
        parameter="<parameter=KEY>\n",
        value_end="\n</parameter>\n",
        call_end="</function>\n</tool_call>",
    ),
    template_markers=(("<function=", "<parameter="),),
)
_MINIMAX = _tag_format(
    "<invoke name=",
    "<parameter name=",
    "minimax:tool_call",
    template=CallTemplate(
        call='<invoke name="NAME">\n',
        parameter='<parameter name="KEY">',
        value_end="</parameter>\n",
        call_end="</invoke>\n",
        before="<minimax:tool_call>\n",
        between="",
        after="</minimax:tool_call>",
    ),
)
_GIGACHAT = CallFormat(call=("<|function_call|>", "function call<|role_sep|>"), ignored_markers=("<|message_sep|>",))
_K3 = [f"<|{mark}|>{name}<|sep|>" for mark in ("open", "close") for name in ("response", "tools")]
_PYTHONIC = CallFormat(arguments="python", bare_starts=("[",), template_markers=(("[func_name1(",), ("[func1(",)))

TOOL_FORMATS: Mapping[str, CallFormat] = {
    "openai": CallFormat(
        arguments="json",
        message_ends=(END,),
        special_markers=(START, CALL, RETURN),
        template=CallTemplate(
            call=f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}ARGUMENTS", allows_several_calls=False
        ),
        template_markers=(("<|channel|>", "commentary"),),
    ),
    "muse_glimmer": _tag_format(
        "<atem:invoke name=",
        "<atem:parameter name=",
        "atem:function_calls",
        message_ends=("<|eom|>", "<|eot|>"),
        special_markers=(START, MESSAGE),
    ),
    "deepseek_v41": _tag_format(
        "<｜DSML｜ invoke name=",
        "<｜DSML｜ parameter name=",
        "｜DSML｜ calls",
        special_markers=("｜DSML｜",),
        template_markers=(("<｜DSML｜ ",),),
    ),
    "deepseek_v32": _tag_format(
        "<｜DSML｜invoke name=",
        "<｜DSML｜parameter name=",
        "｜DSML｜function_calls",
        "｜DSML｜tool_calls",
        special_markers=("｜DSML｜",),
        template_markers=(("｜DSML｜",),),
    ),
    "deepseek_v3": replace(
        _DEEPSEEK_V31,
        head=(("function",), ("<｜tool▁sep｜>",)),
        after_name=(("```json",),),
        template=CallTemplate(
            call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>",
            after="<｜tool▁calls▁end｜>",
        ),
        template_markers=(("<｜tool▁calls▁begin｜>", "```json"),),
    ),
    "deepseek_v31": _DEEPSEEK_V31,
    "kimi_k2": CallFormat(
        arguments="json",
        section=("<|tool_calls_section_begin|>",),
        ends_content=True,
        call=("<|tool_call_begin|>",),
        head=(("functions.", ""),),
        after_name=(("<|tool_call_argument_begin|>",),),
        end=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        space_is_text=True,
        template=CallTemplate(
            call="<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
            before="<|tool_calls_section_begin|>",
            between="",
            after="<|tool_calls_section_end|>",
        ),
    ),
    "kimi_k3": CallFormat(
        arguments="tags",
        call=("<|open|>call tool=",),
        after_name=(("<|sep|>",),),
        key="<|open|>argument key=",
        after_key=("<|sep|>",),
        value_end="<|close|>argument<|sep|>",
        call_end="<|close|>call<|sep|>",
        value_end_before_tag=True,
        escapes_names=True,
        ignored_markers=(*_K3, "<|close|>message<|sep|>"),
        space_is_text=True,
        template_markers=(("<|open|>", "<|close|>", "<|sep|>"),),
    ),
    "gemma4": CallFormat(
        arguments="gemma",
        call=("<|tool_call>",),
        head=(("call:",),),
        end=("<tool_call|>",),
        space_is_text=True,
        special_markers=('<|"|>',),
        template_markers=(("<|tool_call>", "<tool_call|>"),),
    ),
    "mistral": CallFormat(
        arguments="json",
        call=("[TOOL_CALLS]",),
        after_name=((CALL_ID, ""), ("[ARGS]", "")),
        space_is_text=True,
        special_markers=("[TOOL_CALLS]", CALL_ID, "[ARGS]"),
        template=_list_template("[TOOL_CALLS][", "]"),
    ),
    "minimax_m2": _MINIMAX,
    "seed_oss": _tag_format(
        "<function=",
        "<parameter=",
        "seed:tool_call",
        template=CallTemplate(
            call="<seed:tool_call>\n<function=NAME>\n",
            parameter="<parameter=KEY>",
            value_end="</parameter>\n",
            call_end="</function>\n</seed:tool_call>",
        ),
    ),
    "longcat": replace(
        _HERMES,
        call=("<longcat_tool_call>",),
        end=("</longcat_tool_call>",),
        template=CallTemplate(call=f"<longcat_tool_call>\n{_OBJECT}\n</longcat_tool_call>"),
    ),
    "glm45": _GLM,
    "glm47": _GLM,
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "internlm": CallFormat(
        call=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        end=("<|action_end|>",),
        template_markers=(("<|action_start|>", "<|plugin|>"),),
        template=CallTemplate(
            call=f"<|action_start|><|plugin|>\n{_PARAMETERS}<|action_end|>", allows_several_calls=False
        ),
    ),
    "lfm2": CallFormat(
        arguments="python",
        call=("<|tool_call_start|>",),
        end=("<|tool_call_end|>",),
        template_markers=(("<|tool_list_start|>",), ("<|tool_call_start|>",), ("<|im_start|>", "List of tools: [")),
    ),
    "cohere": CallFormat(
        call=("<|START_ACTION|>",),
        end=("<|END_ACTION|>",),
        ignored_markers=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        template=_list_template(
            "<|START_ACTION|>[", "]<|END_ACTION|>", '{"tool_name": "NAME", "parameters": ARGUMENTS}'
        ),
    ),
    "apertus": CallFormat(
        arguments="keyed",
        call=("<|tools_prefix|>",),
        end=("<|tools_suffix|>",),
        template=_list_template("<|tools_prefix|>[", "]<|tools_suffix|>", '{"NAME": ARGUMENTS}'),
    ),
    "gigachat31": replace(
        _GIGACHAT, template=CallTemplate(call=f"<|function_call|>{_OBJECT}", allows_several_calls=False)
    ),
    "gigachat3": replace(
        _GIGACHAT,
        template=CallTemplate(
            call=f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_OBJECT}", allows_several_calls=False
        ),
        template_markers=(("<|role_sep|>", "function call"),),
    ),
    "nemotron_json": CallFormat(
        call=("<TOOLCALL>",), end=("</TOOLCALL>",), template=_list_template("<TOOLCALL>[", "]</TOOLCALL>")
    ),
    "minicpm5": _tag_format(
        "<function name=",
        "<param name=",
        template_markers=(("<function name=", "<param name="),),
        template=CallTemplate(
            call='<function name="NAME">', parameter='<param name="KEY">', value_end="</param>", call_end="</function>"
        ),
    ),
    "functionary_v32": CallFormat(
        arguments="json",
        call=(">>>",),
        content_name="all",
        ignored_markers=(">>>all\n",),
        template=CallTemplate(call="NAME\nARGUMENTS", between=">>>"),
        template_markers=((">>>all",), (">>>${recipient}",)),
    ),
    "functionary_v31": CallFormat(
        arguments="json",
        call=("<function=",),
        after_name=((">",),),
        end=("</function>",),
        template=CallTemplate(call="<function=NAME>ARGUMENTS</function>", between=""),
        template_markers=(
            ("<function=example_function_name>", "parameters in JSON"),
            ("</function>", "<|python_tag|>"),
        ),
    ),
    "olmo3": CallFormat(arguments="python", call=("<function_calls>",), end=("</function_calls>",)),
    "granite-20b-fc": CallFormat(call=("<function_call>",), template=CallTemplate(call=f"<function_call> {_OBJECT}")),
    "granite": CallFormat(
        call=("<|tool_call|>", "<tool_call>"),
        template=_list_template("<|tool_call|>[", "]"),
        template_markers=(("<|tool_call|>", "<|start_of_role|>"),),
    ),
    "phi4_mini_json": CallFormat(
        call=("functools", "<|tool_call|>"),
        end=("<|/tool_call|>",),
        template_markers=(("<|tool|>",), ("functools[",)),
        template=_list_template("functools[", "]"),
    ),
    "hermes": _HERMES,
    "granite4": _HERMES,
    "jamba": _JAMBA,
    "hunyuan_a13b": _JAMBA,
    "llama4_pythonic": replace(
        _PYTHONIC,
        call=("<|python_start|>",),
        end=("<|python_end|>",),
        template_markers=(("<|python_start|>",), ("<|header_start|>", "[func_name1(")),
    ),
    "pythonic": _PYTHONIC,
    "llama4_json": replace(
        _LLAMA,
        ignored_markers=("<|python_start|>", "<|python_end|>", "<|header_start|>", "<|header_end|>"),
        template_markers=(("<|header_start|>", '"parameters": '),),
    ),
    "llama3_json": _LLAMA,
    "xlam": CallFormat(
        call=("[TOOL_CALLS]",), bare_starts=("{", "["), template=_list_template("[", "]"), template_markers=()
    ),
    JSON: CallFormat(template_markers=(), bare_starts=("{", "["), template=_list_template("[", "]", _PARAMETERS)),
}
"""All tool call formats by name, the most specific first. The first format that a chat template mentions is used."""

_INSIDE = ReasoningFormat(starts_inside=True)  # the model begins inside unless the prompt closed it

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "openai_gptoss": ReasoningFormat(
        (f"{CHANNEL}analysis{MESSAGE}",),
        (END,),
        next_starts=(CALL, RETURN),
        header=f"{START}assistant",
        template_markers=(("<|channel|>", "analysis"),),
    ),
    "muse_glimmer": ReasoningFormat(
        (f" to=self{MESSAGE}", f"to=self{MESSAGE}"),
        ("<|eom|>", "<|eot|>"),
        header=f"{START}assistant",
        template_markers=(("<atem:function_calls>",),),
    ),
    "cohere": ReasoningFormat(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        next_starts=("<|START_ACTION|>", "<|START_RESPONSE|>"),
        template_markers=(("<|START_THINKING|>",),),
    ),
    "apertus": ReasoningFormat(
        ("<|inner_prefix|>",),
        ("<|inner_suffix|>",),
        next_starts=("<|tools_prefix|>",),
        template_markers=(("<|inner_prefix|>",),),
    ),
    "kimi_k3": ReasoningFormat(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        next_starts=tuple(_K3[:2]),
        template_markers=(("<|open|>", "<|close|>", "<|sep|>"),),
    ),
    "gemma4": ReasoningFormat(
        ("<|channel>thought\n", "<|channel>thought"),
        ("<channel|>",),
        next_starts=("<|tool_call>",),
        template_markers=(("<|channel>", "<channel|>"),),
    ),
    "mistral": ReasoningFormat(("[THINK]", "<think>"), ("[/THINK]", "</think>"), template_markers=(("[THINK]",),)),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",), template_markers=(("<seed:think>",),)),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response: ", "Here's my response: ", "Here is my response:", "Here's my response:"),
        template_markers=(("Here is my thought process:",),),
    ),
    "kimi_k2": ReasoningFormat(
        next_starts=("<|tool_calls_section_begin|>",),
        starts_inside=True,
        template_markers=(("<|tool_calls_section_begin|>", "<think>"),),
    ),
    "deepseek_r1": replace(_INSIDE, template_markers=(("<｜Assistant｜><think>",),)),
    "deepseek_v3": ReasoningFormat(template_markers=(("<｜Assistant｜>", "<think>"),)),
    "minimax_m2": replace(_INSIDE, template_markers=(("<minimax:tool_call>", "<think>"),)),
    "glm45": ReasoningFormat(template_markers=(("<arg_key>", "<think>"),)),
    "glm47": ReasoningFormat(),
    "olmo3": replace(_INSIDE, template_markers=(("<function_calls>", "<think>"),)),
    "qwen3": ReasoningFormat(template_markers=(("<think>",), ("</think>",))),  # Nemotron's mentions only the end
    "nemotron_v3": ReasoningFormat(),
    "holo2": _INSIDE,
    "step3": _INSIDE,
    "step3p5": _INSIDE,
}
"""All reasoning formats by name, the most specific first. The first format that a chat template mentions is used."""

_MARKER = re.compile(r"<[^<>\s]*(?:\||｜|tool_call|function_call|think)[^<>\s]*>|\[/?THINK\]")
"""Matches markers of tool calls and reasoning. Such a marker may be a special token of the tokenizer."""


def detect(chat_template: str, sample: CallSample | None = None) -> tuple[str | None, str | None]:
    """Return the names of the tool call format and the reasoning format of a chat template; None if not recognized.

    The first reasoning format that the template mentions is used. For tool calls, ``sample`` is a call as the template
    renders it, and the first format that can parse it is used; formats that the template mentions are tried first.
    Without ``sample``, the first tool call format that the template mentions is used.
    """
    recognized = [name for name, row in TOOL_FORMATS.items() if _has_markers(row.required_markers, chat_template)]
    reasoning = next(
        (name for name, row in REASONING_FORMATS.items() if _has_markers(row.template_markers, chat_template)), None
    )
    if sample is None:
        return (recognized[0] if recognized else None), reasoning
    names = (name for name in (*recognized, *TOOL_FORMATS) if name != JSON and _reads_back(name, sample))
    return next(names, None), reasoning


_NO_CONTENT = re.compile(r"(?:\s|<think>\s*</think>|<[^<>\s]*>|\[/?[A-Z_]+\])*")
"""Matches text next to a tool call that is not content: end markers and empty reasoning."""


def _reads_back(name: str, sample: CallSample) -> bool:
    """Return whether a tool call format can parse the call that the chat template rendered, without leftover text."""
    for text in sample.texts:
        messages = Messages(partial(make_parser, name, None, functions={SAMPLE_NAME: SAMPLE_SCHEMA}))
        found = messages.parse(0, text)
        calls = [(call.name, json.loads(call.arguments)) for call in found.tool_calls if call.is_json]
        if calls == [(SAMPLE_NAME, SAMPLE_ARGUMENTS)] and _NO_CONTENT.fullmatch("".join(found.content)):
            return True
    return False


def _has_markers(template_markers: tuple[tuple[str, ...], ...], chat_template: str) -> bool:
    return any(all(string in chat_template for string in strings) for strings in template_markers)


def write_calls(tool_call: str | None, functions: Sequence[Mapping[str, Any]]) -> str:
    """Write tool calls, each with ``name`` and ``arguments``, in the format called ``tool_call``.

    The Hermes format is used instead if the format has neither a template nor Python syntax. It is also used instead of
    a format with tags if the arguments of a call are not an object.
    """
    form = TOOL_FORMATS[tool_call or FORMAT_IN_WORDS]
    if form.arguments == "python":
        calls = ", ".join(f"{each.get('name')}({_keywords(each)})" for each in functions)
        return f"{''.join(form.call[:1])}[{calls}]{''.join(form.end[:1])}"
    written = form.template or _HERMES.template
    assert written is not None
    if written.parameter and not all(isinstance(each.get("arguments", {}), Mapping) for each in functions):
        written = _HERMES.template
        assert written is not None
    calls = written.between.join(_format_call(written, number, each) for number, each in enumerate(functions))
    return written.before + calls + written.after


def _format_call(form: CallTemplate, number: int, function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments", {})
    if form.parameter:
        values = (
            form.parameter.replace("KEY", key) + (value if isinstance(value, str) else _json(value)) + form.value_end
            for key, value in arguments.items()
        )
        return form.call.replace("NAME", str(function.get("name"))) + "".join(values) + form.call_end
    told = {"NAME": str(function.get("name")), "NUMBER": str(number), "ARGUMENTS": _json(arguments)}
    return re.sub("|".join(told), lambda match: told[match[0]], form.call)


def _keywords(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments", {})
    if not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}
    return ", ".join(f"{k}={_json(v) if isinstance(v, str) else repr(v)}" for k, v in arguments.items())


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def make_parser(
    tool_call: str | None, reasoning: str | None, *, functions: Functions | None = None, prompt: str = ""
) -> MessageParser:
    """Create the parser of one message of a model, which first reads reasoning and then tool calls and content.

    ``tool_call`` and ``reasoning`` are names of formats, None if the message has no such part. The schemas of
    ``functions`` determine the types of argument values, and in formats without markers only calls of these functions
    are recognized. ``prompt`` is the end of the prompt, which shows whether the output begins inside reasoning.
    """
    functions = functions or {}
    form = None if tool_call is None else TOOL_FORMATS[tool_call]
    thinking = None if reasoning is None else REASONING_FORMATS[reasoning]
    readers: list[Reader] = []
    if form is not None and form.message_ends:
        readers.append(channels(form, functions, form.message_ends))
        if thinking is not None and not thinking.header:
            readers.insert(0, reasoning_reader(thinking, prompt))
        return MessageParser(*readers)
    if thinking is not None and thinking.header:
        readers.append(channels(None, functions, thinking.end))
    elif thinking is not None:
        readers.append(reasoning_reader(thinking, prompt, () if form is None else form.in_reasoning))
    if form is not None:
        readers.append(lambda scanner, pieces: ToolCallParser(form, functions, scanner, pieces).read())
    return MessageParser(*readers)


@cache
def special_tokens(tool_call: str | None, reasoning: str | None) -> frozenset[str]:
    """Return the special tokens that must not be removed from the output because the parser needs them as markers."""
    found: set[str] = set()
    if tool_call is not None:
        found |= {*TOOL_FORMATS[tool_call].special_markers, *_MARKER.findall(repr(TOOL_FORMATS[tool_call]))}
    if reasoning is not None:
        found |= {*_MARKER.findall(repr(REASONING_FORMATS[reasoning]))}
    return frozenset(found)
