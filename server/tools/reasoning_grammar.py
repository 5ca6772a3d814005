"""What a model may think before a text that a grammar constrains."""

from __future__ import annotations

import json
from collections.abc import Mapping

from server.tools.formats import REASONING_FORMATS
from server.tools.harmony import CHANNEL, END, MESSAGE, START
from server.tools.reasoning import begins_inside

_ANYTHING = "/(?s:.*)/"


def reasoning_rule(name: str | None, prompt: str, added: Mapping[str, int]) -> str | None:
    """Lark rules for llguidance, of which ``reasoning`` is all that may come before; None where nothing does.

    ``name`` : of the reasoning's format. ``prompt`` : the end of what the model continues, which may have opened or
    closed it. ``added`` : the tokens added beside the vocabulary and their ids, which a grammar's texts never
    spell, be they special or not.
    """
    if name is None:
        return None
    form = REASONING_FORMATS[name].form
    if form is None:  # harmony: a message on a channel of its own, and the header of the next one
        begin = " ".join(_marker(part, added) for part in (CHANNEL, "analysis", MESSAGE))
        after = " ".join(_marker(part, added) for part in (START, "assistant"))
        return f"reasoning: ({begin} thought {after})?\n{_thought(END, added)}"
    inside = begins_inside(form, prompt)
    if inside is None:
        return None
    opening = " | ".join(_marker(begin, added) for begin in form.begin)
    rules = f"{_thought(form.end[0], added)}SPACE: /[ \\n]{{1,4}}/\n"
    if prompt.rstrip().endswith(form.begin):
        return f"reasoning: thought SPACE?\n{rules}"
    if inside:
        return f"reasoning: ({opening})? thought SPACE?\n{rules}"
    return f"reasoning: (({opening}) thought SPACE?)?\n{rules}"


def _thought(end: str, added: Mapping[str, int]) -> str:
    """The rule ``thought``: any text up to ``end``."""
    if end in added:
        return f"thought: {_ANYTHING} {_marker(end, added)}\n"
    return f"thought[suffix={json.dumps(end)}]: {_ANYTHING}\n"


def _marker(text: str, added: Mapping[str, int]) -> str:
    return f"<[{added[text]}]>" if text in added else json.dumps(text)
