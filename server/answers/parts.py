"""Responses that consist of parts with named events, as in Anthropic's Messages API and OpenAI's Responses API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from server.answers.chat import ChatAnswer
from server.answers.wire import encode_events, filler
from server.base.settings import ServerSettings
from server.running.generation import ChoiceState, Usage
from server.schema.body import Body
from server.tools.message_parser import Messages, ToolCall, ToolCallDelta

if TYPE_CHECKING:
    from ssd.engine import RequestOutput

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
PartKind = Literal["content", "reasoning"] | ToolCall
"""The kind of a part of a message: text, reasoning, or a tool call."""


class AnswerPart(ABC):
    """One part of a generated message (text, reasoning or a tool call), serialized in the form of the client's API.

    ``start_events`` returns the stream events that begin the part, ``delta`` the event for new text, and
    ``end_events`` the events that end the part. ``body`` returns the JSON object of the part for a complete response.
    """

    def __init__(self, index: int, kind: PartKind) -> None:
        self.index, self.kind = index, kind
        self.pieces: list[str] = []

    @abstractmethod
    def start_events(self) -> list[Event]: ...

    @abstractmethod
    def delta(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Event: ...

    @abstractmethod
    def end_events(self, body: dict[str, Any]) -> list[Event]: ...

    @abstractmethod
    def body(self, text: str, status: Status) -> dict[str, Any]: ...


class Parts:
    """Divides a generated message into its parts (text, reasoning and tool calls), while the text arrives.

    ``messages`` parses tool calls and reasoning; if it is None, all text is content. ``make_part`` creates each part.
    """

    def __init__(self, messages: Messages | None, make_part: Callable[[int, PartKind], AnswerPart]) -> None:
        self.done: list[dict[str, Any]] = []
        self._messages, self._make_part = messages, make_part
        self._open: AnswerPart | None = None
        self._tokens: deque[tuple[int, dict[str, Any]]] = deque()

    def push(self, text: str, tokens: Sequence[tuple[int, dict[str, Any]]] = (), *, ended: bool) -> list[Event]:
        """Return the events for new text of the message.

        ``tokens`` are the log-probabilities of the new tokens, each with the position in the message's text at which
        the token begins.
        """
        events: list[Event] = []
        if self._messages is None:
            return self._add("content", text, [logprob for _, logprob in tokens]) if text or tokens else []
        self._tokens += tokens
        for delta in self._messages.push(0, text, ended=ended):
            if isinstance(delta, ToolCallDelta):
                events += self._add(self._messages.message(0).tool_calls[delta.index], delta.arguments)
            elif delta.kind == "content":
                self._tokens_before(delta.end - len(delta.text))
                events += self._add(delta.kind, delta.text, self._tokens_before(delta.end))
            else:
                events += self._add(delta.kind, delta.text)
        return events

    def _tokens_before(self, end: int) -> list[dict[str, Any]]:
        found = []
        while self._tokens and self._tokens[0][0] < end:
            found.append(self._tokens.popleft()[1])
        return found

    def leave_out_last(self) -> None:
        self._open = None

    def finish(self, status: Status = "completed") -> list[Event]:
        """Return the events that end the last part of a message. If the message has no part, an empty text is added."""
        begun = self._add("content", "") if self._open is None and not self.done else []
        return begun + self._end(status)

    def _add(self, kind: PartKind, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        events: list[Event] = []
        part = self._open
        if part is None or part.kind is not kind:
            events = self._end("completed")
            part = self._open = self._make_part(len(self.done), kind)
            events += part.start_events()
        if text or logprobs:
            part.pieces.append(text)
            events.append(part.delta(text, logprobs))
        return events

    def _end(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        part, self._open = self._open, None
        self.done.append(part.body("".join(part.pieces), status))
        return part.end_events(self.done[-1])


class PartsAnswer(ChatAnswer):
    """A response with one choice, streamed as named server-sent events without an end mark (``[DONE]``)."""

    end = b""
    make_part: Callable[[int, PartKind], AnswerPart]

    def __init__(self, settings: ServerSettings, asked: Body, **options: Any) -> None:
        super().__init__(settings, asked, **options)
        self.parts = Parts(self._messages, self.make_part)

    @abstractmethod
    def finished(self) -> dict[str, Any]: ...

    def whole(self) -> dict[str, Any]:
        """Return the complete JSON body. A tool call is left out if a stop string or stop token ended it early."""
        choice = self.generation.choices[0]
        self.parts.push("".join(choice.text), self._tokens(choice), ended=True)
        if self.stops_within_call(0):
            self.parts.leave_out_last()
        self.parts.finish(self.status)
        return self.finished()

    @property
    def status(self) -> Status:
        is_cut = self.generation.choices[0].finish_reason == "length" or self.stops_within_call(0)
        return "incomplete" if is_cut else "completed"

    async def opening(self, _index: int, _usage: Usage | None = None) -> bytes:
        return b""

    def piece(self, _index: int, output: RequestOutput, _usage: Usage | None = None) -> bytes:
        ended = output.finish_reason is not None
        return self.named(self.parts.push(output.text, self._tokens(output), ended=ended))

    def named(self, events: Sequence[Event]) -> bytes:
        """Serialize named events. An obfuscated stream sends padding even if there are no events."""
        if not events:
            return filler() if self.pad else b""
        return encode_events([(event["type"], event) for event in events], pad=self.pad)

    def _tokens(self, part: RequestOutput | ChoiceState) -> list[tuple[int, dict[str, Any]]]:
        """Return the log-probability of each new token with the position in the text at which the token begins.

        A token's leading white space does not count.
        """
        if self.logprobs is None or (shown := self.shown_tokens(0, part)) is None:
            return []
        return [*zip(shown.places, self.logprobs.chat(shown)["content"], strict=True)]
