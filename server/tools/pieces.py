"""What a message has been found to hold since it was last asked: the writing side of a parser."""

from __future__ import annotations

from collections.abc import Callable, Collection

from server.tools.message import MessageDelta, ToolCallDelta
from server.tools.scanner import Markers, Scanner, Steps


class Pieces:
    """Collects content, reasoning and calls. White space next to a call or at the end of reasoning is held back.

    It belongs to the format: dropped before a call and at the end of reasoning, and after a call where it begins or
    ends the content.
    """

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []
        self._name: str | None = None
        self._index = -1
        self._space: list[str] = []
        self._after_call = self._any_content = False

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

    def call(self, name: str) -> None:
        """The beginning of another call."""
        self._flush_call()
        self._index += 1
        self._name = name
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
            self._calls.append(ToolCallDelta(self._index, self._name, "".join(self._arguments)))
            self._name = None
            self._arguments.clear()


Reader = Callable[[Scanner, Pieces], Steps[None]]
"""Reads a message, or the next part of it."""


def after_markers(begin: Collection[str], bare: Collection[str], read_calls: Reader) -> Reader:
    """Reads a message with calls behind each of the markers ``begin``, and at its beginning before one of ``bare``."""
    markers = Markers(*begin) if begin else None

    def read(scanner: Scanner, pieces: Pieces) -> Steps[None]:
        if bare:
            yield from scanner.space()
            if (yield from scanner.peek()) in bare:
                yield from read_calls(scanner, pieces)
            pieces.content(scanner.trail())
        while markers and (yield from scanner.until(markers, pieces.content)):
            yield from scanner.space()
            if not (yield from scanner.peek()):  # the output was cut here
                scanner.forget()
            else:
                yield from read_calls(scanner, pieces)
            pieces.content(scanner.trail())

    return read


def in_sections(sections: Collection[str], call: str, read_calls: Reader) -> Reader:
    """Reads a message with calls that each begin with ``call``, the first perhaps with one of ``sections`` before."""
    markers = Markers(*sections, call)

    def read(scanner: Scanner, pieces: Pieces) -> Steps[None]:
        while marker := (yield from scanner.until(markers, pieces.content)):
            yield from scanner.space()
            if not (yield from scanner.peek()):  # the output was cut here
                scanner.forget()
            elif marker == call or (yield from scanner.literal(call)):
                yield from read_calls(scanner, pieces)
            pieces.content(scanner.trail())

    return read


class StreamParser:
    """A `MessageParser` of readers, each of which goes on where the one before has ended; the rest is content."""

    def __init__(self, *readers: Reader) -> None:
        self._scanner = Scanner()
        self._pieces = Pieces()
        self._steps = self._read(readers)

    def _read(self, readers: tuple[Reader, ...]) -> Steps[None]:
        for reader in (*readers, _rest):
            yield from reader(self._scanner, self._pieces)
            self._pieces.content(self._scanner.trail())

    def push(self, text: str) -> MessageDelta:
        """What the next text certainly adds."""
        self._scanner.feed(text)
        next(self._steps, None)
        return self._pieces.take()

    def finish(self) -> MessageDelta:
        """What was held back, at the end of the text."""
        self._scanner.end()
        next(self._steps, None)
        self._pieces.end()
        return self._pieces.take()


def _rest(scanner: Scanner, pieces: Pieces) -> Steps[None]:
    yield from scanner.rest(pieces.content)
