"""Responses of OpenAI's /v1/responses: output items, bodies and events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from server.answers.parts import AnswerPart, Event, PartKind, PartsAnswer, Status
from server.base.errors import as_api_error
from server.base.settings import ServerSettings
from server.schema.body import Body
from server.schema.responses import ResponsesBody
from server.tools.message_parser import ToolCall


class _Item(AnswerPart):
    """An output item of /v1/responses: a message, a function call, or the complete reasoning."""

    def __init__(self, index: int, kind: PartKind, namespaces: Mapping[str, str]) -> None:
        super().__init__(index, kind)
        self._called: dict[str, Any] = {}
        if isinstance(kind, ToolCall):
            namespace = namespaces.get(kind.name)
            in_it = {"namespace": namespace, "name": kind.name.removeprefix(f"{namespace}.")}
            self._called = {"name": kind.name} if namespace is None else in_it
        prefix = "fc" if isinstance(kind, ToolCall) else "rs" if kind == "reasoning" else "msg"
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self._logprobs: list[dict[str, Any]] = []

    def start_events(self) -> list[Event]:
        item = self.body("", "in_progress")
        events: list[Event] = [{"type": "response.output_item.added", "output_index": self.index, "item": item}]
        if not isinstance(self.kind, ToolCall):
            events.append(self._event("content_part.added", content_index=0, part=self._part("")))
        return events

    def delta(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Event:
        if isinstance(self.kind, ToolCall):
            return self._event("function_call_arguments.delta", delta=text)
        if self.kind == "reasoning":
            return self._event("reasoning_text.delta", content_index=0, delta=text)
        self._logprobs += logprobs
        return self._event("output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))

    def end_events(self, body: dict[str, Any]) -> list[Event]:
        done = {"type": "response.output_item.done", "output_index": self.index, "item": body}
        if isinstance(self.kind, ToolCall):
            named = {"arguments": body["arguments"], "name": body["name"]}
            return [self._event("function_call_arguments.done", **named), done]
        part = body["content"][0]
        told = {"logprobs": self._logprobs} if self.kind == "content" else {}
        return [
            self._event(f"{part['type']}.done", content_index=0, text=part["text"], **told),
            self._event("content_part.done", content_index=0, part=part),
            done,
        ]

    def body(self, text: str, status: Status) -> dict[str, Any]:
        if isinstance(self.kind, ToolCall):
            called = {"call_id": self.kind.id, **self._called, "arguments": text}
            return {"id": self.id, "type": "function_call", **called, "status": status}
        content = [] if status == "in_progress" else [self._part(text)]
        if self.kind == "reasoning":
            return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}


class ResponseAnswer(PartsAnswer):
    """The response of OpenAI's /v1/responses, which has one choice."""

    id_prefix, object_name = "resp_", "response"

    def __init__(self, settings: ServerSettings, asked: Body, **options: Any) -> None:
        assert isinstance(asked, ResponsesBody)
        self.make_part = partial(_Item, namespaces=asked.namespaces)
        super().__init__(settings, asked, **options)
        self._is_small = asked.is_small
        self._request_fields = _request_fields(asked)
        self._number = 0

    @property
    def is_short(self) -> bool:
        return self._is_small and super().is_short

    async def beginning(self) -> bytes:

        def write() -> bytes:
            response = self._response("in_progress", [])
            kinds = ("response.created", "response.in_progress")
            return self.named([{"type": kind, "response": response} for kind in kinds])

        return await self.serialize(write)

    async def closing(self) -> bytes:

        def write() -> bytes:
            events = self.parts.finish(self.status)
            return self.named([*events, {"type": f"response.{self.status}", "response": self.finished()}])

        return await self.serialize(write)

    def failed(self, error: Exception) -> bytes:
        events = self.parts.finish("incomplete")
        response, why = self._response("failed", self.parts.done), as_api_error(error)
        response["error"] = {"code": "server_error" if why.status >= 500 else "invalid_prompt", "message": str(why)}
        return self.named([*events, {"type": "response.failed", "response": response}])

    def named(self, events: Sequence[Event]) -> bytes:
        numbered = []
        for event in events:
            numbered.append({"type": event["type"], "sequence_number": self._number, **event})
            self._number += 1
        return super().named(numbered)

    def finished(self) -> dict[str, Any]:
        found = self._response(self.status, self.parts.done)
        usage = self.generation.usage
        found["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if self.generation.choices[0].finish_reason == "length":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        elif self.status == "incomplete":  # OpenAI's API has no reason for a stop string
            found["incomplete_details"] = {}
        else:
            found["completed_at"] = int(time.time())
        return found

    def _response(self, status: Status | Literal["failed"], output: list[dict[str, Any]]) -> dict[str, Any]:
        sampling = self.generation.sampling
        assert sampling is not None  # the request was submitted
        return {
            "id": self.id,
            "object": self.object_name,
            "created_at": self._common["created"],
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._common["model"],
            "output": output,
            "usage": None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **self._request_fields,
        }


def _request_fields(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of a response that repeat the request, with fixed values for unsupported features."""
    form = None if body.text is None or body.text.format is None else body.text.format
    blank = dict.fromkeys(("name", "description", "parameters", "strict"))
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{**blank, **tool} if tool["type"] == "function" else tool for tool in body.tools],
        "top_logprobs": body.top_logprobs,
        "truncation": "disabled",
        "background": False,
        "previous_response_id": None,
        "store": False,
    }
