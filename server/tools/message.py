"""A message as it is taken apart while its text arrives: content, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.tools.scanner import Scanner, Steps


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one tool call of a message.

    ``index`` : which call of the message, from 0. ``name`` : of the function, with the call's first piece and with no
    other. ``arguments`` : the next characters of its JSON text; all pieces together are one JSON object.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What some text added to a message; empty while it may yet become something else."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class Pieces:
    """What a message has been found to hold since it was last asked: the writing side of a parser.

    White space next to a call or at the end of reasoning is held back, for it belongs to the format: dropped before a
    call and at the end of reasoning, and after a call where it begins or ends the content.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        """Calls that have begun."""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []
        self._name: str | None = None
        self._space: list[str] = []
        self._after_call = self._any_content = False

    @property
    def is_within_line(self) -> bool:
        """Whether text of the content stands before what comes, in the same line."""
        return self._any_content and not self._after_call and not any("\n" in space for space in self._space)

    def content(self, text: str) -> None:
        """Text of the content."""
        visible = text.rstrip()
        if visible:
            first = self._after_call and not self._any_content
            if not first:
                self._content += self._space
            self._space.clear()
            self._content.append(visible.lstrip() if first else visible)
            self._after_call, self._any_content = False, True
        self._space.append(text[len(visible) :])

    def reasoning(self, text: str) -> None:
        """Text of the reasoning; line ends are held back until more follows."""
        visible = text.rstrip("\n")
        if visible:
            self._reasoning += self._space
            self._space.clear()
            self._reasoning.append(visible)
        self._space.append(text[len(visible) :])

    def end_reasoning(self, *, complete: bool) -> None:
        """No more reasoning; where it is not ``complete`` the line ends at its end are part of it."""
        if not complete:
            self._reasoning += self._space
        self._space.clear()

    def call(self, name: str, *, space_is_text: bool = False) -> None:
        """The beginning of another call; ``space_is_text`` : between content and a call as well."""
        self._flush_call()
        self.num_calls += 1
        self._name = name
        if space_is_text and self._any_content and not self._after_call:
            self._content += self._space
        self._space.clear()
        self._after_call = True

    def arguments(self, text: str) -> None:
        """More text of the last call's arguments."""
        self._arguments.append(text)

    def end(self) -> None:
        """The message is complete."""
        if not self._after_call:
            self._content += self._space
        self._space.clear()

    def take(self) -> MessageDelta:
        """All of it, since it was last taken."""
        self._flush_call()
        delta = MessageDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content.clear()
        self._reasoning.clear()
        self._calls.clear()
        return delta

    def _flush_call(self) -> None:
        if self._name is not None or self._arguments:
            self._calls.append(ToolCallDelta(self.num_calls - 1, self._name, "".join(self._arguments)))
            self._name = None
            self._arguments.clear()


Reader = Callable[[Scanner, Pieces], Steps[None]]
"""Reads a message, or the next part of it."""


class MessageParser:
    """Takes one message apart, by readers each of which goes on where the one before has ended; the rest is content.

    However the text is cut, all deltas together are the same. Text that is no well-formed call is content, but for the
    beginning of a call, not within a line of prose, that the end of the text cut: nothing else a model says is lost,
    and nothing raises. One object a choice, not thread-safe. O(characters) over the whole message.
    """

    def __init__(self, *readers: Reader) -> None:
        self._scanner = Scanner()
        self._pieces = Pieces()
        self._steps = self._read(readers)

    def _read(self, readers: tuple[Reader, ...]) -> Steps[None]:
        for reader in readers:
            yield from reader(self._scanner, self._pieces)
            self._pieces.content(self._scanner.trail())
        yield from self._scanner.rest(self._pieces.content)

    def push(self, text: str) -> MessageDelta:
        """What the next text certainly adds."""
        self._scanner.feed(text)
        next(self._steps, None)
        return self._pieces.take()

    def finish(self) -> MessageDelta:
        """What was held back, at the end of the text; call it once."""
        self._scanner.end()
        next(self._steps, None)
        self._pieces.end()
        return self._pieces.take()
