"""Incremental parsers of tool calls, configured by the tables of formats."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from server.tools.message_parser import DeltaBuffer
from server.tools.scanner import Markers, Scanner, Steps
from server.tools.values import (
    GEMMA,
    PYTHON,
    Dialect,
    Functions,
    Plain,
    is_json,
    json_string,
    read_gemma_key,
    read_literal,
    read_python_key,
    types_of,
)

_NAME = re.compile(r"[\w.:/-]+")
_TAG_NAME = re.compile(r"""[^\s<>"'{}\[\]]+""")
_GEMMA_NAME = re.compile(r"[^\s{}<>,]+")
_NUMBER = re.compile(r":\d+$")
_CLOSING = re.compile(r"[ \t\r\n}\]]*")
"""Matches text between a tool call and its end marker, in which models sometimes write an extra bracket."""
_TO_LINE_END = re.compile(r"[^<>\n]+")
_KEY_OF_XML = re.compile(r"[^<]+")
_ATTRIBUTE = r"""\s++\w++=(?:"[^"]*+"|'[^']*+')"""
_ATTRIBUTES = re.compile(rf"""(?:{_ATTRIBUTE})*+(?:\s++\w*+(?:=(?:["'][^"']*+)?+)?+)?+\s*+/?""")
"""Matches the attributes of a tag, even if the last one is truncated. Possessive quantifiers prevent backtracking."""
_KEY = re.compile(rf"""\s*(?:"(?P<quoted>[^"]*)"|["']?(?P<bare>[^"'\s]+)["']?)(?P<rest>(?:{_ATTRIBUTE})*)\s*""")
_TYPE = re.compile(r"""\s(string|type)=["']([^"']*)""")
_IS_TOKEN = re.compile(r"[|｜]|^\[")
"""Matches tool call markers that never occur in ordinary text."""
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")

CALL_ID = "[CALL_ID]"
"""In Mistral's format, the marker before the id that the model gives a tool call. The parser skips this id, and clients
get an id made by the server.
"""

Sequence = tuple[tuple[str, ...], ...]
"""A sequence of texts that must follow each other, with optional white space in between.

Each text is a tuple of alternatives; the alternative "" makes it optional.
"""


@dataclass(frozen=True, kw_only=True)
class CallTemplate:
    """The template of a message with tool calls, with which earlier tool calls are written into the prompt.

    The grammar that forces a tool call is made from the same template. If two texts of the template are possible at the
    same position, neither may begin with the other, because the lexer of grammars never backtracks.

    Attributes:
        call: A tool call, with the placeholders NAME, ARGUMENTS and NUMBER.
        before: The text before the first call.
        between: The text between two calls.
        after: The text after the last call.
        parameter: In formats with tags, the text before a parameter's value, with the placeholder KEY.
        value_end: In formats with tags, the text after a parameter's value.
        call_end: In formats with tags, the text after the last parameter.
    """

    call: str
    before: str = ""
    between: str = "\n"
    after: str = ""
    allows_several_calls: bool = True
    parameter: str = ""
    value_end: str = ""
    call_end: str = ""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a model writes tool calls, for the parser.

    Attributes:
        template_markers: Tuples of strings. A chat template that contains all strings of one tuple uses this format. If
            None, the template must contain the first marker of ``section`` or ``call``.
        arguments: The syntax after the marker that begins a call. "object": an object with name and arguments, or a
            list of such objects; "json": the name and a JSON object; "tags": the name and tagged values; "python":
            calls in Python syntax; "gemma": the name and Gemma's literals; "keyed": an object that maps the name to the
            arguments, or a list of such objects.
        message_ends: For models that write a tool call as a message whose header names the function, the markers that
            end a message.
        section: The markers that begin a list of calls.
        ends_content: Whether text after ``section`` is never content.
        call: The markers that begin a call.
        bare_starts: The first characters of messages that begin with a call without a marker.
        head: The literals between the marker and the name.
        after_name: The literals between the name and the arguments.
        end: The markers that end a call. They are optional, because models often omit them.
        ignored_markers: Markers that have no meaning and are removed from the text.
        space_is_text: Whether white space before a call belongs to the content.
        content_name: In formats whose prompts end with the marker that begins a call, the function name that the model
            writes if content follows instead.
        key: The text before the name of a parameter. It is used only in formats with tags, like the attributes from
            ``after_key`` to ``escapes_names``.
        after_key: The texts after the name of a parameter.
        value_end: The tag after a value.
        call_end: The tag after the last parameter.
        has_line_values: Whether values stand on lines of their own, whose line ends do not belong to the value.
        value_end_before_tag: Whether ``value_end`` counts only if another tag follows.
        escapes_names: Whether names of parameters are escaped as in XML.
        special_markers: Markers that are special tokens of some tokenizers and must stay in the decoded text.
        template: The template of this format for prompts and grammars. None: no grammar can force its tool calls.
    """

    template_markers: tuple[tuple[str, ...], ...] | None = None
    arguments: Literal["object", "json", "tags", "python", "gemma", "keyed"] = "object"
    message_ends: tuple[str, ...] = ()
    section: tuple[str, ...] = ()
    ends_content: bool = False
    call: tuple[str, ...] = ()
    bare_starts: tuple[str, ...] = ()
    head: Sequence = ()
    after_name: Sequence = ()
    end: tuple[str, ...] = ()
    ignored_markers: tuple[str, ...] = ()
    space_is_text: bool = False
    content_name: str = ""
    key: str = ""
    after_key: tuple[str, ...] = ()
    value_end: str = ""
    call_end: str = ""
    has_line_values: bool = False
    value_end_before_tag: bool = False
    escapes_names: bool = False
    special_markers: tuple[str, ...] = ()
    template: CallTemplate | None = None

    @property
    def required_markers(self) -> tuple[tuple[str, ...], ...]:
        return ((self.section or self.call)[:1],) if self.template_markers is None else self.template_markers

    @cached_property
    def starts(self) -> Markers:
        return Markers(*self.section, *self.call, *self.ignored_markers)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        return (*self.end, *filter(None, (self.value_end, self.call_end)))

    @cached_property
    def stops(self) -> Markers:
        return Markers(*self.call, *self.end)

    @cached_property
    def value_ends(self) -> Markers:
        """The texts that end a parameter's value: the closing tag or, if the model forgot it, the tags that follow."""
        if self.value_end_before_tag:
            return Markers(*(self.value_end + tag for tag in (self.key, self.call_end)))
        if self.has_line_values:
            return Markers(f"\n{self.value_end}", self.value_end)
        forgotten = [f"{self.call_end}{between}{call}" for between in ("", "\n") for call in self.call]
        return Markers(self.value_end, *(forgotten if not self.section else ()))

    @cached_property
    def line_ends(self) -> Markers:
        """The texts that end the value of a parameter if the value begins on a new line.

        A tag in the middle of a line belongs to the value, unless it is the closing tag and another tag follows.
        """
        following = [between + tag for between in ("", "\n") for tag in (self.key, self.call_end)]
        return Markers(
            f"\n{self.value_end}", *(self.value_end + tag for tag in following), f"\n{self.key}", f"\n{self.call_end}"
        )

    @cached_property
    def in_reasoning(self) -> tuple[str, ...]:
        """The texts that begin a tool call, on a line of its own, inside reasoning that the model forgot to end."""
        if self.arguments not in ("object", "tags"):
            return ()
        after = "" if self.arguments == "tags" and not self.section else "\n"
        return tuple(f"\n{begin}{after}" for begin in self.section or self.call if begin.startswith("<"))


class ToolCallParser:
    """Parses the tool calls of one message incrementally.

    A call is reported as soon as its name and the beginning of its arguments are known, because until then it may still
    turn out to be ordinary text. In formats without markers only calls of ``functions`` are recognized. For values
    without quotes, the schemas of ``functions`` determine the types.
    """

    def __init__(self, form: CallFormat, functions: Functions, scanner: Scanner, pieces: DeltaBuffer) -> None:
        self._form, self._functions, self._scanner, self._pieces = form, functions, scanner, pieces
        self._accepts: Callable[[str], bool] = (
            functions.__contains__ if functions and (form.bare_starts or form.content_name) else bool
        )
        self._read_object = partial(self._read_list, self._read_one_object, (";", ","), "")
        self._read_keyed = partial(self._read_list, self._read_one_keyed, (",",), "")
        self._read_python = partial(self._read_list, self._python_call, (",",), "<")
        self._read_one: Callable[[], Steps[None]] = getattr(self, f"_read_{form.arguments}")

    def read(self) -> Steps[None]:
        form, scanner, pieces = self._form, self._scanner, self._pieces
        if form.bare_starts:
            yield from self._read_bare()
        elif form.content_name and (yield from scanner.literal(f"{form.content_name}\n")):
            scanner.drop_trail()
        elif form.content_name:
            yield from self.read_group(form.call[0])
            pieces.content(scanner.pop_trail())
        while form.call and (marker := (yield from scanner.read_until(form.starts, pieces.content))):
            yield from self.read_group(marker)
            pieces.content(scanner.pop_trail())

    def _read_bare(self) -> Steps[None]:
        yield from self._scanner.space()
        if (yield from self._scanner.peek()) in self._form.bare_starts:
            yield from self.read_group("")
        self._pieces.content(self._scanner.pop_trail())

    def read_group(self, marker: str) -> Steps[None]:
        """Read the tool calls after ``marker``. Text that is not a call stays in the scanner's trail for the caller."""
        form, scanner, pieces = self._form, self._scanner, self._pieces
        if marker in form.ignored_markers:
            scanner.drop_trail()
            if form.bare_starts:
                yield from self._read_bare()
            return
        num_calls = pieces.num_calls
        is_prose = not marker or (pieces.is_within_line and not _IS_TOKEN.search(marker))
        yield from scanner.space()
        if marker not in form.section or (yield from scanner.literal(*form.call)) or (yield from self._skip(marker)):
            yield from scanner.space()
            yield from self._read_one()
        has_begun = pieces.num_calls > num_calls
        if (has_begun or not is_prose) and not (yield from scanner.peek()):
            scanner.drop_trail()  # the output was truncated at the beginning of a call
        if has_begun:
            pieces.content(scanner.pop_trail())
            yield from scanner.run(_CLOSING)
            while form.ends and (yield from scanner.literal(*form.ends)):
                scanner.drop_trail()
                yield from scanner.run(_CLOSING)
            if not (yield from scanner.peek()):
                scanner.drop_trail()

    def _skip(self, marker: str) -> Steps[bool]:
        scanner, form = self._scanner, self._form
        if not form.ends_content:
            return False
        stop = yield from scanner.read_until(form.stops, scanner.add_to_trail)
        skipped = scanner.pop_trail()
        if not stop and skipped.strip() != marker:
            self._pieces.content(skipped)
        return stop in form.call

    def _begin_call(self, name: str) -> None:
        self._scanner.drop_trail()
        self._pieces.call(name, space_is_text=self._form.space_is_text)

    def _argument(self, name: str, key: str, *, first: bool) -> None:
        if first:
            self._begin_call(name)
        self._scanner.drop_trail()
        self._pieces.arguments(f"{'{' if first else ', '}{json_string(key)}: ")

    def _end_call(self, name: str, *, first: bool) -> None:
        if first:
            self._begin_call(name)
        self._scanner.drop_trail()
        self._pieces.arguments("{}" if first else "}")

    def _literals(self, sequence: Sequence) -> Steps[bool]:
        scanner = self._scanner
        for options in sequence:
            yield from scanner.space()
            literal = yield from scanner.literal(*options)
            if not literal and "" not in options:
                return False
            if literal == CALL_ID:
                yield from scanner.space()
                yield from scanner.read_word(_NAME)
        return True

    def _read_list(self, read_one: Callable[[], Steps[bool]], between: tuple[str, ...], ends: str) -> Steps[None]:
        """Read tool calls in square brackets, or tool calls that are separated by one of the strings ``between``."""
        scanner = self._scanner
        in_list = bool((yield from scanner.literal("[")))
        while True:
            yield from scanner.space()
            if not (yield from read_one()):
                return
            yield from scanner.space()
            if (yield from scanner.literal(*((",",) if in_list else between))):
                continue
            following = yield from scanner.peek()
            if in_list or not following or following in ends:
                break
        if in_list and (yield from scanner.literal("]")):
            scanner.drop_trail()

    def _read_one_object(self) -> Steps[bool]:
        """Read a tool call as a JSON object with name and arguments in either order; return whether it is complete."""
        scanner = self._scanner
        if not (yield from scanner.literal("{")):
            return False
        name: str | None = None
        held: str | None = None  # arguments that came before the name
        begun = False
        while True:
            yield from scanner.space()
            key = yield from scanner.string()
            yield from scanner.space()
            if key is None or not (yield from scanner.literal(":")):
                return False
            yield from scanner.space()
            if key in _NAMES and name is None:
                name = yield from scanner.string()
                if not name or not self._accepts(name):
                    return False
            elif key in _ARGUMENTS and held is None and not begun:
                if name is not None and (yield from scanner.peek()) == "{":
                    begun = True
                    self._begin_call(name)
                    if not (yield from scanner.value(self._pieces.arguments)):
                        return False
                else:
                    held = yield from self._read_arguments_object()
                    if held is None:
                        return False
            elif not (yield from scanner.value()):
                return False
            if name is not None and held is not None and not begun:
                begun = True
                self._begin_call(name)
                self._pieces.arguments(held)
            yield from scanner.space()
            if not (yield from scanner.literal(",")):
                break
        if name is None or not (yield from scanner.literal("}")):
            return False
        if begun:
            scanner.drop_trail()
        else:
            self._end_call(name, first=True)
        return True

    def _read_one_keyed(self) -> Steps[bool]:
        """Read a tool call as a JSON object that maps the name to the arguments; return whether it is complete."""
        scanner = self._scanner
        if not (yield from scanner.literal("{")):
            return False
        yield from scanner.space()
        name = yield from scanner.string()
        yield from scanner.space()
        if not name or not self._accepts(name) or not (yield from scanner.literal(":")):
            return False
        yield from scanner.space()
        if (yield from scanner.peek()) != "{":
            return False
        self._begin_call(name)
        if not (yield from scanner.value(self._pieces.arguments)):
            return False
        yield from scanner.space()
        if not (yield from scanner.literal("}")):
            return False
        scanner.drop_trail()
        return True

    def _read_arguments_object(self) -> Steps[str | None]:
        """Read the arguments of a tool call and return them as a JSON object; None if they are not an object.

        A string that contains an object is accepted too, and null becomes "{}".
        """
        scanner = self._scanner
        if (yield from scanner.literal("null")):
            return "{}"
        if (yield from scanner.peek()) == '"':
            text = yield from scanner.string()
            return text if text and is_json(text) and text.lstrip()[0] == "{" else None
        if (yield from scanner.peek()) != "{":
            return None
        pieces: list[str] = []
        complete = yield from scanner.value(pieces.append, in_trail=True)
        return "".join(pieces) if complete else None

    def _read_json(self) -> Steps[None]:
        scanner = self._scanner
        if not (self._form.section or self._form.content_name) and (yield from scanner.peek()) in (
            "{",
            "[",
        ):  # older models of Mistral
            yield from self._read_object()
        elif (yield from self._literals(self._form.head)):
            name = yield from scanner.read_word(_NAME)
            if name not in self._functions:  # Kimi numbers its calls
                name = _NUMBER.sub("", name)
            if name and self._accepts(name) and (yield from self._literals(self._form.after_name)):
                yield from scanner.space()
                if (yield from scanner.peek()) == "{":
                    self._begin_call(name)
                    yield from scanner.value(self._pieces.arguments)

    def _read_gemma(self) -> Steps[None]:
        scanner = self._scanner
        if (yield from self._literals(self._form.head)):
            name = yield from scanner.read_word(_GEMMA_NAME)
            if name and self._accepts(name) and (yield from scanner.literal("{")):
                yield from self._read_named_arguments(name, "}", read_gemma_key, GEMMA)

    def _read_named_arguments(
        self, name: str, close: str, read_key: Callable[[Scanner], Steps[str | None]], dialect: Dialect
    ) -> Steps[bool]:
        """Read named arguments of a tool call up to the closing bracket ``close``; return whether they are complete."""
        scanner, first = self._scanner, True
        yield from scanner.space()
        while not (yield from scanner.literal(close)):
            key = yield from read_key(scanner)
            if key is None or not (yield from scanner.peek()):
                return False
            self._argument(name, key, first=first)
            first = False
            if not (yield from read_literal(scanner, self._pieces.arguments, dialect)):
                return False
            yield from scanner.space()
            if not (yield from scanner.literal(",")) and (yield from scanner.peek()) != close:
                return False
            yield from scanner.space()
        self._end_call(name, first=first)
        return True

    def _python_call(self) -> Steps[bool]:
        scanner = self._scanner
        name = yield from scanner.read_word(_NAME)
        if not name or not self._accepts(name):
            return False
        yield from scanner.space()
        return bool((yield from scanner.literal("("))) and (
            yield from self._read_named_arguments(name, ")", read_python_key, PYTHON)
        )

    def _read_tags(self) -> Steps[None]:
        scanner, form = self._scanner, self._form
        yield from scanner.literal('"', "'")
        name = yield from scanner.read_word(_TAG_NAME)
        yield from scanner.literal('"', "'")
        attributes = yield from scanner.read_word(_TO_LINE_END)
        if not name or not self._accepts(name):
            return
        if not _ATTRIBUTES.fullmatch(attributes):
            self._pieces.content(scanner.pop_trail())
            return
        if not (yield from self._literals(form.after_name)):
            return
        yield from scanner.space()
        if not form.after_name and (yield from scanner.peek()) != "<":
            return
        first = True
        if not attributes.endswith("/"):
            while tag := (yield from scanner.literal(form.key, form.call_end)):
                if tag == form.call_end:
                    break
                if not (yield from self._parameter(name, first=first)):
                    return
                first = False
                yield from scanner.space()
            else:
                return
        self._end_call(name, first=first)

    def _parameter(self, name: str, *, first: bool) -> Steps[bool]:
        scanner, form = self._scanner, self._form
        written = yield from scanner.read_word(_KEY_OF_XML if form.escapes_names else _TO_LINE_END)
        match = _KEY.fullmatch(written)
        if match is None or not (yield from self._literals(tuple((literal,) for literal in form.after_key))):
            return False
        on_lines = form.has_line_values and bool((yield from scanner.literal("\n")))
        if not (yield from scanner.peek()):
            return False
        key = match["bare"] if match["quoted"] is None else match["quoted"]
        key = html.unescape(key) if form.escapes_names else key
        self._argument(name, key, first=first)
        types = types_of(self._functions, name, key)
        if (told := _TYPE.search(match["rest"])) and told[1] == "type":
            types = frozenset({told[2]})
        elif told:
            types = frozenset({"string"}) if told[2] == "true" else types - {"string"}
        value = Plain(self._pieces.arguments, types)
        ends = form.line_ends if on_lines else form.value_ends
        last = form.call_end if not form.section and not form.value_end_before_tag else ""
        complete = bool((yield from scanner.read_until(ends, value.add, read_marker=False, last=last)))
        value.end(complete=complete)
        yield from scanner.literal(f"\n{form.value_end}", form.value_end)
        scanner.drop_trail()
        return complete
