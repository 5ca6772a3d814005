"""Which formats a chat template speaks of."""

from __future__ import annotations

_CALLS = (
    ("openai", ("<|channel|>", "commentary")),
    ("deepseek_v41", ("<｜DSML｜ ",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("internlm", ("<|action_start|>", "<|plugin|>")),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("olmo3", ("<function_calls>",)),
    ("granite-20b-fc", ("<function_call>",)),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("phi4_mini_json", ("<|tool|>",)),
    ("phi4_mini_json", ("functools[",)),
    ("hermes", ("<tool_call>",)),
    ("jamba", ("<tool_calls>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama4_pythonic", ("<|header_start|>", "[func_name1(")),
    ("pythonic", ("[func_name1(",)),
    ("pythonic", ("[func1(",)),
    ("llama4_json", ("<|header_start|>", '"parameters": ')),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
)
"""Formats, the most particular first: a template has the first of which it has all strings."""

_REASONING = (
    ("openai_gptoss", ("<|channel|>", "analysis")),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("granite", ("Here is my thought process:",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<think>")),
    ("deepseek_r1", ("<｜Assistant｜><think>",)),
    ("deepseek_v3", ("<｜Assistant｜>", "<think>")),
    ("minimax_m2", ("<minimax:tool_call>", "<think>")),
    ("glm45", ("<arg_key>", "<think>")),
    ("olmo3", ("<function_calls>", "<think>")),
    ("qwen3", ("<think>",)),
    ("deepseek_r1", ("</think>",)),
)


def detect(chat_template: str) -> tuple[str | None, str | None]:
    """Names of the tool-call and the reasoning format that a chat template speaks of; None where it speaks of none."""
    return _first(_CALLS, chat_template), _first(_REASONING, chat_template)


def _first(known: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str | None:
    return next((name for name, strings in known if all(string in template for string in strings)), None)
