"""Tokenization of conversations as prompts and answers, exactly as the server tokenizes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from ssd.errors import RequestError
from ssd.retrieval.segment import Tokens
from ssd.text.codec import Example, TextCodec

Message = Mapping[str, Any]
Encode = Callable[..., list[int]]


class EncodedAnswer(NamedTuple):
    """The token ids of one answer and of its prompt. The answers of a conversation share one array of token ids.

    Attributes:
        history: int32[n], a view of the conversation's token ids up to the last turn before the answer.
        rest: The token ids after ``history``: the end of the prompt, then the answer.
        prompt_length: The number of prompt tokens, counted from the beginning of ``history``.
    """

    history: Tokens
    rest: list[int]
    prompt_length: int

    @property
    def token_ids(self) -> Tokens:
        """The token ids of the prompt and the answer: int32[n], a copy."""
        return np.concatenate([self.history, np.array(self.rest, np.int32)])


_FEW: Final = 8
"""Conversations with more answers than this are tokenized turn by turn, which is faster for long conversations."""
_STUB: Final = ({"role": "user", "content": "x"},)
_TOOL: Final = {"type": "function", "function": {"name": "x", "description": "x", "parameters": {"type": "object"}}}


def encode_answers(
    messages: Sequence[Message], kwargs: dict[str, Any], codec: TextCodec
) -> list[Example | EncodedAnswer]:
    """Tokenize every assistant message of a conversation together with its prompt.

    ``kwargs`` are the variables of the chat template. O(characters) if the template renders each message independently
    of later ones, else O(answers * characters). Raises RequestError if the template cannot render a prompt.
    """
    places = [n for n, each in enumerate(messages) if n and each["role"] == "assistant" and _has_output(each)]
    if len(places) > _FEW and (found := _encode_turn_by_turn(messages, places, kwargs, codec)) is not None:
        return [*found]
    return [answer for place in places for answer in encode_answer(messages[:place], messages[place], kwargs, codec)]


def encode_answer(
    messages: Sequence[Message], answer: Message, kwargs: dict[str, Any], codec: TextCodec
) -> Iterator[Example]:
    """Yield the token ids of a prompt and its answer, tokenized together as the server does.

    Yields nothing if the answer is empty. Raises RequestError if the chat template cannot render the prompt.
    """
    encode = chat_encoder(codec, kwargs)
    if _has_output(answer):
        yield from _append_answer(encode(messages), messages, answer, encode, codec)


def _has_output(answer: Message) -> bool:
    return bool(answer.get("content") or answer.get("tool_calls"))


def _append_answer(
    prompt: list[int], messages: Sequence[Message], answer: Message, encode: Encode, codec: TextCodec
) -> Iterator[Example]:
    """Yield the token ids of a prompt with its answer, which is rendered as the server's model would have written it.

    An answer with tool calls or reasoning is rendered by the chat template. If the rendered conversation does not begin
    with the prompt's tokens, only the answer's text is appended.
    """
    if answer.get("tool_calls") or answer.get("reasoning_content"):
        whole = encode([*messages, answer], add_generation_prompt=False)
        if whole[: len(prompt)] == prompt and len(whole) > len(prompt):
            ends = [at for at in range(len(prompt), len(whole)) if whole[at] in codec.eos_token_ids]
            yield Example(whole[: ends[0] + 1] if ends else whole, len(prompt))
            return
    if answer.get("content"):
        yield codec.encode_answer_example(prompt, str(answer["content"]))


def _encode_turn_by_turn(
    messages: Sequence[Message], places: list[int], kwargs: dict[str, Any], codec: TextCodec
) -> list[EncodedAnswer] | None:
    """Tokenize a long conversation in linear time: each turn once, not each answer with its whole prompt.

    Each turn is rendered after a short stub conversation, and the tokens after the stub are appended to the tokens of
    earlier turns. This is wrong if the chat template renders a turn differently within the whole conversation. To
    detect this, a few answers are also tokenized with their whole prompts. Returns None if they differ.
    """
    encode = chat_encoder(codec, kwargs)
    encode_turn = chat_encoder(codec, {**kwargs, "tools": [_TOOL]}) if kwargs.get("tools") else encode
    found: list[tuple[int, list[int], int]] = []
    try:
        history = encode(messages[: places[0]], add_generation_prompt=False)
        stub, stub_prompt = encode_turn(_STUB, add_generation_prompt=False), encode_turn(_STUB)
        for place, following in pairwise([*places, places[-1]]):
            for rest, length in _append_answer(stub_prompt, _STUB, messages[place], encode_turn, codec):
                if rest[: len(stub)] != stub:
                    return None
                found.append((len(history), rest[len(stub) :], len(history) + length - len(stub)))
            turn = encode_turn([*_STUB, *messages[place:following]], add_generation_prompt=False)
            if turn[: len(stub)] != stub:
                return None
            history += turn[len(stub) :]
    except RequestError:  # the template rejects a turn without its context
        return None
    if len(found) < len(places):
        return None
    whole = np.array(history, np.int32)
    answers = [EncodedAnswer(whole[:shared], rest, length) for shared, rest, length in found]
    written = [n for n, place in enumerate(places) if messages[place].keys() & {"tool_calls", "reasoning_content"}]
    for number in {1, len(places) - 1, *written[-1:]}:
        alone = encode_answer(messages[: places[number]], messages[places[number]], kwargs, codec)
        if [*alone] != [Example(answers[number].token_ids.tolist(), answers[number].prompt_length)]:
            return None
    return answers


def chat_encoder(codec: TextCodec, kwargs: dict[str, Any]) -> Encode:
    """Return the function `TextCodec.encode_chat` with the arguments that the server uses for this chat template.

    If the template ignores tools, the prompt describes the tools in words, as in the server. Tool calls are then
    written in the Hermes format, whereas the server expects the model's own format.
    """
    template = codec.template(with_tools="tools" in kwargs)
    in_words = template is not None and not template.takes_tools
    return partial(codec.encode_chat, template_kwargs=kwargs, tools_in_words=in_words)
