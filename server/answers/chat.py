"""Answers of chat completions: messages with what they call and what was thought before."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from server.answers.answer import Answer
from server.answers.wire import encode_events, filler
from server.base.settings import ServerSettings
from server.running.generation import Choice, Usage
from server.schema.body import Body
from server.schema.chat import ChatBody
from server.tools.messages import Message, MessageDelta, Messages, ToolCall

if TYPE_CHECKING:
    from ssd.engine import RequestOutput


Event = dict[str, Any]

_LITTLE = re.compile(r"[\w ]+|[^\w ]")
"""Words, or one character of another kind."""

Part = Literal["content", "reasoning"] | ToolCall
"""Of a message: what some text belongs to."""


class Runs:
    """Takes the text of a request's only choice apart."""

    def __init__(self, messages: Messages | None) -> None:
        """``messages`` : knows how; None where all of it is content."""
        self._messages = messages

    def push(self, text: str, *, ended: bool) -> list[tuple[Part, str]]:
        """What the text adds to which part, in the order it says so; ``ended`` : it is the last.

        A parser that is given much at once does not tell what came first, so it is given little, and no words together
        with what may be a mark: the runs are the same however the text was cut.
        """
        if self._messages is None:
            return [("content", text)] if text else []
        runs: list[tuple[Part, list[str]]] = []

        def add(part: Part, said: str) -> None:
            if not runs or runs[-1][0] is not part:
                runs.append((part, []))
            runs[-1][1].append(said)

        parts = _LITTLE.findall(text) or [""]
        for number, little in enumerate(parts, 1):
            num_begun = len(self._messages.of(0).tool_calls)
            delta = self._messages.push(0, little, ended=ended and number == len(parts))
            calls = self._messages.of(0).tool_calls
            if delta.reasoning:
                add("reasoning", delta.reasoning)
            for piece in delta.tool_calls:  # the end of one that is known
                if piece.index < num_begun:
                    add(calls[piece.index], piece.arguments)
            if delta.content:
                add("content", delta.content)
            for piece in delta.tool_calls:
                if piece.index >= num_begun:
                    add(calls[piece.index], piece.arguments)
        return [(part, "".join(pieces)) for part, pieces in runs]


_FEW_TOKENS = 512
"""A text of so many is taken apart in about a millisecond."""


def is_cut(choice: Choice) -> bool:
    """Whether ``max_tokens`` or a stop string ended a text, perhaps within a call."""
    return choice.finish_reason == "length" or isinstance(choice.stop_reason, str)


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    id_prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        settings: ServerSettings,
        asked: Body,
        *,
        messages: Messages | None = None,
        **options: Any,
    ) -> None:
        """``messages`` : takes the texts apart; None where all of them are content."""
        super().__init__(settings, **options)
        self._messages = messages
        # The only call is then written as OpenAI's older clients read it.
        self._as_function_call = isinstance(asked, ChatBody) and bool(asked.functions)

    @property
    def is_short(self) -> bool:
        """As above; taking a text apart takes longer than writing it."""
        few = self._messages is None or sum(len(each.token_ids) for each in self.generation.choices) <= _FEW_TOKENS
        return few and super().is_short

    def whole_choice(self, index: int) -> dict[str, Any]:
        """``message`` and ``logprobs``."""
        choice = self.generation.choices[index]
        text = "".join(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._messages is not None:
            message |= self._written(self._messages.whole(index, text, is_cut=is_cut(choice)))
        return {"message": message, "logprobs": None if self.logprobs is None else self.logprobs.chat(choice.logprobs)}

    def _written(self, message: Message) -> dict[str, Any]:
        calls, reasoning = message.tool_calls, "".join(message.reasoning)
        written: dict[str, Any] = {"content": "".join(message.content) or None}
        if reasoning:
            written |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls and self._as_function_call:
            written["function_call"] = {"name": calls[0].name, "arguments": calls[0].arguments}
        elif calls:
            written["tool_calls"] = [_call(call, call.arguments) for call in calls]
        return written

    def whole_extras(self) -> dict[str, Any]:
        """All choices have one prompt."""
        if self.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": self.prompt_logprobs.prompt(self.generation.choices[0].prompt_logprobs)}

    def ending(self, index: int, choice: Choice) -> dict[str, Any]:
        """As above; who calls functions ends for that reason."""
        written = super().ending(index, choice)
        if self._messages is not None and choice.finish_reason is not None:
            reason = self._messages.of(index).finish_reason(choice.finish_reason)
            as_older = self._as_function_call and reason == "tool_calls"
            written["finish_reason"] = "function_call" if as_older else reason
        return written

    def first_chunks(self, index: int) -> list[dict[str, Any]]:
        """The role goes first, with no text."""
        first: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        if self.return_token_ids:
            first["prompt_token_ids"] = self.prompt_of(index)
        return [first]

    def text_chunk(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """``delta`` and ``logprobs``."""
        if self._messages is None:
            delta: dict[str, Any] = {"content": output.text} if output.text else {}
        else:
            delta = self._merged(self._deltas(self._messages, index, output))
        return {"delta": delta, "logprobs": self._logprobs_of(output)}

    def text_chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """One for the name of each call and one for all other things, in order; the last has the log-probabilities."""
        if self._messages is None:
            return [self.text_chunk(index, output)]
        deltas = self._deltas(self._messages, index, output)
        if not deltas:
            asked_for_tokens = self.return_token_ids or self.logprobs is not None
            if not (output.finish_reason or (asked_for_tokens and output.token_ids)):
                return []
            deltas = [{}]
        chunks: list[dict[str, Any]] = [{"delta": delta, "logprobs": None} for delta in deltas]
        chunks[-1]["logprobs"] = self._logprobs_of(output)
        return chunks

    def _logprobs_of(self, output: RequestOutput) -> dict[str, Any] | None:
        return self.logprobs.chat(output.logprobs or ()) if self.logprobs is not None else None

    def _deltas(self, messages: Messages, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """What an output adds to a message, in the order clients expect it."""
        delta = messages.push(index, output.text, ended=output.finish_reason is not None)
        text: dict[str, Any] = {}
        if delta.reasoning:
            text |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
        if delta.content:
            text["content"] = delta.content
        calls = self._call_deltas(messages.of(index), delta)
        return [text, *calls] if text else calls

    def _call_deltas(self, message: Message, delta: MessageDelta) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for piece in delta.tool_calls:
            call = message.tool_calls[piece.index]
            if piece.name is not None:
                begun = {"name": call.name, "arguments": ""} if self._as_function_call else _call(call, "")
                deltas.append(self._call_delta(piece.index, begun))
            if piece.arguments:
                more = {"arguments": piece.arguments}
                deltas.append(self._call_delta(piece.index, more if self._as_function_call else {"function": more}))
        return deltas

    def _call_delta(self, index: int, written: dict[str, Any]) -> dict[str, Any]:
        if self._as_function_call:
            return {"function_call": written}
        return {"tool_calls": [{"index": index, **written}]}

    def _merged(self, deltas: list[dict[str, Any]]) -> dict[str, Any]:
        """All in one, where there has to be one event: a call's first piece then has arguments already."""
        merged: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            for entry in delta.get("tool_calls", ()):
                known = calls.get(entry["index"])
                if known is None:
                    calls[entry["index"]] = entry
                else:
                    known["function"]["arguments"] += entry["function"]["arguments"]
            if (older := delta.get("function_call")) is not None:
                begun = merged.setdefault("function_call", {"arguments": ""})
                begun |= {**older, "arguments": begun["arguments"] + older["arguments"]}
            merged |= {key: value for key, value in delta.items() if key not in ("tool_calls", "function_call")}
        return {**merged, "tool_calls": list(calls.values())} if calls else merged


class NamedEvents(ChatAnswer):
    """A conversation's answer of one choice, whose events have names; the last says that it is the last."""

    end = b""

    async def opening(self, _index: int, _usage: Usage | None = None) -> bytes:
        """Nothing: each part begins with what it says."""
        return b""

    def named(self, events: Sequence[Event]) -> bytes:
        """Events on the wire. Obfuscated, all of them together fill whole units, be there any or none."""
        if not events:
            return filler() if self.pad else b""
        return encode_events([(event["type"], event) for event in events], pad=self.pad)


def _call(call: ToolCall, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
