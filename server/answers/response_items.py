"""The output of a response: messages, reasoning and function calls as items, and the events that tell of them."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from server.answers.runs import Runs
from server.tools.messages import Messages, ToolCall

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class _Item(ABC):
    """One item while it grows. Pieces are joined once, at its end."""

    prefix: str

    def __init__(self, index: int) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.index = index
        self._pieces: list[str] = []

    def event(self, kind: str, **fields: Any) -> Event:
        """An event about this item."""
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}

    def added(self) -> list[Event]:
        """How the item begins."""
        return [{"type": "response.output_item.added", "output_index": self.index, "item": self.body("in_progress")}]

    def done(self, status: Status) -> list[Event]:
        """How it ends."""
        return [{"type": "response.output_item.done", "output_index": self.index, "item": self.body(status)}]

    @abstractmethod
    def body(self, status: Status) -> dict[str, Any]:
        """The item; without content while it is in progress."""


class _Text(_Item):
    """An item with one part of text."""

    kind: str

    def added(self) -> list[Event]:
        """As above, and its part."""
        return [*super().added(), self.event("content_part.added", content_index=0, part=self.part(""))]

    def delta(self, text: str) -> Event:
        """More text."""
        self._pieces.append(text)
        return self.event(f"{self.kind}.delta", content_index=0, delta=text)

    def done(self, status: Status) -> list[Event]:
        """As above, and its part."""
        text = self.text
        return [
            self.event(f"{self.kind}.done", content_index=0, text=text),
            self.event("content_part.done", content_index=0, part=self.part(text)),
            *super().done(status),
        ]

    @property
    def text(self) -> str:
        """All of it. O(pieces)."""
        return "".join(self._pieces)

    @abstractmethod
    def part(self, text: str) -> dict[str, Any]:
        """The part of the item."""


class _Message(_Text):
    prefix, kind = "msg", "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.logprobs: list[dict[str, Any]] = []

    def said(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Event:
        """More text, and the log-probabilities of its tokens."""
        self.logprobs += logprobs
        return {**self.delta(text), "logprobs": list(logprobs)}

    def done(self, status: Status) -> list[Event]:
        """As above."""
        text, *others = super().done(status)
        return [{**text, "logprobs": self.logprobs}, *others]

    def part(self, text: str) -> dict[str, Any]:
        """Text without annotations."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}

    def body(self, status: Status) -> dict[str, Any]:
        """A message."""
        content = [] if status == "in_progress" else [self.part(self.text)]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


class _Reasoning(_Text):
    prefix, kind = "rs", "reasoning_text"

    def part(self, text: str) -> dict[str, Any]:
        """Plain reasoning."""
        return {"type": "reasoning_text", "text": text}

    def body(self, status: Status) -> dict[str, Any]:
        """Reasoning that is shown whole, so that it needs no summary, and nothing encrypted to be sent back."""
        content = [] if status == "in_progress" else [self.part(self.text)]
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}


class _Call(_Item):
    prefix = "fc"

    def __init__(self, index: int, call: ToolCall) -> None:
        super().__init__(index)
        self.call = call

    def delta(self, arguments: str) -> Event:
        """More of its arguments."""
        self._pieces.append(arguments)
        return self.event("function_call_arguments.delta", delta=arguments)

    def done(self, status: Status) -> list[Event]:
        """As above, and its arguments."""
        arguments = "".join(self._pieces)
        ended = self.event("function_call_arguments.done", arguments=arguments, name=self.call.name)
        return [ended, *super().done(status)]

    def body(self, status: Status) -> dict[str, Any]:
        """A function call."""
        return {
            "id": self.id, "type": "function_call", "call_id": self.call.id, "name": self.call.name,
            "arguments": "" if status == "in_progress" else "".join(self._pieces), "status": status,
        }  # fmt: skip


class ResponseItems:
    """Puts a message together as items, one after the other, from its text."""

    def __init__(self, messages: Messages | None) -> None:
        """``messages`` : takes the text apart; None where all of it is content."""
        self.done: list[dict[str, Any]] = []
        """The items that have ended."""
        self._runs = Runs(messages)
        self._open: _Item | None = None
        self._logprobs: list[dict[str, Any]] = []

    def push(self, text: str, logprobs: Sequence[dict[str, Any]], *, ended: bool) -> list[Event]:
        """The events of the next text; ``ended`` : it is the last.

        ``logprobs`` : of the tokens that ended in this text. Those of text that is held back go out with it where it
        becomes content; those of reasoning and calls have no place.
        """
        events: list[Event] = []
        self._logprobs += logprobs
        for part, said in self._runs.push(text, ended=ended):
            if part == "content":
                events += self._say(said)
                continue
            self._logprobs.clear()
            events += self._reason(said) if part == "reasoning" else self._call(part, said)
        if self._logprobs and isinstance(self._open, _Message):
            events += self._say("")
        return events

    def leave_out_cut_call(self) -> None:
        """The last item is left out where it is a call whose arguments are no JSON."""
        if isinstance(self._open, _Call) and not self._open.call.is_json:
            self._open = None

    def finish(self, status: Status) -> list[Event]:
        """The events that end the last item, which is an empty message where nothing was said."""
        events: list[Event] = []
        if self._open is None and not self.done:
            events += self._say("")
        return events + self._end(status)

    def _reason(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._open, _Reasoning):
            events += self._begin(_Reasoning(self._next_index))
        assert isinstance(self._open, _Reasoning)
        return [*events, self._open.delta(text)]

    def _say(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._open, _Message):
            events += self._begin(_Message(self._next_index))
        assert isinstance(self._open, _Message)
        logprobs, self._logprobs = self._logprobs, []
        return [*events, self._open.said(text, logprobs)]

    def _call(self, call: ToolCall, arguments: str) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._open, _Call) or self._open.call is not call:
            events += self._begin(_Call(self._next_index, call))
        assert isinstance(self._open, _Call)
        return [*events, self._open.delta(arguments)] if arguments else events

    def _begin(self, item: _Item) -> list[Event]:
        events = self._end("completed")
        self._open = item
        return events + item.added()

    def _end(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        events = self._open.done(status)
        self.done.append(events[-1]["item"])
        self._open = None
        return events

    @property
    def _next_index(self) -> int:
        return len(self.done) + (self._open is not None)
