"""The sections that Kimi K3 writes: a response, and calls whose arguments say their types."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from server.tools.functions import json_string
from server.tools.json_calls import Accepts
from server.tools.pieces import Pieces, Reader
from server.tools.scanner import Markers, Scanner, Steps
from server.tools.xml_calls import value_of

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
_CALL, _ARGUMENT = f"{OPEN}call ", f"{OPEN}argument "
_CALL_END, _ARGUMENT_END = f"{CLOSE}call{SEP}", f"{CLOSE}argument{SEP}"
_SECTIONS = Markers(
    *(f"{mark}{name}{SEP}" for mark in (OPEN, CLOSE) for name in ("response", "tools")), f"{CLOSE}message{SEP}", _CALL
)
_VALUE_ENDS = Markers(*(_ARGUMENT_END + following for following in (_ARGUMENT, _CALL_END)))
"""A value may speak of the marker that ends it."""
_HEADER = re.compile(r"[^<]+")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class KimiK3Format:
    """There is one."""


def kimi_k3(accepts: Accepts) -> Reader:
    """Reads a message: its response and its calls."""

    def read(scanner: Scanner, pieces: Pieces) -> Steps[None]:
        while marker := (yield from scanner.until(_SECTIONS, pieces.content)):
            if marker == _CALL and not (yield from _read_call(scanner, pieces, accepts)):
                pieces.content(scanner.trail())
            scanner.forget()

    return read


def _attributes(scanner: Scanner) -> Steps[dict[str, str]]:
    """Up to the end of a header; none where that is not there."""
    written = yield from scanner.word(_HEADER)
    if not (yield from scanner.literal(SEP)):
        return {}
    return {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(written)}


def _read_call(scanner: Scanner, pieces: Pieces, accepts: Accepts) -> Steps[bool]:
    name = (yield from _attributes(scanner)).get("tool", "")
    if not name or not accepts(name):
        return False
    pieces.call(name)
    scanner.forget()
    before = "{"
    while (yield from scanner.literal(_ARGUMENT)):
        header = yield from _attributes(scanner)
        if "key" not in header:
            return False
        scanner.forget()
        pieces.arguments(f"{before}{json_string(header['key'])}: ")
        before, value = ", ", value_of(pieces, frozenset({header.get("type", "")}))
        complete = bool((yield from scanner.until(_VALUE_ENDS, value.add, read_marker=False)))
        value.end(complete=complete)
        if not complete:
            return True
        yield from scanner.literal(_ARGUMENT_END)
        scanner.forget()
    if (yield from scanner.literal(_CALL_END)):
        pieces.arguments("{}" if before == "{" else "}")
        scanner.forget()
    return True
