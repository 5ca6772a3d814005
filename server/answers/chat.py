"""Responses of /v1/chat/completions: messages with tool calls and reasoning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from server.answers.answer import Answer
from server.answers.tokens import ShownTokens
from server.base.settings import ServerSettings
from server.running.generation import ChoiceState
from server.schema.body import Body
from server.tools.message_parser import Messages, ToolCall, ToolCallDelta

if TYPE_CHECKING:
    from ssd.engine import RequestOutput


_FEW_TOKENS = 512
"""Outputs of up to this many tokens are parsed for tool calls on the event loop, because parsing them takes only about
a millisecond.
"""


class ChatAnswer(Answer):
    """The response of /v1/chat/completions."""

    id_prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, settings: ServerSettings, asked: Body, *, messages: Messages | None = None, **options: Any
    ) -> None:
        super().__init__(settings, asked, **options)
        self._messages = messages

    @property
    def is_short(self) -> bool:
        few = self._messages is None or sum(len(each.token_ids) for each in self.generation.choices) <= _FEW_TOKENS
        return few and super().is_short

    def whole_choice(self, index: int) -> dict[str, Any]:
        choice = self.generation.choices[index]
        text = "".join(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._messages is not None:
            parsed = self._messages.parse(index, text)
            message["content"] = "".join(parsed.content) or None
            if reasoning := "".join(parsed.reasoning):
                message |= {"reasoning_content": reasoning, "reasoning": reasoning}
            if calls := parsed.tool_calls[: -1 if self.stops_within_call(index) else None]:
                message["tool_calls"] = [_call(call, call.arguments) for call in calls]
        return {"message": message, "logprobs": self._logprobs(self.shown_tokens(index, choice))}

    def _logprobs(self, shown: ShownTokens | None) -> dict[str, Any] | None:
        return None if self.logprobs is None or shown is None else self.logprobs.chat(shown)

    def whole_extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = {"prompt_token_ids": self.prompt_of(0)} if self.return_token_ids else {}
        if self.prompt_logprobs is not None:
            extras["prompt_logprobs"] = self.prompt_logprobs.prompt(self.generation.choices[0].prompt_logprobs)
        return extras

    def ending(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        written = super().ending(index, choice)
        if self._messages is not None and choice.finish_reason == "stop" and self._messages.message(index).tool_calls:
            written["finish_reason"] = "stop" if self.stops_within_call(index) else "tool_calls"
        return written

    def stops_within_call(self, index: int) -> bool:
        """Return whether a stop string or stop token ended a choice inside a tool call and left the call incomplete."""
        is_stopped = self.generation.choices[index].stop_reason is not None
        return is_stopped and self._messages is not None and self._messages.message(index).ends_within_call

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prompt = choices[0].get("prompt_token_ids") if choices else None  # vLLM's name of the field
        return super()._chunk(choices) | ({} if prompt is None else {"prompt_token_ids": prompt})

    def first_chunks(self, index: int) -> list[dict[str, Any]]:
        first: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        if self.return_token_ids:
            first["prompt_token_ids"] = self.prompt_of(index)
        return [first]

    def empty_chunk(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def text_chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the JSON fields of one chunk for each new delta of content, reasoning or a tool call.

        The last chunk contains the log-probabilities of all new tokens.
        """
        if self._messages is None:
            deltas: list[dict[str, Any]] = [{"content": output.text}] if output.text else []
        else:
            deltas = self._deltas(self._messages, index, output)
        shown = self.shown_tokens(index, output)
        if not deltas and self.needs_chunk(output, shown):
            deltas = [{}]
        chunks: list[dict[str, Any]] = [{"delta": delta, "logprobs": None} for delta in deltas]
        if chunks:
            chunks[-1]["logprobs"] = self._logprobs(shown)
        return chunks

    def _deltas(self, messages: Messages, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for delta in messages.push(index, output.text, ended=output.finish_reason is not None):
            if isinstance(delta, ToolCallDelta):
                if delta.name is not None:
                    begun = _call(messages.message(index).tool_calls[delta.index], "")
                    deltas.append({"tool_calls": [{"index": delta.index, **begun}]})
                if delta.arguments:
                    more = {"arguments": delta.arguments}
                    deltas.append({"tool_calls": [{"index": delta.index, "function": more}]})
            elif delta.kind == "content":
                deltas.append({"content": delta.text})
            else:
                deltas.append({"reasoning_content": delta.text, "reasoning": delta.text})
        return deltas


def _call(call: ToolCall, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
