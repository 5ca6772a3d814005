"""Incremental parsers of reasoning before the content: between markers, or in messages with headers."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from server.tools.message_parser import DeltaBuffer, Reader
from server.tools.scanner import Markers, Scanner, Sink, Steps
from server.tools.tool_call_parser import CallFormat, ToolCallParser
from server.tools.values import Functions

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

_LINE_ENDS = re.compile(r"[\r\n]+")
_HEADER_TEXT = re.compile(r"[^<]+")
_CUT_HEADER = re.compile(
    r"(?=<)(?:<\|start\|>\s*+NAME)?+\s*+(?:to=[^\s<]*+)?+\s*+(?:<\|channel\|>\s*+NAME)?+\s*+(?:to=[^\s<]*+)?+\s*+"
    r"(?:<\|constrain\|>)?+\s*+\w*+".replace("NAME", r"(?:(?!to=)\w)*+")
)
"""Matches a truncated message header. The quantifiers are possessive, so that matching never backtracks."""
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model writes reasoning.

    Attributes:
        begin: The markers that begin reasoning.
        end: The markers that end reasoning.
        next_starts: The markers that end reasoning and belong to the text after it, e.g. the beginning of a tool call.
        starts_inside: Whether the output begins inside the reasoning, even without a marker, unless the prompt
            ended it.
        header: The beginning of the message after the reasoning, for models that write reasoning as a message of its
            own; else "".
        template_markers: Tuples of strings. A chat template that contains all strings of one tuple uses this format.
    """

    begin: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    next_starts: tuple[str, ...] = ()
    starts_inside: bool = False
    header: str = ""
    template_markers: tuple[tuple[str, ...], ...] = ()


def begins_inside(form: ReasoningFormat, prompt: str) -> bool | None:
    """Return whether the output begins inside reasoning; None if the reasoning has already ended in the prompt."""
    written = prompt.rstrip()
    if written.endswith(form.end):
        return None
    return form.starts_inside or written.endswith(form.begin)


def ends_within_reasoning(form: ReasoningFormat, message: str) -> bool:
    """Return whether a message that the model is to continue ends inside its reasoning."""
    return max(map(message.rfind, form.begin)) > max(map(message.rfind, form.end))


def reasoning(form: ReasoningFormat, prompt: str, calls: Collection[str] = ()) -> Reader:
    """Return a parser of reasoning up to its end marker or the beginning of a tool call (one of ``calls``)."""
    inside = begins_inside(form, prompt)
    markers = Markers(*form.end, *form.next_starts, *calls)

    def read(scanner: Scanner, pieces: DeltaBuffer) -> Steps[None]:
        if inside is None:
            return
        yield from scanner.space()
        begun = yield from scanner.literal(*form.begin)
        if not begun and not inside:
            return
        space = scanner.pop_trail()
        if inside and not begun:  # the model wrote white space instead of the marker
            pieces.reasoning(space.lstrip())
        yield from scanner.space()
        scanner.drop_trail()
        marker = yield from scanner.read_until(markers, pieces.reasoning, read_marker=False)
        pieces.end_reasoning(complete=bool(marker))
        if marker in form.end:
            yield from scanner.literal(marker)
            yield from scanner.run(_LINE_ENDS)
            scanner.drop_trail()

    return read


def channels(form: CallFormat | None, functions: Functions, ends: Collection[str]) -> Reader:
    """Return a parser of outputs that consist of several messages with headers, as gpt-oss writes them.

    ``form`` is the format of tool calls. If it is None, a message that calls a function is content.
    """
    return lambda scanner, pieces: _Channels(form, functions, ends, scanner, pieces).read()


@dataclass(slots=True)
class _Channels:
    form: CallFormat | None
    functions: Functions
    ends: Collection[str]
    scanner: Scanner
    pieces: DeltaBuffer

    def read(self) -> Steps[None]:
        seen: set[str] = set()
        header = yield from self._first_header()
        while header:
            name = self._function(header)
            if name:
                header = yield from self._read_call(name)
            else:
                kind = self._kind(header)
                sink: Sink = self.pieces.reasoning if kind == "reasoning" else self.pieces.content
                if kind in seen:
                    sink("\n")
                seen.add(kind)
                header = yield from self._read_body(sink)
                if kind == "reasoning":
                    self.pieces.end_reasoning(complete=False)
            header = header or (yield from self._first_header())

    def _first_header(self) -> Steps[str]:
        scanner = self.scanner
        yield from scanner.space()
        marker = yield from scanner.literal(START, CHANNEL, MESSAGE, "to=")
        if marker == MESSAGE:
            return scanner.pop_trail()
        return (yield from self._rest_of_header()) if marker else ""

    def _rest_of_header(self) -> Steps[str]:
        scanner = self.scanner
        while True:
            yield from scanner.run(_HEADER_TEXT)
            marker = yield from scanner.literal(CHANNEL, CONSTRAIN, MESSAGE)
            if marker == MESSAGE:
                return scanner.pop_trail()
            if not marker:
                break
        if not (yield from scanner.peek()):
            written = scanner.pop_trail()
            scanner.add_to_trail("" if _CUT_HEADER.fullmatch(written) else written)
        return ""

    def _function(self, header: str) -> str:
        recipient = _RECIPIENT.search(header)
        if recipient is None or self.form is None:
            return ""
        name = recipient[1].removeprefix("functions.")
        if self.form.arguments == "tags":
            return "" if name in ("self", "user") else name
        return name if name != recipient[1] or name in self.functions else ""

    def _kind(self, header: str) -> str:
        """Return "reasoning" or "content" for a message by its header; messages to built-in tools are reasoning."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in ("self", "user"):
            return "reasoning" if recipient[1] == "self" else "content"
        private = channel is not None and (channel[1] == "analysis" or recipient is not None)
        return "reasoning" if private and (self.form is not None or recipient is None) else "content"

    def _read_call(self, name: str) -> Steps[str]:
        """Read a tool call, and return the header of the next message if it follows immediately."""
        scanner, pieces, form = self.scanner, self.pieces, self.form
        yield from scanner.space()
        if form is not None and form.arguments == "tags":
            if marker := (yield from scanner.literal(*form.section, *form.call)):
                yield from ToolCallParser(form, self.functions, scanner, pieces).read_group(marker)
            pieces.content(scanner.pop_trail())
            return (yield from self._read_body(pieces.content))
        scanner.drop_trail()
        begun = False

        def arguments(text: str) -> None:
            nonlocal begun
            if not begun:
                pieces.call(name)
            begun = True
            pieces.arguments(text)

        if (yield from scanner.peek()) == "{":  # markers in JSON strings are text
            yield from scanner.value(arguments)
        elif (yield from scanner.literal(*self.ends, CALL, RETURN)):
            scanner.drop_trail()
            arguments("{}")
            return ""
        return (yield from self._read_body(arguments))

    def _read_body(self, sink: Sink) -> Steps[str]:
        """Read the text of a message. If its end marker is missing, return the header of the next message."""
        scanner, body_ends = self.scanner, Markers(*self.ends, CALL, RETURN, START, CHANNEL)
        while marker := (yield from scanner.read_until(body_ends, sink)):
            if marker in (START, CHANNEL):
                header = yield from self._rest_of_header()
                if header:
                    return header
            elif marker not in self.ends:
                yield from scanner.space()
                if (yield from scanner.peek_ahead(len(START))) in ("", START):
                    marker = END
            if marker in (END, *self.ends):
                scanner.drop_trail()
                return ""
            sink(scanner.pop_trail())
        return ""
