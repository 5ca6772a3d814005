"""Responses of Anthropic's /v1/messages: content blocks, bodies and events."""

from __future__ import annotations

from typing import Any

import pydantic_core

from server.answers.parts import AnswerPart, Event, PartsAnswer, Status
from server.answers.wire import encode_events
from server.base.errors import anthropic_error_body
from server.running.generation import ChoiceState
from server.tools.message_parser import ToolCall
from server.tools.values import is_json


class _BlockPart(AnswerPart):
    def start_events(self) -> list[Event]:
        block = self.body("", "in_progress")
        return [{"type": "content_block_start", "index": self.index, "content_block": block}]

    def delta(self, text: str, _logprobs: object) -> Event:
        if isinstance(self.kind, ToolCall):
            delta = {"type": "input_json_delta", "partial_json": text}
        elif self.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "text_delta", "text": text}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    def end_events(self, _body: dict[str, Any]) -> list[Event]:
        return [{"type": "content_block_stop", "index": self.index}]

    def body(self, text: str, status: Status) -> dict[str, Any]:
        arguments = _object(text, is_cut=status == "incomplete") if isinstance(self.kind, ToolCall) else None
        if isinstance(self.kind, ToolCall) and arguments is not None:
            return {"type": "tool_use", "id": self.kind.id, "name": self.kind.name, "input": arguments}
        if self.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}  # reasoning needs no signature here
        return {"type": "text", "text": text}


def _object(arguments: str, *, is_cut: bool) -> dict[str, Any] | None:
    """Parse the arguments of a tool call, which may be truncated if ``is_cut``. None if they are not an object."""
    if not arguments:
        return {}
    try:
        found = pydantic_core.from_json(arguments, allow_partial=True)
    except ValueError:
        return None
    return found if isinstance(found, dict) and (found or is_cut or is_json(arguments)) else None


class AnthropicAnswer(PartsAnswer):
    """The response of Anthropic's /v1/messages, which has one choice."""

    id_prefix, object_name, make_part = "msg_", "message", _BlockPart

    keep_alive = encode_events([("ping", {"type": "ping"})], pad=False)

    def finished(self) -> dict[str, Any]:
        return {**self._message(self.parts.done), **self._stopped(self.generation.choices[0])}

    async def beginning(self) -> bytes:
        return await self.serialize(lambda: self.named([{"type": "message_start", "message": self._message([])}]))

    async def closing(self) -> bytes:
        events = self.parts.finish()
        delta = self._stopped(self.generation.choices[0])
        ended = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return self.named([*events, ended, {"type": "message_stop"}])

    def failed(self, error: Exception) -> bytes:
        return encode_events([("error", anthropic_error_body(error))], pad=False)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": self.object_name,
            "role": "assistant",
            "model": self._common["model"],
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Return token counts as Anthropic defines them: ``input_tokens`` excludes cached tokens."""
        usage = self.generation.usage
        counts: dict[str, Any] = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        if usage.reasoning_tokens is not None:
            counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
        return counts

    def _stopped(self, choice: ChoiceState) -> dict[str, Any]:
        """Return the response fields ``stop_reason`` and ``stop_sequence``, after the complete text has been parsed."""
        reason = choice.finish_reason
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        calls = any(block["type"] == "tool_use" for block in self.parts.done)
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
