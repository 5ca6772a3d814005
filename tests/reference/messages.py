"""Slow twin of a parser of messages: <think> and <tool_call> taken out of a whole text, one character after another."""

from __future__ import annotations

import json
import re

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes:
    """``content``, ``reasoning`` and ``calls``, each a name and its arguments, of a whole text."""

    def __init__(self, text: str) -> None:
        found = re.match(r"\s*<think>\s*+(.*?)(?:\n*</think>[\r\n]*|\n*(?=\n<tool_call>\n)|\Z)", text, re.DOTALL)
        self.reasoning = found[1] if found else ""
        self.calls: list[tuple[str, str]] = []
        self._text = text
        self._at = self._unclaimed = found.end() if found else 0
        self._items: list[str | None] = []  # texts, and None for each call
        while (begin := text.find(BEGIN, self._at)) >= 0:
            self._claim_text(begin)
            self._at = self._space(begin + len(BEGIN))
            num_items, within_line = len(self._items), self._is_within_line()
            self._objects()
            begun = None in self._items[num_items:]
            if self._at == len(text) and (begun or not within_line):  # the beginning of a call is nothing
                self._unclaimed = self._at
            elif begun:
                self._claim_text(self._at)
                while self._end():
                    self._unclaimed = self._at
                if END.startswith(text[self._at :]):  # or what it is
                    self._unclaimed = self._at = len(text)
            self._claim_text(self._at)
        self._claim_text(len(text))
        self.content = _joined(self._items)

    def _claim_text(self, end: int) -> None:
        """What belongs to nobody up to here is content."""
        self._items.append(self._text[self._unclaimed : end])
        self._unclaimed = end

    def _is_within_line(self) -> bool:
        """Whether there is text since the last call, and no line end behind it."""
        texts = "".join("\0" if item is None else item for item in self._items).split("\0")
        return bool(texts[-1].strip()) and "\n" not in texts[-1][len(texts[-1].rstrip()) :]

    def _space(self, at: int) -> int:
        while self._text[at : at + 1] in (" ", "\t", "\r", "\n"):
            at += 1
        return at

    def _next(self, *options: str) -> bool:
        """Whether one of these comes after white space, which is read, and it too."""
        self._at = self._space(self._at)
        for option in options:
            if self._text.startswith(option, self._at):
                self._at += len(option)
                return True
        return False

    def _end(self) -> bool:
        """The same of ``END``, and of brackets too many before it."""
        while self._next("}", "]"):
            pass
        return self._next(END)

    def _objects(self) -> None:
        """A list of calls or several."""
        in_list = self._next("[")
        while self._object():
            if in_list and not self._next(","):
                if self._next("]"):
                    self._unclaimed = self._at
                return
            if not in_list and not self._next(";", ",") and self._text[self._at : self._at + 1] != "{":
                return

    def _object(self) -> bool:
        if not self._next("{"):
            return False
        name: str | None = None
        arguments: str | None = None
        begun = False
        while True:
            self._at = self._space(self._at)
            key = self._string()
            if key is None or not self._next(":"):
                return False
            self._at = begin = self._space(self._at)
            if key == "name" and name is None:
                name = self._string()
                if not name:
                    return False
            elif key in ("arguments", "parameters") and arguments is None:
                if self._text.startswith("{", begin):
                    if name is not None:  # from here on it is a call, whatever comes
                        self._items.append(None)
                        begun = True
                    complete = self._value()
                    arguments = _as_json(self._text[begin : self._at])
                    if begun:
                        assert name is not None
                        self.calls.append((name, arguments))
                        self._unclaimed = self._at
                elif self._text.startswith('"', begin):
                    arguments = self._string()
                    complete = _is_object(arguments)
                else:
                    complete = self._next("null")
                    arguments = "{}"
                if not complete:
                    return False
            elif not self._value():
                return False
            if name is not None and arguments is not None and not begun:
                self._items.append(None)
                self.calls.append((name, arguments))
                begun = True
                self._unclaimed = self._at
            if not self._next(","):
                break
        if name is None or not self._next("}"):
            return False
        if not begun:
            self._items.append(None)
            self.calls.append((name, "{}"))
        self._unclaimed = self._at
        return True

    def _string(self) -> str | None:
        begin = self._at
        if not self._text.startswith('"', begin) or not self._value():
            return None
        try:
            decoded = json.loads(self._text[begin : self._at], strict=False)
            decoded.encode()
        except ValueError:
            return None
        return str(decoded)

    def _value(self) -> bool:
        """A JSON value, brackets and strings only; whether it is complete."""
        if self._text[self._at : self._at + 1] not in ('"', "{", "["):
            found = re.compile(r'[^\s,:"{}\[\]]*').match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            return bool(found[0])
        open_marks, in_string, escaped = "", False, False
        while self._at < len(self._text):
            mark = self._text[self._at]
            if in_string:
                in_string = escaped or mark != '"'
                escaped = not escaped and mark == "\\"
            elif mark in "}]":
                if open_marks[-1] + mark not in ("{}", "[]"):
                    return False
                open_marks = open_marks[:-1]
            elif mark in "{[":
                open_marks += mark
            elif re.match(r'["\s,:\w.+-]', mark):
                in_string = mark == '"'
            else:
                return False
            self._at += 1
            if not open_marks and not in_string:
                return True
        return False


def _as_json(written: str) -> str:
    """The value with the control characters of its strings escaped, and each backslash that escapes nothing.

    Constants are JSON's, what is no number of it is a string, and no comma goes before a bracket.
    """
    found, in_string, escaped = "", False, False
    for place, mark in enumerate(written):
        is_control = in_string and mark < " "
        after = written[place + 1 : place + 2]
        is_code = re.fullmatch("u[0-9a-fA-F]{4}", written[place + 1 : place + 6]) is not None
        if in_string and mark == "\\" and not escaped and after and after not in '"\\/bfnrt' and not is_code:
            found += "\\"
        found += json.dumps(mark)[1:-1] if is_control else mark
        if in_string:
            in_string = escaped or mark != '"'
            escaped = not escaped and mark == "\\"
        else:
            in_string = mark == '"'
    others = r'"(?:[^"\\]|\\.)*(?:"|\Z)|,(?=[ \t\r\n]*[]}])|[\w.+-]+'
    return re.sub(others, lambda match: _repaired(match[0]), found, flags=re.DOTALL)


def _repaired(part: str) -> str:
    try:
        is_beyond = not abs(float(part)) < float("inf") and re.search(r"[^-\d]", part)
    except ValueError:
        return {",": "", "True": "true", "False": "false", "None": "null"}.get(part, part)
    return f'"{part}"' if is_beyond else part


def _is_object(text: str | None) -> bool:
    try:
        return isinstance(json.loads(text or ""), dict)
    except ValueError:
        return False


def _joined(items: list[str | None]) -> str:
    """All texts, without white space before a call, and after one where that begins or ends the content."""
    content = held = ""
    after_call = False
    for item in items:
        if item is None:
            held, after_call = "", True
            continue
        text = held + item
        visible = text.rstrip()
        held = text[len(visible) :]
        if visible:
            content += visible.lstrip() if after_call and not content else visible
            after_call = False
    return content if after_call else content + held
