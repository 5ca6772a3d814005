"""The body of a message for Anthropic's clients."""

from __future__ import annotations

from typing import Any

from server.answers.anthropic_blocks import AnthropicBlocks
from server.answers.chat_bodies import ChatBodies, is_cut
from server.running.generation import Choice, Generation


class AnthropicBodies(ChatBodies):
    """/v1/messages. It has one choice."""

    id_prefix, object_name = "msg_", "message"

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The body of a message that is not streamed: what the events of a stream come to, but for a cut call."""
        choice = generation.choices[0]
        blocks = self.blocks()
        blocks.push("".join(choice.text), ended=True)
        if is_cut(choice):
            blocks.leave_out_cut_call()
        blocks.finish()
        message = self.message(blocks.done)
        return {**message, **self.stopped(choice), "usage": usage_of(generation)}

    def blocks(self) -> AnthropicBlocks:
        """What puts the content together; for the whole or for a stream."""
        return AnthropicBlocks(self._messages)

    def message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        """All of a message but how it ended and what it took."""
        return {
            "id": self.id, "type": self.object_name, "role": "assistant", "model": self._common["model"],
            "content": content, "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip

    def stopped(self, choice: Choice) -> dict[str, Any]:
        """How a message ended; the text was taken apart before."""
        reason = choice.finish_reason
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        calls = self._messages is not None and self._messages.of(0).finish_reason(reason) == "tool_calls"
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}


def usage_of(generation: Generation) -> dict[str, Any]:
    """Token counts as Anthropic has them: those that came from a cache are no input tokens."""
    usage = generation.usage
    counts: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts
