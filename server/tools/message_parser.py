"""Parse a model's output, while it is generated, into content, reasoning and tool calls."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple

from server.tools.scanner import Scanner, Steps
from server.tools.values import is_json


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New text of a tool call in the output.

    Attributes:
        index: The index of the tool call in the message.
        name: The function's name, in the first delta of a call only.
        arguments: The next part of the arguments' JSON.
    """

    index: int
    name: str | None = None
    arguments: str = ""


class TextDelta(NamedTuple):
    """New text of the content or of the reasoning. ``end`` is the position of the text's end in the whole output."""

    kind: Literal["content", "reasoning"]
    text: str
    end: int


DeltaPart = TextDelta | ToolCallDelta


Delta = tuple[DeltaPart, ...]
"""The content, reasoning and tool calls in new output, in order. Empty while the parser needs more text to distinguish
them.
"""


@dataclass(slots=True)
class _Piece:
    kind: Literal["content", "reasoning"] | int
    name: str | None = None
    texts: list[str] = field(default_factory=list)
    end: int = 0


class DeltaBuffer:
    """Collects the content, reasoning and tool calls that the parser finds, until the next chunk is sent.

    White space next to tool calls and at the end of reasoning belongs to the model's format, not to the text. So white
    space is held back until the following text shows whether to drop it.
    """

    def __init__(self, scanner: Scanner) -> None:
        self.num_calls = 0
        self._scanner = scanner
        self._pieces: list[_Piece] = []
        self._space: list[tuple[str, int]] = []  # each with its end position
        self._after_call = self._any_content = False

    @property
    def is_within_line(self) -> bool:
        """Whether content has been found on the current line."""
        return self._any_content and not self._after_call and not any("\n" in space for space, _ in self._space)

    def _add(self, kind: Literal["content", "reasoning"] | int, texts: Iterable[tuple[str, int]]) -> None:
        for text, end in texts:
            if not text:
                continue
            last = self._pieces[-1] if self._pieces else None
            if last is None or last.kind != kind or (kind == "content" and last.end != end - len(text)):
                self._pieces.append(last := _Piece(kind))
            last.texts.append(text)
            last.end = end

    def content(self, text: str) -> None:
        visible, end = text.rstrip(), self._scanner.num_read
        space = text[len(visible) :]
        if visible:
            first = self._after_call and not self._any_content
            shown = (visible.lstrip() if first else visible, end - len(space))
            self._add("content", [shown] if first else [*self._space, shown])
            self._space.clear()
            self._after_call, self._any_content = False, True
        self._space.append((space, end))

    def reasoning(self, text: str) -> None:
        """Add reasoning text. Line ends are held back until more reasoning follows."""
        visible, end = text.rstrip("\n"), self._scanner.num_read
        if visible:
            self._add("reasoning", [*self._space, (visible, end)])
            self._space.clear()
        self._space.append((text[len(visible) :], end))

    def end_reasoning(self, *, complete: bool) -> None:
        """End the reasoning, and drop its trailing line ends unless the output was truncated (not ``complete``)."""
        if not complete:
            self._add("reasoning", self._space)
        self._space.clear()

    def call(self, name: str, *, space_is_text: bool = False) -> None:
        """Begin another tool call. If ``space_is_text`` is set, the white space before the call is content."""
        if space_is_text and self._any_content and not self._after_call:
            self._add("content", self._space)
        self._space.clear()
        self._pieces.append(_Piece(self.num_calls, name))
        self.num_calls += 1
        self._after_call = True

    def arguments(self, text: str) -> None:
        self._add(self.num_calls - 1, [(text, self._scanner.num_read)])

    def end(self) -> None:
        if not self._after_call:
            self._add("content", self._space)
        self._space.clear()

    def pop(self) -> Delta:
        """Remove and return the deltas that were collected since the last call."""
        parts: list[DeltaPart] = []
        for piece in self._pieces:
            text = "".join(piece.texts)
            if isinstance(piece.kind, int):
                parts.append(ToolCallDelta(piece.kind, piece.name, text))
            else:
                parts.append(TextDelta(piece.kind, text, piece.end))
        self._pieces.clear()
        return tuple(parts)


Reader = Callable[[Scanner, DeltaBuffer], Steps[None]]
"""A function that parses one part of a message, e.g. the reasoning. It reads text from the `Scanner`, and adds the
parts that it finds to the `DeltaBuffer`.
"""


class MessageParser:
    """Parses one message of a model while its text arrives. Each of ``readers`` parses one part, e.g. the reasoning.

    Text after the last part is content. The result does not depend on the division of the text into chunks. Text that
    is not a well-formed tool call is content, unless it is the beginning of a call at the end of a truncated output.
    Never raises. O(characters).
    """

    def __init__(self, *readers: Reader) -> None:
        self._scanner = Scanner()
        self._pieces = DeltaBuffer(self._scanner)
        self._steps = self._read(readers)

    def _read(self, readers: tuple[Reader, ...]) -> Steps[None]:
        for reader in readers:
            yield from reader(self._scanner, self._pieces)
            self._pieces.content(self._scanner.pop_trail())
        yield from self._scanner.read_rest(self._pieces.content)

    def push(self, text: str) -> Delta:
        self._scanner.feed(text)
        next(self._steps, None)
        return self._pieces.pop()

    def finish(self) -> Delta:
        """End the message and return the deltas of the text that was held back until now. Must be called once."""
        self._scanner.end()
        next(self._steps, None)
        self._pieces.end()
        return self._pieces.pop()


_CHARACTERS = string.ascii_letters + string.digits
_SHORT = 9
_IS_SHORT = re.compile(rf"[A-Za-z0-9]{{{_SHORT}}}")


def call_id() -> str:
    return "call_" + _random_characters(24)


def short_call_id() -> str:
    """Return a new random id for a tool call in the only form that Mistral's chat templates accept: nine characters."""
    return _random_characters(_SHORT)


def _random_characters(length: int) -> str:
    return "".join(secrets.choice(_CHARACTERS) for _ in range(length))


def with_short_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace tool call ids in messages by hashes of nine characters, the only form that Mistral's templates accept."""

    def shortened(part: Any, name: str) -> Any:
        is_named = isinstance(part, dict) and isinstance(part.get(name), str)
        return {**part, name: _shorten_id(part[name])} if is_named else part

    changed = [dict(shortened(message, "tool_call_id")) for message in messages]
    for message in changed:
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [shortened(call, "id") for call in calls]
    return changed


def with_numbered_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace each tool call id in messages by Kimi K2's form, ``functions.NAME:NUMBER``.

    Kimi's chat template writes only this id and the arguments of a call.
    """
    numbers, ids = count(), dict[str, str]()
    changed = [dict(message) for message in messages]
    for message in changed:
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = calls = list(calls)
            for place, call in enumerate(calls):
                function = call.get("function") if isinstance(call, dict) else None
                if isinstance(function, dict) and "name" in function:
                    calls[place] = {**call, "id": f"functions.{function['name']}:{next(numbers)}"}
                    ids[str(call.get("id"))] = calls[place]["id"]
        if isinstance(answered := message.get("tool_call_id"), str):
            message["tool_call_id"] = ids.get(answered, answered)
    return changed


def _shorten_id(name: str) -> str:
    if _IS_SHORT.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).digest()
    return "".join(_CHARACTERS[byte % len(_CHARACTERS)] for byte in digest[:_SHORT])


@dataclass(slots=True)
class ToolCall:
    """A tool call in a message; ``pieces`` are the chunks of its arguments' JSON."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    @property
    def is_json(self) -> bool:
        return is_json(self.arguments)


@dataclass(slots=True)
class Message:
    """The message of a choice, parsed so far. Its content and reasoning are lists of chunks."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    ends_with_call: bool = False

    @property
    def ends_within_call(self) -> bool:
        """Whether the output was truncated inside a tool call, so that the call's arguments are not valid JSON."""
        return self.ends_with_call and not self.tool_calls[-1].is_json


@dataclass(slots=True)
class Messages:
    """Parses the outputs of all choices of a request into messages with tool calls and reasoning. Not thread-safe.

    Without ``parallel``, tool calls after the first are dropped. With ``only_calls``, a grammar forces tool calls, and
    any content is dropped.
    """

    make_parser: Callable[[], MessageParser]
    parallel: bool = field(default=True, kw_only=True)
    only_calls: bool = field(default=False, kw_only=True)
    show_reasoning: bool = field(default=True, kw_only=True)
    make_id: Callable[[], str] = field(default=call_id, kw_only=True)
    _parsers: dict[int, MessageParser] = field(default_factory=dict, init=False)
    _messages: dict[int, Message] = field(default_factory=dict, init=False)

    def push(self, index: int, text: str, *, ended: bool) -> Delta:
        """Parse new text of the choice ``index``, and return the content, reasoning and tool calls found in it."""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self.make_parser()
        delta = parser.push(text)
        if ended:
            delta = delta + parser.finish()
        return self._add_to_message(self.message(index), delta)

    def message(self, index: int) -> Message:
        return self._messages.setdefault(index, Message())

    def parse(self, index: int, text: str) -> Message:
        self.push(index, text, ended=True)
        return self.message(index)

    def _add_to_message(self, message: Message, delta: Delta) -> Delta:
        kept: list[DeltaPart] = []
        for part in delta:
            if isinstance(part, ToolCallDelta):
                if part.index > 0 and not self.parallel:
                    continue
                if part.name is not None:
                    message.tool_calls.append(ToolCall(self.make_id(), part.name))
                message.tool_calls[part.index].pieces.append(part.arguments)
            elif part.kind == "content":
                if self.only_calls:
                    continue
                message.content.append(part.text)
            elif self.show_reasoning:
                message.reasoning.append(part.text)
            else:
                continue
            message.ends_with_call = isinstance(part, ToolCallDelta)
            kept.append(part)
        return tuple(kept)
