"""Messages taken apart as they come, into content, reasoning and tool calls: what every writer of answers reads."""

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
    """A piece of call ``index`` of a message. ``name`` : with its first piece. ``arguments`` : more of its JSON."""

    index: int
    name: str | None = None
    arguments: str = ""


class TextDelta(NamedTuple):
    """A piece of the content or the reasoning; ``end`` : of it in all of the text, where it stands as it is."""

    of: Literal["content", "reasoning"]
    text: str
    end: int


Said = TextDelta | ToolCallDelta
"""What some text said next: more of the content, of the reasoning, or of a call."""


Delta = tuple[Said, ...]
"""What some text added to a message, in the order it says so; empty while it may yet become something else."""


@dataclass(slots=True)
class _Piece:
    """``of`` : what it is part of, a call by its number; ``name`` : of a call that begins; ``end`` : as above."""

    of: Literal["content", "reasoning"] | int
    name: str | None = None
    texts: list[str] = field(default_factory=list)
    end: int = 0


class Pieces:
    """What a message has been found to hold since it was last asked: the writing side of a parser.

    White space next to a call or at the end of reasoning is held back, for it belongs to the format: dropped before a
    call and at the end of reasoning, and after a call where it begins or ends the content.
    """

    def __init__(self, scanner: Scanner) -> None:
        """``scanner`` : has just read what the pieces are given."""
        self.num_calls = 0
        """Calls that have begun."""
        self._scanner = scanner
        self._said: list[_Piece] = []
        self._space: list[tuple[str, int]] = []  # and where it ended
        self._after_call = self._any_content = False

    @property
    def is_within_line(self) -> bool:
        """Whether text of the content stands before what comes, in the same line."""
        return self._any_content and not self._after_call and not any("\n" in space for space, _ in self._space)

    def _say(self, of: Literal["content", "reasoning"] | int, texts: Iterable[tuple[str, int]]) -> None:
        for text, end in texts:
            if not text:
                continue
            last = self._said[-1] if self._said else None
            if last is None or last.of != of or (of == "content" and last.end != end - len(text)):
                self._said.append(last := _Piece(of))
            last.texts.append(text)
            last.end = end

    def content(self, text: str) -> None:
        visible, end = text.rstrip(), self._scanner.num_read
        space = text[len(visible) :]
        if visible:
            first = self._after_call and not self._any_content
            shown = (visible.lstrip() if first else visible, end - len(space))
            self._say("content", [shown] if first else [*self._space, shown])
            self._space.clear()
            self._after_call, self._any_content = False, True
        self._space.append((space, end))

    def reasoning(self, text: str) -> None:
        """Text of the reasoning; line ends are held back until more follows."""
        visible, end = text.rstrip("\n"), self._scanner.num_read
        if visible:
            self._say("reasoning", [*self._space, (visible, end)])
            self._space.clear()
        self._space.append((text[len(visible) :], end))

    def end_reasoning(self, *, complete: bool) -> None:
        """No more reasoning; where it is not ``complete`` the line ends at its end are part of it."""
        if not complete:
            self._say("reasoning", self._space)
        self._space.clear()

    def call(self, name: str, *, space_is_text: bool = False) -> None:
        """The beginning of another call; ``space_is_text`` : between content and a call as well."""
        if space_is_text and self._any_content and not self._after_call:
            self._say("content", self._space)
        self._space.clear()
        self._said.append(_Piece(self.num_calls, name))
        self.num_calls += 1
        self._after_call = True

    def arguments(self, text: str) -> None:
        self._say(self.num_calls - 1, [(text, self._scanner.num_read)])

    def end(self) -> None:
        if not self._after_call:
            self._say("content", self._space)
        self._space.clear()

    def take(self) -> Delta:
        """All of it, since it was last taken."""
        said: list[Said] = []
        for piece in self._said:
            text = "".join(piece.texts)
            if isinstance(piece.of, int):
                said.append(ToolCallDelta(piece.of, piece.name, text))
            else:
                said.append(TextDelta(piece.of, text, piece.end))
        self._said.clear()
        return tuple(said)


Reader = Callable[[Scanner, Pieces], Steps[None]]
"""Reads a message, or the next part of it."""


class MessageParser:
    """Takes one message apart, by readers each of which goes on where the one before has ended; the rest is content.

    However the text is cut, all deltas together are the same. Text that is no well-formed call is content, but for the
    beginning of a call that the end of the text cut. Nothing raises. One object a choice. O(characters).
    """

    def __init__(self, *readers: Reader) -> None:
        self._scanner = Scanner()
        self._pieces = Pieces(self._scanner)
        self._steps = self._read(readers)

    def _read(self, readers: tuple[Reader, ...]) -> Steps[None]:
        for reader in readers:
            yield from reader(self._scanner, self._pieces)
            self._pieces.content(self._scanner.trail())
        yield from self._scanner.rest(self._pieces.content)

    def push(self, text: str) -> Delta:
        self._scanner.feed(text)
        next(self._steps, None)
        return self._pieces.take()

    def finish(self) -> Delta:
        """What was held back, at the end of the text; call it once."""
        self._scanner.end()
        next(self._steps, None)
        self._pieces.end()
        return self._pieces.take()


_CHARACTERS = string.ascii_letters + string.digits
_SHORT = 9
_IS_SHORT = re.compile(rf"[A-Za-z0-9]{{{_SHORT}}}")


def call_id() -> str:
    """A name that no other call has, as OpenAI's are."""
    return "call_" + _drawn(24)


def short_call_id() -> str:
    """The same as Mistral's chat templates take them, and no others: nine letters and digits."""
    return _drawn(_SHORT)


def _drawn(length: int) -> str:
    return "".join(secrets.choice(_CHARACTERS) for _ in range(length))


def with_short_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with every call's name made short, the same name always alike; what is malformed stays."""

    def shortened(part: Any, name: str) -> Any:
        is_named = isinstance(part, dict) and isinstance(part.get(name), str)
        return {**part, name: _short(part[name])} if is_named else part

    changed = [dict(shortened(message, "tool_call_id")) for message in messages]
    for message in changed:
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [shortened(call, "id") for call in calls]
    return changed


def with_numbered_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with every call named as Kimi K2 names it, by its function and its number of all calls.

    The model's template writes nothing else of a call but its arguments. What is malformed stays.
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


def _short(name: str) -> str:
    if _IS_SHORT.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).digest()
    return "".join(_CHARACTERS[byte % len(_CHARACTERS)] for byte in digest[:_SHORT])


@dataclass(slots=True)
class ToolCall:
    """One call of a message. ``pieces`` : of its arguments, as they came."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """The JSON text of an object, or its beginning where the output was cut."""
        return "".join(self.pieces)

    @property
    def is_json(self) -> bool:
        """Whether its arguments are JSON."""
        return is_json(self.arguments)


@dataclass(slots=True)
class Message:
    """What a choice has said so far. Texts in pieces, as they came."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    ends_with_call: bool = False

    @property
    def ends_within_call(self) -> bool:
        """Whether nothing follows its last call, and the arguments of that are no JSON."""
        return self.ends_with_call and not self.tool_calls[-1].is_json


class Messages:
    """The messages of all choices of one request; either streamed, by `push`, or `whole`. Not thread-safe."""

    def __init__(
        self,
        make_parser: Callable[[], MessageParser],
        *,
        parallel: bool = True,
        only_calls: bool = False,
        show_reasoning: bool = True,
        make_id: Callable[[], str] = call_id,
    ) -> None:
        """``parallel`` : else calls after the first are dropped. ``only_calls`` : a grammar holds it to calls."""
        self._make_parser = make_parser
        self._most_calls = None if parallel else 1
        self._only_calls = only_calls
        self._show_reasoning = show_reasoning
        self._make_id = make_id
        self._parsers: dict[int, MessageParser] = {}
        self._messages: dict[int, Message] = {}

    def push(self, index: int, text: str, *, ended: bool) -> Delta:
        """What the next text of choice ``index`` adds to its message; ``ended`` : it is the last."""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._make_parser()
        delta = parser.push(text)
        if ended:
            delta = delta + parser.finish()
        return self._taken(self.of(index), delta)

    def of(self, index: int) -> Message:
        """The message of a choice as far as it was pushed; a call's id is there with its name."""
        return self._messages.setdefault(index, Message())

    def whole(self, index: int, text: str) -> Message:
        """The message that all the text of a choice is."""
        self.push(index, text, ended=True)
        return self.of(index)

    def _taken(self, message: Message, delta: Delta) -> Delta:
        taken: list[Said] = []
        for said in delta:
            if isinstance(said, ToolCallDelta):
                if self._most_calls is not None and said.index >= self._most_calls:
                    continue
                if said.name is not None:
                    message.tool_calls.append(ToolCall(self._make_id(), said.name))
                message.tool_calls[said.index].pieces.append(said.arguments)
            elif said.of == "content":
                if self._only_calls:
                    continue
                message.content.append(said.text)
            elif self._show_reasoning:
                message.reasoning.append(said.text)
            else:
                continue
            message.ends_with_call = isinstance(said, ToolCallDelta)
            taken.append(said)
        return tuple(taken)
