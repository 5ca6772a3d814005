"""Reasoning before the content, between markers: most models that think aloud."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from server.tools.pieces import Pieces, Reader
from server.tools.scanner import Markers, Scanner, Steps

_LINE_ENDS = re.compile(r"[\r\n]+")


@dataclass(frozen=True)
class ReasoningFormat:
    """``begin``, ``end`` : markers around it. ``also_ends`` : markers that end it and belong to what follows.

    ``inside`` : the model begins inside unless the prompt says otherwise, with or without the marker.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    also_ends: tuple[str, ...] = ()
    inside: bool = False


def begins_inside(form: ReasoningFormat, prompt: str) -> bool | None:
    """Whether the model goes on inside the reasoning; None where the prompt has closed it.

    ``prompt`` : its end; templates of several models open or close the reasoning themselves.
    """
    written = prompt.rstrip()
    if written.endswith(form.end):
        return None
    return form.inside or written.endswith(form.begin)


def reasoning(form: ReasoningFormat, prompt: str, calls: Collection[str] = ()) -> Reader:
    """Reads it where there is any; ``prompt`` : the end of what the model continues, which may open or close it.

    ``calls`` : what begins a call, which a model may write without an end of its reasoning.
    """
    inside = begins_inside(form, prompt)
    markers = Markers(*form.end, *form.also_ends, *calls)

    def read(scanner: Scanner, pieces: Pieces) -> Steps[None]:
        if inside is None:
            return
        yield from scanner.space()
        if not (yield from scanner.literal(*form.begin)) and not inside:
            return
        if inside:
            pieces.reasoning(_without_marker(scanner.trail(), form))
        scanner.forget()
        yield from scanner.space()
        scanner.forget()
        marker = yield from scanner.until(markers, pieces.reasoning, read_marker=False)
        pieces.end_reasoning(complete=bool(marker))
        if marker in form.end:
            yield from scanner.literal(marker)
            yield from scanner.run(_LINE_ENDS)
            scanner.forget()

    return read


def _without_marker(text: str, form: ReasoningFormat) -> str:
    """White space that was written before the marker, or instead of it."""
    return "" if text.endswith(form.begin) else text.lstrip()
