"""A response: its output as items, its body, and the stream of events that tells of them."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from server.answers.chat import Event, NamedEvents, Runs, is_cut
from server.base.errors import as_api_error
from server.base.settings import ServerSettings
from server.running.generation import Choice, Usage
from server.schema.body import Body
from server.schema.responses import ResponsesBody
from server.tools.messages import Messages, ToolCall

if TYPE_CHECKING:
    from ssd.engine import RequestOutput


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


class ResponseAnswer(NamedEvents):
    """/v1/responses. It has one choice."""

    id_prefix, object_name = "resp_", "response"

    def __init__(self, settings: ServerSettings, asked: Body, **options: Any) -> None:
        """``asked`` : a response repeats it."""
        super().__init__(settings, asked, **options)
        assert isinstance(asked, ResponsesBody)
        self._is_small = asked.is_small
        self._asked = _asked(asked)
        self._items = ResponseItems(self._messages)
        self._number = 0

    @property
    def is_short(self) -> bool:
        """As above, and so is what is repeated."""
        return self._is_small and super().is_short

    def whole(self) -> dict[str, Any]:
        """What the events of a stream come to, but for a cut call."""
        choice = self.generation.choices[0]
        self._items.push("".join(choice.text), self._token_logprobs(choice.logprobs), ended=True)
        if is_cut(choice):
            self._items.leave_out_cut_call()
        self._items.finish(_status_of(choice))
        return self._ended()

    async def beginning(self) -> bytes:
        """The response as it begins, twice: it never waits to be begun."""

        def write() -> bytes:
            response = self._response("in_progress", [])
            kinds = ("response.created", "response.in_progress")
            return self.named([{"type": kind, "response": response} for kind in kinds])

        return await self.written(write)

    def piece(self, _index: int, output: RequestOutput, _usage: Usage | None = None) -> bytes:
        """What the response has said."""
        logprobs = self._token_logprobs(output.logprobs)
        return self.named(self._items.push(output.text, logprobs, ended=output.finish_reason is not None))

    async def closing(self) -> bytes:
        """The end of the last item, and the whole response."""

        def write() -> bytes:
            status = _status_of(self.generation.choices[0])
            events = self._items.finish(status)
            return self.named([*events, {"type": f"response.{status}", "response": self._ended()}])

        return await self.written(write)

    def failed(self, error: Exception) -> bytes:
        """A response that failed, with what it has said."""
        events = self._items.finish("incomplete")
        response, why = self._response("failed", self._items.done), as_api_error(error)
        response["error"] = {"code": "server_error" if why.status >= 500 else "invalid_prompt", "message": str(why)}
        return self.named([*events, {"type": "response.failed", "response": response}])

    def named(self, events: Sequence[Event]) -> bytes:
        """As above; each has its number."""
        numbered = []
        for event in events:
            numbered.append({"type": event["type"], "sequence_number": self._number, **event})
            self._number += 1
        return super().named(numbered)

    def _token_logprobs(self, entries: Any) -> list[dict[str, Any]]:
        """Log-probabilities of some tokens; none where they were not asked for."""
        found: list[dict[str, Any]] = [] if self.logprobs is None else self.logprobs.chat(entries or ())["content"]
        return found

    def _ended(self) -> dict[str, Any]:
        """A response that has come to its end, or to the end of its tokens."""
        status = _status_of(self.generation.choices[0])
        found = self._response(status, self._items.done)
        usage = self.generation.usage
        found["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if status == "incomplete":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            found["completed_at"] = int(time.time())
        return found

    def _response(self, status: Status | Literal["failed"], output: list[dict[str, Any]]) -> dict[str, Any]:
        sampling = self.generation.sampling
        assert sampling is not None  # it was submitted
        return {
            "id": self.id, "object": self.object_name, "created_at": self._common["created"], "status": status,
            "completed_at": None, "error": None, "incomplete_details": None, "model": self._common["model"],
            "output": output, "usage": None, "temperature": sampling.temperature, "top_p": sampling.top_p,
            **self._asked,
        }  # fmt: skip


def _status_of(choice: Choice) -> Status:
    """How a response ended."""
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _asked(body: ResponsesBody) -> dict[str, Any]:
    """What a response says of its request, and of all that this server does not do."""
    form = None if body.text is None or body.text.format is None else body.text.format
    names = ("name", "description", "parameters", "strict")
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{"type": "function", **{name: tool.get(name) for name in names}} for tool in body.tools],
        "top_logprobs": body.top_logprobs,
        "truncation": "disabled",
        "background": False,
        "previous_response_id": None,
        "store": False,
    }
