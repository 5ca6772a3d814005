"""The ways to ask for text: how each is asked, and its answers, held to the official clients' own types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anthropic.types as claude
from anthropic.types.shared import ErrorResponse
from openai import types
from openai.types import chat, responses
from pydantic import BaseModel

from tests.server.client import Answer, post

INPUT = "Write a function that adds two numbers."


@dataclass(frozen=True, slots=True)
class Api:
    """One endpoint.

    ``prefix`` : of its answers' ids. ``limit`` : its field for the most tokens. ``asking`` : the fields that ask with a
    text. ``said`` : the text of an answer. ``piece`` : that of an event, None where it has none. ``whole`` and
    ``events`` : types of the client, those of events by what they say they are.
    """

    path: str
    prefix: str
    limit: str
    asking: Callable[[str], dict[str, Any]]
    said: Callable[[Any], str]
    piece: Callable[[Any], str | None]
    whole: type[BaseModel]
    events: Mapping[str | None, type[BaseModel]]

    def post(self, port: int, text: str = INPUT, /, **options: Any) -> Answer:
        """A greedy request of 16 tokens, unless ``options`` say otherwise."""
        headers = options.pop("headers", None)
        body = {**self.asking(text), "temperature": 0, self.limit: 16, **options}
        return post(port, self.path, body, headers=headers)

    def say(self, port: int, text: str = INPUT, /, **fields: Any) -> dict[str, Any]:
        """An answer that is not streamed."""
        answer = self.post(port, text, **fields)
        assert answer.status == 200, answer.content
        self.whole.model_validate_json(answer.content, strict=True)
        found: dict[str, Any] = answer.json
        return found

    def stream(self, port: int, text: str = INPUT, /, **fields: Any) -> list[dict[str, Any]]:
        """The events of a stream."""
        return self.read(self.post(port, text, stream=True, **fields))

    def read(self, answer: Answer) -> list[dict[str, Any]]:
        """The events of a stream but pings: each of the client's types, named and numbered where they are to be."""
        assert answer.status == 200, answer.content
        return self.events_in(answer.content)

    def events_in(self, content: bytes) -> list[dict[str, Any]]:
        """The same of what was read already."""
        events = []
        for block in content.decode().split("\n\n"):
            if not block or block.startswith(":") or block == "data: [DONE]":
                continue
            *names, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert names == ([f"event: {event['type']}"] if "type" in event else [])
            if event.get("type") != "ping":
                self.require_official(event)
                events.append(event)
        numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
        assert numbers == [*range(len(numbers))]
        return events

    def require_official(self, event: dict[str, Any]) -> None:
        """An event is what the client's own type says, to the last field, where it has one."""
        if self.events and event.keys() != {"error"}:
            self.events[event.get("type")].model_validate_json(json.dumps(event), strict=True)


def _messages(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _text_of(delta: Mapping[str, Any]) -> str | None:
    return next((value for key, value in delta.items() if key != "type"), None)


COMPLETIONS = Api(
    path="/v1/completions",
    prefix="cmpl-",
    limit="max_tokens",
    asking=lambda text: {"prompt": text},
    said=lambda answer: answer["choices"][0]["text"],
    piece=lambda event: "".join(choice["text"] for choice in event.get("choices", ())),
    whole=types.Completion,
    events={},
)
CHAT = Api(
    path="/v1/chat/completions",
    prefix="chatcmpl-",
    limit="max_tokens",
    asking=_messages,
    said=lambda answer: answer["choices"][0]["message"]["content"],
    piece=lambda event: "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ())),
    whole=chat.ChatCompletion,
    events={None: chat.ChatCompletionChunk},
)
RESPONSES = Api(
    path="/v1/responses",
    prefix="resp_",
    limit="max_output_tokens",
    asking=lambda text: {"input": text},
    said=lambda answer: answer["output"][-1]["content"][0]["text"],
    piece=lambda event: event.get("delta"),
    whole=responses.Response,
    events={
        "response.created": responses.ResponseCreatedEvent,
        "response.in_progress": responses.ResponseInProgressEvent,
        "response.output_item.added": responses.ResponseOutputItemAddedEvent,
        "response.content_part.added": responses.ResponseContentPartAddedEvent,
        "response.output_text.delta": responses.ResponseTextDeltaEvent,
        "response.output_text.done": responses.ResponseTextDoneEvent,
        "response.reasoning_text.delta": responses.ResponseReasoningTextDeltaEvent,
        "response.reasoning_text.done": responses.ResponseReasoningTextDoneEvent,
        "response.function_call_arguments.delta": responses.ResponseFunctionCallArgumentsDeltaEvent,
        "response.function_call_arguments.done": responses.ResponseFunctionCallArgumentsDoneEvent,
        "response.content_part.done": responses.ResponseContentPartDoneEvent,
        "response.output_item.done": responses.ResponseOutputItemDoneEvent,
        "response.completed": responses.ResponseCompletedEvent,
        "response.incomplete": responses.ResponseIncompleteEvent,
        "response.failed": responses.ResponseFailedEvent,
    },
)
MESSAGES = Api(
    path="/v1/messages",
    prefix="msg_",
    limit="max_tokens",
    asking=_messages,
    said=lambda answer: answer["content"][0]["text"],
    piece=lambda event: _text_of(event["delta"]) if event["type"] == "content_block_delta" else None,
    whole=claude.Message,
    events={
        "message_start": claude.RawMessageStartEvent,
        "content_block_start": claude.RawContentBlockStartEvent,
        "content_block_delta": claude.RawContentBlockDeltaEvent,
        "content_block_stop": claude.RawContentBlockStopEvent,
        "message_delta": claude.RawMessageDeltaEvent,
        "message_stop": claude.RawMessageStopEvent,
        "error": ErrorResponse,
    },
)
APIS = {"completions": COMPLETIONS, "chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
