"""Answers that consist of parts with named events, as in Anthropic's API and OpenAI's responses."""

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
from server.tools.messages import Messages, ToolCall, ToolCallDelta

if TYPE_CHECKING:
    from ssd.engine import RequestOutput

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
Of = Literal["content", "reasoning"] | ToolCall
"""The content of a part."""


class AnswerPart(ABC):
    """A part that is being generated. Its chunks are joined at its end."""

    def __init__(self, index: int, of: Of) -> None:
        self.index, self.of = index, of
        self.pieces: list[str] = []

    @abstractmethod
    def begun(self) -> list[Event]:
        """Return the events that begin the part."""

    @abstractmethod
    def delta(self, said: str, logprobs: Sequence[dict[str, Any]]) -> Event:
        """Return the event of a chunk, with the tokens' log-probabilities if requested."""

    @abstractmethod
    def ended(self, body: dict[str, Any]) -> list[Event]:
        """Return the events that end the part, whose complete form is ``body``."""

    @abstractmethod
    def body(self, said: str, status: Status) -> dict[str, Any]:
        """Return the complete part with its text."""


class Parts:
    """Assembles the parts of a message from its text."""

    def __init__(self, messages: Messages | None, kind: Callable[[int, Of], AnswerPart]) -> None:
        """Start an empty message.

        Args:
            messages: Parses the text. None: all text is content.
            kind: Creates a part from its index and content.
        """
        self.done: list[dict[str, Any]] = []
        """The finished parts."""
        self._messages, self._kind = messages, kind
        self._open: AnswerPart | None = None
        self._tokens: deque[tuple[int, dict[str, Any]]] = deque()

    def push(self, text: str, tokens: Sequence[tuple[int, dict[str, Any]]] = (), *, ended: bool) -> list[Event]:
        """Return the events of the next text.

        Args:
            text: The text.
            tokens: The position of each token's text in the whole text, with its log-probability.
            ended: Whether this is the last text.
        """
        events: list[Event] = []
        if self._messages is None:
            return self._say("content", text, [logprob for _, logprob in tokens]) if text or tokens else []
        self._tokens += tokens
        for said in self._messages.push(0, text, ended=ended):
            if isinstance(said, ToolCallDelta):
                events += self._say(self._messages.of(0).tool_calls[said.index], said.arguments)
            elif said.of == "content":
                self._tokens_before(said.end - len(said.text))
                events += self._say(said.of, said.text, self._tokens_before(said.end))
            else:
                events += self._say(said.of, said.text)
        return events

    def _tokens_before(self, end: int) -> list[dict[str, Any]]:
        """Remove and return the log-probabilities of the tokens whose text begins before ``end``."""
        found = []
        while self._tokens and self._tokens[0][0] < end:
            found.append(self._tokens.popleft()[1])
        return found

    def leave_out_last(self) -> None:
        """Drop the unfinished part."""
        self._open = None

    def finish(self, status: Status = "completed") -> list[Event]:
        """Return the events that end the last part. Without any part, an empty text is added."""
        begun = self._say("content", "") if self._open is None and not self.done else []
        return begun + self._end(status)

    def _say(self, of: Of, said: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        events: list[Event] = []
        part = self._open
        if part is None or part.of is not of:
            events = self._end("completed")
            part = self._open = self._kind(len(self.done), of)
            events += part.begun()
        if said or logprobs:
            part.pieces.append(said)
            events.append(part.delta(said, logprobs))
        return events

    def _end(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        part, self._open = self._open, None
        self.done.append(part.body("".join(part.pieces), status))
        return part.ended(self.done[-1])


class PartsAnswer(ChatAnswer):
    """An answer with one choice, whose last event marks the end."""

    end = b""
    kind: Callable[[int, Of], AnswerPart]

    def __init__(self, settings: ServerSettings, asked: Body, **options: Any) -> None:
        super().__init__(settings, asked, **options)
        self.parts = Parts(self._messages, self.kind)

    @abstractmethod
    def finished(self) -> dict[str, Any]:
        """Return the body of a finished or truncated answer."""

    def whole(self) -> dict[str, Any]:
        """Return the aggregate of the stream's events, without a call that a stop truncated."""
        choice = self.generation.choices[0]
        self.parts.push("".join(choice.text), self._tokens(choice), ended=True)
        if self.stops_within_call(0):
            self.parts.leave_out_last()
        self.parts.finish(self.status)
        return self.finished()

    @property
    def status(self) -> Status:
        """Return how the answer ended."""
        is_cut = self.generation.choices[0].finish_reason == "length" or self.stops_within_call(0)
        return "incomplete" if is_cut else "completed"

    async def opening(self, _index: int, _usage: Usage | None = None) -> bytes:
        """Return nothing, because each part begins with its first text."""
        return b""

    def piece(self, _index: int, output: RequestOutput, _usage: Usage | None = None) -> bytes:
        ended = output.finish_reason is not None
        return self.named(self.parts.push(output.text, self._tokens(output), ended=ended))

    def named(self, events: Sequence[Event]) -> bytes:
        """Serialize events. If obfuscated, they are padded together to whole units, even if there are none."""
        if not events:
            return filler() if self.pad else b""
        return encode_events([(event["type"], event) for event in events], pad=self.pad)

    def _tokens(self, part: RequestOutput | ChoiceState) -> list[tuple[int, dict[str, Any]]]:
        """Return the position of each token's text, without white space, and its log-probability."""
        if self.logprobs is None or (shown := self.shown_tokens(0, part)) is None:
            return []
        return [*zip(shown.places, self.logprobs.chat(shown)["content"], strict=True)]
