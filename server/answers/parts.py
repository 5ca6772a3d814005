"""Answers made of parts, whose events have names: what Anthropic's and OpenAI's newer API have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from server.answers.chat import ChatAnswer
from server.answers.wire import encode_events, filler
from server.base.settings import ServerSettings
from server.running.generation import Choice, Usage
from server.schema.body import Body
from server.tools.messages import Messages, ToolCall, ToolCallDelta

if TYPE_CHECKING:
    from ssd.engine import RequestOutput

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
Of = Literal["content", "reasoning"] | ToolCall
"""What a part holds."""


class Part(ABC):
    """One part while it grows; its pieces are joined once, at its end."""

    def __init__(self, index: int, of: Of) -> None:
        self.index, self.of = index, of
        self.pieces: list[str] = []

    @abstractmethod
    def begun(self) -> list[Event]:
        """How it begins."""

    @abstractmethod
    def delta(self, said: str, logprobs: Sequence[dict[str, Any]]) -> Event:
        """More of it, and the log-probabilities of tokens where they were asked for."""

    @abstractmethod
    def ended(self, body: dict[str, Any]) -> list[Event]:
        """How it ends; ``body`` : all of it."""

    @abstractmethod
    def body(self, said: str, status: Status) -> dict[str, Any]:
        """The part around what was said."""


class Parts:
    """Puts a message together from its text."""

    def __init__(self, messages: Messages | None, kind: Callable[[int, Of], Part]) -> None:
        """``messages`` : takes the text apart; None where all of it is content."""
        self.done: list[dict[str, Any]] = []
        """The parts that have ended."""
        self._messages, self._kind = messages, kind
        self._open: Part | None = None
        self._tokens: deque[tuple[int, dict[str, Any]]] = deque()

    def push(self, text: str, tokens: Sequence[tuple[int, dict[str, Any]]] = (), *, ended: bool) -> list[Event]:
        """The events of the next text.

        ``tokens`` : of each where its text begins in all of the text, and its log-probability, which goes with that.
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
        """Log-probabilities of those whose text begins there, which are taken."""
        found = []
        while self._tokens and self._tokens[0][0] < end:
            found.append(self._tokens.popleft()[1])
        return found

    def leave_out_last(self) -> None:
        """Leave out the part that has not ended."""
        self._open = None

    def finish(self, status: Status = "completed") -> list[Event]:
        """The events that end the last part, which is an empty text where nothing was said."""
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
    """An answer of one choice; the last of its events says that it is the last."""

    end = b""
    kind: Callable[[int, Of], Part]

    def __init__(self, settings: ServerSettings, asked: Body, **options: Any) -> None:
        super().__init__(settings, asked, **options)
        self.parts = Parts(self._messages, self.kind)

    @abstractmethod
    def finished(self) -> dict[str, Any]:
        """The body of an answer that has come to its end, or to the end of its tokens."""

    def whole(self) -> dict[str, Any]:
        """What the events of a stream come to, but for a call that a stop cut."""
        choice = self.generation.choices[0]
        self.parts.push("".join(choice.text), self._tokens(choice), ended=True)
        if self.stops_within_call(0):
            self.parts.leave_out_last()
        self.parts.finish(self.status)
        return self.finished()

    @property
    def status(self) -> Status:
        """How the answer ended."""
        is_cut = self.generation.choices[0].finish_reason == "length" or self.stops_within_call(0)
        return "incomplete" if is_cut else "completed"

    async def opening(self, _index: int, _usage: Usage | None = None) -> bytes:
        """Nothing: each part begins with what it says."""
        return b""

    def piece(self, _index: int, output: RequestOutput, _usage: Usage | None = None) -> bytes:
        ended = output.finish_reason is not None
        return self.named(self.parts.push(output.text, self._tokens(output), ended=ended))

    def named(self, events: Sequence[Event]) -> bytes:
        """Events on the wire. Obfuscated, all of them together fill whole units, be there any or none."""
        if not events:
            return filler() if self.pad else b""
        return encode_events([(event["type"], event) for event in events], pad=self.pad)

    def _tokens(self, part: RequestOutput | Choice) -> list[tuple[int, dict[str, Any]]]:
        """Where the text of each token begins, white space aside, and its log-probability."""
        if self.logprobs is None or (shown := self.shown_tokens(0, part)) is None:
            return []
        return [*zip(shown.places, self.logprobs.chat(shown)["content"], strict=True)]
