"""What a grammar of calls allows is what models write, and what the parser of the same format reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from server.tools.formats import TOOL_FORMATS, make_parser, special_tokens
from server.tools.grammars import call_grammar
from server.tools.message_parser import ToolCallDelta
from ssd.errors import RequestError
from tests.tokenizers_for_tests import byte_level_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, dict[str, Any]] = {"get_weather": SCHEMA, "go": {**SCHEMA, "required": []}}
PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome", "days": 2, "unit": "C"}'


def hermes_like(begin: str, end: str) -> str:
    calls = [f'{begin}\n{{"name": "get_weather", "arguments": {arguments}}}\n{end}' for arguments in (PARIS, ROME)]
    return "\n".join(calls)


def listed(begin: str, end: str, key: str = "arguments") -> str:
    calls = [f'{{"name": "get_weather", "{key}": {arguments}}}' for arguments in (PARIS, ROME)]
    return f"{begin}[{', '.join(calls)}]{end}"


def tagged(call: str, key: str, value_end: str, end: str) -> str:
    begin = call.replace("NAME", "get_weather")
    values = [[("city", "Paris")], [("city", "Rome"), ("days", "2"), ("unit", "C")]]
    return "\n".join(
        begin + "".join(key.replace("KEY", name) + value + value_end for name, value in pairs) + end for pairs in values
    )


QWEN = tagged("<tool_call>\n<function=NAME>\n", "<parameter=KEY>\n", "\n</parameter>\n", "</function>\n</tool_call>")
LLAMA = f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "get_weather", "parameters": {ROME}}}'

WRITTEN = {
    "json": listed("", "", "parameters"),
    "hermes": hermes_like("<tool_call>", "</tool_call>"),
    "granite4": hermes_like("<tool_call>", "</tool_call>"),
    "longcat": hermes_like("<longcat_tool_call>", "</longcat_tool_call>"),
    "qwen3_coder": QWEN,
    "qwen3_xml": QWEN,
    "seed_oss": tagged(
        "<seed:tool_call>\n<function=NAME>\n", "<parameter=KEY>", "</parameter>\n", "</function>\n</seed:tool_call>"
    ),
    "minimax_m2": "<minimax:tool_call>\n"
    + tagged('<invoke name="NAME">\n', '<parameter name="KEY">', "</parameter>\n", "</invoke>")
    + "\n</minimax:tool_call>",
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "granite": listed("<|tool_call|>", ""),
    "granite-20b-fc": f'<function_call> {{"name": "get_weather", "arguments": {PARIS}}}\n'
    f'<function_call> {{"name": "get_weather", "arguments": {ROME}}}',
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {ROME}}}<|action_end|>',
    "jamba": listed("<tool_calls>", "</tool_calls>"),
    "hunyuan_a13b": listed("<tool_calls>", "</tool_calls>"),
    "phi4_mini_json": listed("functools", ""),
    "xlam": listed("", ""),
    "mistral": "".join(f"[TOOL_CALLS]get_weather[ARGS]{arguments}" for arguments in (PARIS, ROME)),
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for arguments in (PARIS, ROME)
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + "".join(f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{each}<｜tool▁call▁end｜>" for each in (PARIS, ROME))
    + "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.get_weather:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for number, arguments in enumerate((PARIS, ROME))
    )
    + "<|tool_calls_section_end|>",
    "cohere": "<|START_ACTION|>["
    + ", ".join(f'{{"tool_name": "get_weather", "parameters": {arguments}}}' for arguments in (PARIS, ROME))
    + "]<|END_ACTION|>",
    "apertus": f'<|tools_prefix|>[{{"get_weather": {PARIS}}}, {{"get_weather": {ROME}}}]<|tools_suffix|>',
    "gigachat31": f'<|function_call|>{{"name": "get_weather", "arguments": {ROME}}}',
    "gigachat3": f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "get_weather", "arguments": {ROME}}}',
    "nemotron_json": listed("<TOOLCALL>", "</TOOLCALL>"),
    "minicpm5": tagged('<function name="NAME">', '<param name="KEY">', "</param>", "</function>"),
    "functionary_v31": "".join(f"<function=get_weather>{arguments}</function>" for arguments in (PARIS, ROME)),
    "functionary_v32": f"get_weather\n{PARIS}>>>get_weather\n{ROME}",
    "openai": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}",
}


def tokenizer_with(markers: frozenset[str]) -> tuple[Tokenizer, LLTokenizer, dict[str, int]]:
    """One that has these as special tokens, the same for llguidance, and their ids."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in sorted(markers)])
    end = tokenizer.token_to_id("<|end|>")
    known = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=[end])
    return tokenizer, known, {text: token for text, token in tokenizer.get_vocab().items() if text in markers}


def allows(grammar: str, text: str, markers: frozenset[str]) -> bool:
    """Whether ``text`` is a whole output of the grammar."""
    tokenizer, known, _ = tokenizer_with(markers)
    matcher = LLMatcher(known, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize("are_tokens", [True, False], ids=["tokens", "letters"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_grammar_allows_what_the_model_writes_and_the_parser_reads_it(name: str, are_tokens: bool) -> None:
    markers = special_tokens(name, None) if are_tokens or name == "mistral" else frozenset()
    markers -= {"<|end|>"}  # which the tokenizer has, and ends its texts with
    _, _, special = tokenizer_with(markers)
    text = WRITTEN[name]
    grammar = call_grammar(name, FUNCTIONS, special=special)
    assert grammar is not None and allows(grammar, text, markers)
    assert not allows(grammar, text[:-1], markers) or name == "llama3_json"
    assert not allows(grammar, text.replace("get_weather", "other"), markers)
    assert not allows(grammar, "Some text. " + text, markers)
    delta = make_parser(name, None, functions=FUNCTIONS).push(text)
    read = [(call.name, json.loads(call.arguments)) for call in delta if isinstance(call, ToolCallDelta)]
    assert read[-1] == ("get_weather", json.loads(ROME)) and len(read) == len(delta)
    one = call_grammar(name, FUNCTIONS, parallel=False, special=special)
    assert one is not None and allows(one, text, markers) == (len(read) == 1)


def test_every_format_has_a_grammar_or_is_known_to_have_none() -> None:
    without = {"pythonic", "llama4_pythonic", "olmo3", "lfm2", "glm45", "glm47", "deepseek_v32", "deepseek_v41"}
    without |= {"gemma4", "kimi_k3", "muse_glimmer"}
    assert {name for name in TOOL_FORMATS if call_grammar(name, FUNCTIONS) is None} == without


def test_references_in_a_schema_stay_within_their_function() -> None:
    functions: dict[str, dict[str, Any]] = {
        name: {
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/place"}},
            "required": ["to"],
            "additionalProperties": False,
            "$defs": {"place": {"type": kind}},
        }
        for name, kind in (("go", "string"), ("jump", "integer"))
    }
    grammar = call_grammar("hermes", functions)
    assert grammar is not None
    for name, value, allowed in (("go", '"x"', True), ("jump", "5", True), ("go", "5", False)):
        text = f'<tool_call>\n{{"name": "{name}", "arguments": {{"to": {value}}}}}\n</tool_call>'
        assert allows(grammar, text, frozenset()) is allowed


def test_what_tags_cannot_be_held_to_has_no_grammar() -> None:
    free = {"f": {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}}
    assert call_grammar("qwen3_coder", free) is None
    assert call_grammar("hermes", free) is not None
    assert call_grammar(None, free) is None


def test_only_strict_functions_are_refused_for_what_cannot_be_held() -> None:
    properties = {"a": {"type": "string", "pattern": "(?!x)"}, "b": {"type": "string", "format": "path"}}
    functions = {"f": {"type": "object", "properties": properties, "required": ["a", "b"]}}
    grammar = call_grammar("hermes", functions)
    assert grammar is not None
    assert allows(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": "x", "b": "y"}}\n</tool_call>', frozenset())
    with pytest.raises(RequestError, match="the parameters of f: pattern at /properties/a/pattern") as caught:
        call_grammar("hermes", functions, strict={"f"})
    assert caught.value.param == "tools"
