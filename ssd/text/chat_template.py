"""A chat template, with tests that detect which parts of a conversation the template leaves out of the prompt.

A template is a program. Its source does not show whether it writes a role, a list of content parts or a second tool
call; it may mention a role only in a comment. So a test conversation is rendered for each shape (roles and parts) of a
conversation, with unique texts ("marks") as contents and arguments. Conversations of that shape are then rewritten in
the first way of `variants` in which the template wrote all marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from ssd.text.call_variants import WriteCalls, functions_of, has_object_arguments, variants
from ssd.text.messages import Message, mentions_tools

_MAX_SHAPES = 512  # results remembered for one template
_REPEATED = re.compile(r"(?s:(.{1,6}?)\1{2,})")  # three or more times in a row
_LONGEST_VALUE = 64

SAMPLE_NAME = "get_weather_0f6ac8"
SAMPLE_ARGUMENTS: Mapping[str, str] = {"city": "Oslo 0f6ac8"}
SAMPLE_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
_SAMPLE_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": SAMPLE_NAME, "description": "Weather.", "parameters": SAMPLE_SCHEMA}}
]
# Kimi's template reads the function's name from the id, Mistral's requires nine characters.
_SAMPLE_IDS = (f"functions.{SAMPLE_NAME}:0", "a1b2c3d4e")
_MISSING = {"description": "", "parameters": {"type": "object", "properties": {}}}  # required by some templates


class Loss(NamedTuple):
    """A part of a conversation that a chat template leaves out: the content of a message, or one of its tool calls."""

    message: int
    call: int | None = None

    def __str__(self) -> str:
        return f"messages[{self.message}]" + ("" if self.call is None else f".tool_calls[{self.call}]")


class VariantChoice(NamedTuple):
    """The rewriting of a conversation by `variants` with the fewest parts that the chat template leaves out."""

    number: int | None  # the index of the variant in `variants`; None if the template refuses all of them
    losses: tuple[Loss, ...] = ()  # the parts that this variant leaves out
    one_call_each: bool = False  # whether each message of the variant has at most one tool call


class CallSample(NamedTuple):
    """A tool call as a chat template writes it, which shows the model's format for tool calls."""

    prompt: str  # the generation prompt before the assistant's message
    texts: tuple[str, ...]  # the message, once for each plausible end of its header


class ChatTemplate:
    """A chat template, with tests of what it supports. Thread-safe.

    Attributes:
        source: The text of the template.
    """

    def __init__(self, source: str, apply: Callable[..., str]) -> None:
        self.source = source
        self._apply = apply
        self._choices: dict[object, VariantChoice] = {}
        self._reads_parts_alone: dict[str, bool] = {}
        self._needs_missing: dict[frozenset[str], bool] = {}

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the prompt text for a conversation; exceptions that the template raises are passed on."""
        messages = [_in_parts(each) if self._parts_alone(each["role"]) else each for each in messages]
        return self._apply(messages, chat_template=self.source, tokenize=False, **options)

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template writes a system message before the first user message into the prompt."""
        return self._writes([_turn("system"), _turn("user")], 0)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template writes the descriptions of tools into the prompt.

        Two short conversations with a tool are rendered to find out. If the template raises an exception for both, the
        word "tools" in its source decides.
        """
        trials = ([_turn("user")], [_turn("system"), _turn("user", 1)])
        written = [self._try(trial, tools=_SAMPLE_TOOLS, add_generation_prompt=True) for trial in trials]
        return mentions_tools(self.source) and (
            not any(written) or any(SAMPLE_NAME in text for text in written if text)
        )

    @cached_property
    def takes_several_calls(self) -> bool:
        results = [
            {"role": "tool", "tool_call_id": id, "name": SAMPLE_NAME, "content": "5"}
            for id in ("a1b2c3d4e", "a1b2c3d4f")
        ]
        calls = [_sample_call(each["tool_call_id"]) for each in results]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        found = self.choose([_turn("user"), message, *results], {"tools": _SAMPLE_TOOLS}, lambda _: "")
        return not found.one_call_each

    def with_roles(self, messages: list[Message]) -> list[Message]:
        """Replace the role "developer" by "system" if the template does not support "developer"."""
        if all(message["role"] != "developer" for message in messages) or self._takes_developer:
            return messages
        return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]

    def with_fields(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Add missing fields to the tools in template variables if the template requires them, e.g. empty descriptions.

        The API lets clients omit these fields.
        """
        tools = variables.get("tools")
        if not tools:
            return {**variables, "tools": []} if tools is None and self._needs_tools else dict(variables)
        functions = [tool.get("function", {}) for tool in tools]
        missing = frozenset(name for name in _MISSING for function in functions if name not in function)
        if missing and missing not in self._needs_missing:
            part = {name: value for name, value in _SAMPLE_TOOLS[0]["function"].items() if name not in missing}
            refused = self._try([_turn("user")], tools=[{"type": "function", "function": part}]) is None
            self._needs_missing[missing] = refused and self._try([_turn("user")], tools=_SAMPLE_TOOLS) is not None
        if not missing or not self._needs_missing[missing]:
            return dict(variables)
        completed = [
            {**tool, "function": {**function, **{k: v for k, v in _MISSING.items() if k not in function}}}
            for tool, function in zip(tools, functions, strict=True)
        ]
        return {**variables, "tools": completed}

    def choose(
        self, messages: list[Message], variables: Mapping[str, Any], write_calls: WriteCalls, **options: Any
    ) -> VariantChoice:
        """Return the first rewriting of a conversation by `variants` that the template renders completely.

        If there is none, return the rewriting with the fewest missing parts. The result is cached for conversations
        with the same sequence of roles and parts; repetitions in the sequence do not count. O(variants x renderings).
        """
        signs = list(map(_sign, messages))
        kept = _without_repetition(signs)
        shape = (tuple(signs[number] for number in kept), _outline(variables), tuple(options.values()))
        found = self._choices.get(shape)
        if found is None:
            if len(self._choices) >= _MAX_SHAPES:
                self._choices.clear()
            short = [messages[number] for number in kept]
            found = self._choices[shape] = self._find(short, {**variables, **options}, write_calls)
        return found._replace(losses=tuple(Loss(kept[loss.message], loss.call) for loss in found.losses))

    def _find(self, messages: list[Message], options: Mapping[str, Any], write_calls: WriteCalls) -> VariantChoice:
        marks = _marks(messages)
        best = VariantChoice(None)
        for number, variant in enumerate(variants(_marked(messages), write_calls)):
            text = self._try(variant.messages, **options)
            if text is None:
                continue
            written = set(_MARK.findall(text))
            losses = tuple(loss for loss, mark in marks.items() if mark not in written)
            if best.number is None or len(losses) < len(best.losses):
                best = VariantChoice(number, losses, variant.one_call_each)
            if not losses:
                break
        return best

    def refuses_tools(self, variables: Mapping[str, Any]) -> bool:
        """Return whether the template raises an exception because of the tools in ``variables``."""
        user, without = [_turn("user")], {name: value for name, value in variables.items() if name != "tools"}
        return bool(variables.get("tools")) and self._try(user, **variables) is None != self._try(user, **without)

    def sample_call(self) -> CallSample | None:
        """Render a tool call to show the model's format of tool calls; None if the template refuses or drops it."""
        options = {"tools": _SAMPLE_TOOLS}
        for as_text, id in product((False, True), _SAMPLE_IDS):
            call = _sample_call(id, as_text=as_text)
            whole = self._try([_turn("user"), {"role": "assistant", "content": "", "tool_calls": [call]}], **options)
            if whole is not None and all(text in whole for text in (SAMPLE_NAME, *SAMPLE_ARGUMENTS.values())):
                break
        else:
            return None
        answered = self._try([_turn("user"), _turn("assistant", 1)], **options) or ""
        header, _, end = answered.partition(_mark(1))
        asked = self._try([_turn("user")], add_generation_prompt=True, **options) or ""
        length = next((at for at, (ours, theirs) in enumerate(zip(header, whole, strict=False)) if ours != theirs), 0)
        shared = header[:length]
        shared = shared[: shared.rfind("<")] if shared.rfind("<") > shared.rfind(">") else shared
        prompts = [prompt for prompt in (asked, header, shared) if prompt and whole.startswith(prompt)] or [""]
        texts = (whole[len(prompt) :].removesuffix(end) if end else whole[len(prompt) :] for prompt in prompts)
        return CallSample(asked, tuple(dict.fromkeys(texts)))

    @cached_property
    def _takes_developer(self) -> bool:
        return "developer" in self.source and self._writes([_turn("developer"), _turn("user")], 0)

    @cached_property
    def _needs_tools(self) -> bool:
        user = [_turn("user")]
        return self._try(user) is None and self._try(user, tools=[]) is not None

    def _parts_alone(self, role: str) -> bool:
        if (found := self._reads_parts_alone.get(role)) is None:
            self._reads_parts_alone[role] = False  # `render` reads this during the test
            before = [_turn("user", 1)] if role == "assistant" else []
            messages = [*before, _turn(role), *([_turn("user", 2)] if role != "user" else [])]
            in_parts = [_in_parts(message) for message in messages]
            found = not self._writes(messages, 0) and self._writes(in_parts, 0)
            self._reads_parts_alone[role] = found
        return found

    def _writes(self, messages: Sequence[Message], number: int) -> bool:
        return _mark(number) in (self._try(messages) or "")

    def _try(self, messages: Sequence[Message], **options: Any) -> str | None:
        try:
            return self.render(messages, **options)
        except Exception:  # a template is code that may raise anything
            return None


_MARK = re.compile(r"0f6ac8m\d{6}(?:c\d{6})?x")


def _mark(number: int, call: int | None = None) -> str:
    return f"0f6ac8m{number:06d}" + ("x" if call is None else f"c{call:06d}x")


def _turn(role: str, number: int = 0) -> Message:
    return {"role": role, "content": _mark(number)}


def _sample_call(id: object, *, as_text: bool = False) -> dict[str, Any]:
    arguments = json.dumps(SAMPLE_ARGUMENTS) if as_text else SAMPLE_ARGUMENTS
    return {"id": id, "type": "function", "function": {"name": SAMPLE_NAME, "arguments": arguments}}


def _in_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def _marks(messages: Sequence[Message]) -> dict[Loss, str]:
    """Return a unique text (mark) for each part of a conversation that a template should write into the prompt."""
    found: dict[Loss, str] = {}
    for number, message in enumerate(messages):
        if message["content"].strip():
            found[Loss(number)] = _mark(number)
        for place, call in enumerate(message.get("tool_calls", ())):
            if isinstance(call.get("function"), Mapping):
                found[Loss(number, place)] = _mark(number, place)
    return found


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with marks in place of contents and call arguments, to test a template."""

    def call_of(number: int, place: int, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function, mark = call.get("function"), _mark(number, place)
        if not isinstance(function, Mapping):
            return call
        arguments = {"c": {"0f6ac8": mark}, "x": mark, "l": [mark]}[_kind(function)]
        return {**call, "function": {**function, "arguments": arguments}}

    found = []
    for number, message in enumerate(messages):
        marked = {**message, "content": _mark(number) if message["content"].strip() else ""}
        if "tool_calls" in message:
            marked["tool_calls"] = [call_of(number, place, call) for place, call in enumerate(message["tool_calls"])]
        found.append(marked)
    return found


def _kind(function: Mapping[str, Any]) -> str:
    if has_object_arguments(function):
        return "c"
    return "x" if isinstance(function["arguments"], str) else "l"


def _sign(message: Message) -> str:
    calls = ""
    if "tool_calls" in message:
        calls = re.sub(r"(.)\1\1+", r"\1\1", "".join(map(_kind, functions_of(message))))
    fields = [name[0] for name in ("reasoning_content", "thinking", "tool_call_id") if name in message]
    return f"{message['role']},{bool(message['content'].strip()):d},{calls},{''.join(fields)}"


def _without_repetition(signs: Sequence[str]) -> list[int]:
    """Return the indices of the messages to keep, so that no series of up to 6 messages repeats more than twice.

    ``signs`` describe the role and parts of each message. A long conversation is thus shortened before the template is
    tested with it, and the result for the shorter conversation may be cached.
    """
    if len(set(signs)) > len(signs) - 2:
        return list(range(len(signs)))
    letters = {sign: chr(number) for number, sign in enumerate(dict.fromkeys(signs))}
    text, kept = "".join(letters[sign] for sign in signs), list(range(len(signs)))
    while found := list(_REPEATED.finditer(text)):
        for match in reversed(found):
            begin, end = match.start() + 2 * len(match[1]), match.end()
            text = text[:begin] + text[end:]
            del kept[begin:end]
    return kept


def _outline(variables: Mapping[str, Any]) -> tuple[object, ...]:

    def outline(value: object) -> object:
        is_short = isinstance(value, str | bool | int | float) and len(str(value)) < _LONGEST_VALUE
        return str(value) if is_short else bool(value)

    return tuple((name, outline(value)) for name, value in sorted(variables.items()))
