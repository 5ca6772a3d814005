"""The body of a response: what was asked for, how it stands, and its output."""

from __future__ import annotations

import time
from typing import Any, Literal

from server.answers.chat_bodies import ChatBodies, is_cut
from server.answers.response_items import ResponseItems, Status
from server.base.errors import as_api_error
from server.base.settings import ServerSettings
from server.running.generation import Choice, Generation
from server.schema.responses import ResponsesBody

_FINISHED: dict[str | None, Status] = {"length": "incomplete"}
"""How an output ended, by its finish reason; any other is "completed"."""


class ResponseBodies(ChatBodies):
    """/v1/responses. It has one choice."""

    id_prefix, object_name = "resp_", "response"

    def __init__(self, settings: ServerSettings, body: ResponsesBody, **options: Any) -> None:
        """``body`` : what was asked for, which a response repeats."""
        super().__init__(settings, **options)
        self._is_small = body.is_small
        self._asked = _asked(body)

    def is_short(self, generation: Generation) -> bool:
        """As above, and so is what is repeated."""
        return self._is_small and super().is_short(generation)

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The body of a response that is not streamed: what the events of a stream come to, but for a cut call."""
        choice = generation.choices[0]
        items = self.items()
        items.push("".join(choice.text), self.logprobs_of(choice.logprobs), ended=True)
        if is_cut(choice):
            items.leave_out_cut_call()
        items.finish(status_of(choice))
        return self.ended(generation, items)

    def items(self) -> ResponseItems:
        """What puts the output together; for the whole or for a stream."""
        return ResponseItems(self._messages)

    def logprobs_of(self, entries: Any) -> list[dict[str, Any]]:
        """Log-probabilities of some tokens; none where they were not asked for."""
        found: list[dict[str, Any]] = [] if self.logprobs is None else self.logprobs.chat(entries or ())["content"]
        return found

    def in_progress(self, generation: Generation) -> dict[str, Any]:
        """A response that has only begun."""
        return self._response(generation, "in_progress", [])

    def ended(self, generation: Generation, items: ResponseItems) -> dict[str, Any]:
        """A response that has come to its end, or to the end of its tokens."""
        status = status_of(generation.choices[0])
        found = self._response(generation, status, items.done)
        usage = generation.usage
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

    def failed(self, generation: Generation, items: ResponseItems, error: Exception) -> dict[str, Any]:
        """A response that fails after it has begun; what it said stays."""
        found = self._response(generation, "failed", items.done)
        why = as_api_error(error)
        found["error"] = {"code": "server_error" if why.status >= 500 else "invalid_prompt", "message": str(why)}
        return found

    def _response(
        self, generation: Generation, status: Status | Literal["failed"], output: list[dict[str, Any]]
    ) -> dict[str, Any]:
        sampling = generation.sampling
        assert sampling is not None  # it was submitted
        return {
            "id": self.id, "object": self.object_name, "created_at": self._common["created"], "status": status,
            "completed_at": None, "error": None, "incomplete_details": None, "model": self._common["model"],
            "output": output, "usage": None, "temperature": sampling.temperature, "top_p": sampling.top_p,
            **self._asked,
        }  # fmt: skip


def status_of(choice: Choice) -> Status:
    """How a response ended."""
    return _FINISHED.get(choice.finish_reason, "completed")


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
