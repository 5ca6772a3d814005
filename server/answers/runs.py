"""What the text of a message belongs to, in the order it was said."""

from __future__ import annotations

import re
from typing import Literal

from server.tools.messages import Messages, ToolCall

_LITTLE = re.compile(r"[\w ]+|[^\w ]")
"""Words, or one character of another kind."""

Part = Literal["content", "reasoning"] | ToolCall
"""Of a message: what some text belongs to."""


class Runs:
    """Takes the text of a request's only choice apart."""

    def __init__(self, messages: Messages | None) -> None:
        """``messages`` : knows how; None where all of it is content."""
        self._messages = messages

    def push(self, text: str, *, ended: bool) -> list[tuple[Part, str]]:
        """What the text adds to which part, in the order it says so; ``ended`` : it is the last.

        A parser that is given much at once does not tell what came first, so it is given little, and no words together
        with what may be a mark: the runs are the same however the text was cut.
        """
        if self._messages is None:
            return [("content", text)] if text else []
        runs: list[tuple[Part, list[str]]] = []

        def add(part: Part, said: str) -> None:
            if not runs or runs[-1][0] is not part:
                runs.append((part, []))
            runs[-1][1].append(said)

        parts = _LITTLE.findall(text) or [""]
        for number, little in enumerate(parts, 1):
            num_begun = len(self._messages.of(0).tool_calls)
            delta = self._messages.push(0, little, ended=ended and number == len(parts))
            calls = self._messages.of(0).tool_calls
            if delta.reasoning:
                add("reasoning", delta.reasoning)
            for piece in delta.tool_calls:  # the end of one that is known
                if piece.index < num_begun:
                    add(calls[piece.index], piece.arguments)
            if delta.content:
                add("content", delta.content)
            for piece in delta.tool_calls:
                if piece.index >= num_begun:
                    add(calls[piece.index], piece.arguments)
        return [(part, "".join(pieces)) for part, pieces in runs]
