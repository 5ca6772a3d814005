"""The tables: what each model's format looks like, by vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from server.tools import harmony
from server.tools.functions import Functions
from server.tools.gemma_calls import GemmaFormat, gemma_calls
from server.tools.json_calls import JsonFormat, json_calls
from server.tools.kimi_k3 import CLOSE, OPEN, SEP, KimiK3Format, kimi_k3
from server.tools.named_calls import CALL_ID, NamedFormat, named_calls
from server.tools.pieces import Reader
from server.tools.pythonic_calls import PythonicFormat, pythonic_calls
from server.tools.reasoning import ReasoningFormat
from server.tools.xml_calls import XmlFormat, xml_calls

CallFormat = JsonFormat | NamedFormat | XmlFormat | PythonicFormat | GemmaFormat | KimiK3Format


@dataclass(frozen=True)
class ToolFormat:
    """``form`` : None for harmony. ``special`` : markers that may be special tokens."""

    about: str
    form: CallFormat | None
    special: frozenset[str] = field(default_factory=frozenset)


def _special(*tokens: str) -> frozenset[str]:
    return frozenset(tokens)


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)  # fmt: skip
_TOOL_CALL = _special("<tool_call>", "</tool_call>")
_HERMES = JsonFormat(("<tool_call>",), end=("</tool_call>",))
_QWEN = XmlFormat(
    section=("<tool_call>",), call="<function=", after_name=">", key="<parameter=", after_key=(">",),
    value_end="</parameter>", call_end="</function>", end=("</tool_call>",), on_lines=True,
)  # fmt: skip
_GLM = XmlFormat(
    call="<tool_call>", key="<arg_key>", after_key=("</arg_key>", "<arg_value>"), value_end="</arg_value>",
    call_end="</tool_call>",
)  # fmt: skip
_DSML = XmlFormat(
    section=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"), call="<｜DSML｜invoke name=", after_name=">",
    key="<｜DSML｜parameter name=", after_key=(">",), value_end="</｜DSML｜parameter>", call_end="</｜DSML｜invoke>",
    end=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
)  # fmt: skip
_DSML_SPACED = XmlFormat(
    section=("<｜DSML｜ calls>",), call="<｜DSML｜ invoke name=", after_name=">", key="<｜DSML｜ parameter name=",
    after_key=(">",), value_end="</｜DSML｜ parameter>", call_end="</｜DSML｜ invoke>", end=("</｜DSML｜ calls>",),
)  # fmt: skip

JSON = "json"
"""What a model is made to write for a call where its format has no grammar, or it has none."""

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat("Hermes, Qwen 2.5 and 3: JSON in <tool_call>", _HERMES, _TOOL_CALL),
    "qwen3_coder": ToolFormat(
        "Qwen3-Coder, Qwen 3.5: <function=name> and <parameter=name>", _QWEN, _TOOL_CALL
    ),
    "qwen3_xml": ToolFormat("the same as qwen3_coder", _QWEN, _TOOL_CALL),
    "llama3_json": ToolFormat(
        "Llama 3.1 to 3.3: JSON at the beginning or after <|python_tag|>",
        JsonFormat(("<|python_tag|>",), bare=True), _special("<|python_tag|>"),
    ),
    "llama4_json": ToolFormat(
        "Llama 4: JSON at the beginning or after <|python_tag|>",
        JsonFormat(("<|python_tag|>",), bare=True), _special("<|python_tag|>"),
    ),
    "pythonic": ToolFormat("Llama 3.2, ToolACE: [f(a=1), g()] at the beginning", PythonicFormat(bare=True)),
    "llama4_pythonic": ToolFormat(
        "Llama 4: [f(a=1), g()] at the beginning or after <|python_start|>",
        PythonicFormat(("<|python_start|>",), bare=True, end=("<|python_end|>",)),
        _special("<|python_start|>", "<|python_end|>"),
    ),
    "mistral": ToolFormat(
        "Mistral: a JSON list, or name[ARGS]{...}, after [TOOL_CALLS]",
        NamedFormat("[TOOL_CALLS]", after_name=((CALL_ID, ""), ("[ARGS]", "")), or_json=True),
        _special("[TOOL_CALLS]", CALL_ID, "[ARGS]"),
    ),
    "deepseek_v3": ToolFormat(
        "DeepSeek V3 and R1: JSON in a block of code",
        NamedFormat(
            _DEEPSEEK[1], section=_DEEPSEEK[0], before_name=(("function",), (_DEEPSEEK[2],)),
            after_name=(("```json",),), after=(("```",), (_DEEPSEEK[3],)), end=_DEEPSEEK[4],
        ),
        _special(*_DEEPSEEK),
    ),
    "deepseek_v31": ToolFormat(
        "DeepSeek V3.1: name, separator, JSON",
        NamedFormat(
            _DEEPSEEK[1], section=_DEEPSEEK[0], after_name=((_DEEPSEEK[2],),), after=((_DEEPSEEK[3],),),
            end=_DEEPSEEK[4],
        ),
        _special(*_DEEPSEEK),
    ),
    "deepseek_v32": ToolFormat("DeepSeek V3.2: tags of DSML", _DSML, _special("｜DSML｜")),
    "deepseek_v41": ToolFormat("DeepSeek V4.1: the same, a space before each name", _DSML_SPACED, _special("｜DSML｜")),
    "openai": ToolFormat("gpt-oss: harmony, the channel commentary", None, harmony.SPECIAL_TOKENS),
    "kimi_k2": ToolFormat(
        "Kimi K2: functions.name:0, JSON",
        NamedFormat(
            _KIMI[1], section=_KIMI[0], before_name=(("functions.", ""),), after_name=((_KIMI[2],),),
            after=((_KIMI[3],),), end=_KIMI[4],
        ),
        _special(*_KIMI),
    ),
    "kimi_k3": ToolFormat("Kimi K3: sections of <|open|> and <|close|>", KimiK3Format(), _special(OPEN, CLOSE, SEP)),
    "gemma4": ToolFormat(
        "Gemma 4: call:name{key:value} in <|tool_call>", GemmaFormat(),
        _special("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "glm45": ToolFormat("GLM 4.5: <arg_key> and <arg_value>", _GLM, _TOOL_CALL),
    "glm47": ToolFormat("GLM 4.7: the same as glm45", _GLM, _TOOL_CALL),
    "granite": ToolFormat(
        "Granite 3: a JSON list after <|tool_call|>",
        JsonFormat(("<|tool_call|>", "<tool_call>")), _special("<|tool_call|>"),
    ),
    "granite4": ToolFormat("Granite 4: the same as hermes", _HERMES, _TOOL_CALL),
    "granite-20b-fc": ToolFormat(
        "Granite 20B: JSON after <function_call>", JsonFormat(("<function_call>",)), _special("<function_call>")
    ),
    "internlm": ToolFormat(
        "InternLM 2.5: JSON after <|action_start|><|plugin|>",
        JsonFormat(("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), end=("<|action_end|>",)),
        _special("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    "jamba": ToolFormat(
        "Jamba 1.5: a JSON list in <tool_calls>",
        JsonFormat(("<tool_calls>",), end=("</tool_calls>",)), _special("<tool_calls>", "</tool_calls>"),
    ),
    "hunyuan_a13b": ToolFormat(
        "Hunyuan A13B: the same as jamba",
        JsonFormat(("<tool_calls>",), end=("</tool_calls>",)), _special("<tool_calls>", "</tool_calls>"),
    ),
    "longcat": ToolFormat(
        "LongCat: JSON in <longcat_tool_call>",
        JsonFormat(("<longcat_tool_call>",), end=("</longcat_tool_call>",)),
        _special("<longcat_tool_call>", "</longcat_tool_call>"),
    ),
    "lfm2": ToolFormat(
        "LFM2: [f(a=1)] after <|tool_call_start|>",
        PythonicFormat(("<|tool_call_start|>",), end=("<|tool_call_end|>",)),
        _special("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "minimax_m2": ToolFormat(
        "MiniMax M2: <invoke> and <parameter>",
        XmlFormat(
            section=("<minimax:tool_call>",), call="<invoke name=", after_name=">", key="<parameter name=",
            after_key=(">",), value_end="</parameter>", call_end="</invoke>", end=("</minimax:tool_call>",),
        ),
        _special("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "olmo3": ToolFormat(
        "Olmo 3: f(a=1), one a line, in <function_calls>",
        PythonicFormat(("<function_calls>",), end=("</function_calls>",)),
        _special("<function_calls>", "</function_calls>"),
    ),
    "phi4_mini_json": ToolFormat(
        "Phi-4-mini: a JSON list after functools or <|tool_call|>",
        JsonFormat(("functools", "<|tool_call|>"), end=("<|/tool_call|>",)),
        _special("<|tool_call|>", "<|/tool_call|>"),
    ),
    "seed_oss": ToolFormat(
        "Seed-OSS: <function=name> and <parameter=name> in <seed:tool_call>",
        XmlFormat(
            section=("<seed:tool_call>",), call="<function=", after_name=">", key="<parameter=", after_key=(">",),
            value_end="</parameter>", call_end="</function>", end=("</seed:tool_call>",),
        ),
        _special("<seed:tool_call>", "</seed:tool_call>"),
    ),
    "xlam": ToolFormat(
        "xLAM: a JSON list at the beginning or after [TOOL_CALLS]", JsonFormat(("[TOOL_CALLS]",), bare=True)
    ),
    JSON: ToolFormat('[{"name": ..., "parameters": ...}], which any model can be made to write', JsonFormat(bare=True)),
}  # fmt: skip


@dataclass(frozen=True)
class Thinking:
    """``form`` : None for harmony. ``special`` : markers that may be special tokens."""

    about: str
    form: ReasoningFormat | None
    special: frozenset[str] = frozenset({"<think>", "</think>"})


_THINK = ReasoningFormat(("<think>",), ("</think>",))
_THINK_INSIDE = ReasoningFormat(("<think>",), ("</think>",), inside=True)

REASONING_FORMATS: Mapping[str, Thinking] = {
    "qwen3": Thinking("Qwen 3: <think>, where the model or the prompt begins it", _THINK),
    "deepseek_r1": Thinking("DeepSeek R1: <think>, the model begins inside unless the prompt closed it", _THINK_INSIDE),
    "deepseek_v3": Thinking("DeepSeek V3.1 and later: the same as qwen3", _THINK),
    "openai_gptoss": Thinking("gpt-oss: harmony, the channel analysis", None, harmony.SPECIAL_TOKENS),
    "granite": Thinking(
        "Granite 3.2: from 'Here is my thought process:' to 'Here is my response:'",
        ReasoningFormat(
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response: ", "Here's my response: ", "Here is my response:", "Here's my response:"),
        ),
        frozenset(),
    ),
    "mistral": Thinking(
        "Magistral: [THINK]", ReasoningFormat(("[THINK]", "<think>"), ("[/THINK]", "</think>")),
        _special("[THINK]", "[/THINK]"),
    ),
    "glm45": Thinking("GLM 4.5: the same as qwen3", _THINK),
    "glm47": Thinking("GLM 4.7: the same as qwen3", _THINK),
    "holo2": Thinking("Holo2: the same as deepseek_r1", _THINK_INSIDE),
    "kimi_k2": Thinking(
        "Kimi K2: <think>; calls end it, too",
        ReasoningFormat(("<think>",), ("</think>",), also_ends=_KIMI[:1], inside=True),
    ),
    "kimi_k3": Thinking(
        "Kimi K3: the section think",
        ReasoningFormat(
            (f"{OPEN}think{SEP}",), (f"{CLOSE}think{SEP}",), also_ends=(f"{OPEN}response{SEP}", f"{OPEN}tools{SEP}")
        ),
        _special(OPEN, CLOSE, SEP),
    ),
    "gemma4": Thinking(
        "Gemma 4: <|channel>thought",
        ReasoningFormat(("<|channel>thought\n", "<|channel>thought"), ("<channel|>",), also_ends=("<|tool_call>",)),
        _special("<|channel>", "<channel|>"),
    ),
    "minimax_m2": Thinking("MiniMax M2: the same as deepseek_r1", _THINK_INSIDE),
    "nemotron_v3": Thinking("Nemotron 3: the same as qwen3", _THINK),
    "olmo3": Thinking("Olmo 3: the same as deepseek_r1", _THINK_INSIDE),
    "seed_oss": Thinking(
        "Seed-OSS: <seed:think>", ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
        _special("<seed:think>", "</seed:think>"),
    ),
    "step3": Thinking("Step 3: the same as deepseek_r1", _THINK_INSIDE),
    "step3p5": Thinking("Step 3.5: the same as deepseek_r1", _THINK_INSIDE),
}  # fmt: skip


def begins_of_calls(form: CallFormat | None) -> tuple[str, ...]:
    """What begins a call, on a line of its own, in reasoning that the model forgot to end; prose hardly has that."""
    if isinstance(form, XmlFormat):
        return tuple(f"\n{section}\n" for section in form.section) or (f"\n{form.call}",)
    if isinstance(form, JsonFormat):
        return tuple(f"\n{marker}\n" for marker in form.begin if marker.startswith("<"))
    return ()


def calls_reader(form: CallFormat, functions: Functions) -> Reader:
    """Reads calls of a format. Where no marker is needed only a function of the request is called, else any name."""
    accepts: Callable[[str], bool] = bool
    if functions and isinstance(form, (JsonFormat, PythonicFormat)) and form.bare:
        accepts = functions.__contains__
    if isinstance(form, JsonFormat):
        return json_calls(form, accepts)
    if isinstance(form, NamedFormat):
        return named_calls(form, accepts)
    if isinstance(form, XmlFormat):
        return xml_calls(form, functions, accepts)
    if isinstance(form, GemmaFormat):
        return gemma_calls(form, accepts)
    if isinstance(form, KimiK3Format):
        return kimi_k3(accepts)
    return pythonic_calls(form, accepts)
