"""Tokenization and detokenization for requests, on other threads and within limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from mmap import mmap
from typing import TYPE_CHECKING, Any

from server.admission.fair_executor import LONG_CHARACTERS, FairExecutors
from server.base.counting import num_values
from server.base.settings import ServerSettings
from server.schema.chat import ChatTemplateFields, TokenizeChatBody, TokenizeTextBody
from ssd.errors import ContextTooLong, QueueFull, RequestError
from ssd.text.codec import encode_bad_words

if TYPE_CHECKING:
    from ssd.engine import Engine
    from ssd.text.codec import TextCodec


_MAX_CHARACTERS_PER_TOKEN = 512
"""The maximum number of characters of a token in known tokenizers; the longest tokens are runs of spaces."""
_USUAL_CHARACTERS_PER_TOKEN = 4
_MAX_DETOKENIZED = 1 << 16
"""The maximum number of token ids in a /detokenize request (or the context length, if larger), because decoding blocks
all other threads.
"""
_PIECE_CHARACTERS = 1 << 14
_TOKENS_CUT = 64
"""If a text is tokenized in chunks, its token count may increase by up to this number per chunk."""
_BYTES_A_TOKEN, _BYTES_A_BYTE = 400, 64
"""Upper estimates of the peak memory of tokenization, in bytes per token and per UTF-8 byte (measured: 330 and 16)."""
_CHARACTERS_A_TEXT = 64
"""The estimated fixed cost of tokenizing one text. It equals the cost of tokenizing this number of characters."""


class Tokenization:
    """Tokenizes and detokenizes texts on thread pools. Texts that are too long are rejected before tokenization."""

    def __init__(self, lanes: FairExecutors, settings: ServerSettings) -> None:
        self._lanes, self._limits, self._settings = lanes, settings.limits, settings

    async def prompts(
        self, engine: Engine, prompts: Sequence[str | list[int]], *, special: bool
    ) -> list[tuple[int, ...]]:
        """Return the token ids of prompts, which are texts or already token ids.

        ``special`` adds the tokenizer's special tokens to texts.
        """
        most = self._max_tokens(engine)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        found = [tuple(prompt) for prompt in prompts if not isinstance(prompt, str)]
        _require_few_tokens(found, most)
        if not texts:
            return found
        _require_plausible_length(engine, max(map(len, texts)), "prompt")
        encode = partial(_encode, codec_of(engine), most=engine.max_model_len, param="prompt", special=special)
        cost = sum(len(text) + _CHARACTERS_A_TEXT for text in texts)
        for some in _parts(texts):  # other tenants' calls run in between
            found += await self._lanes.run_on_text(cost, partial(list, map(encode, some)))
            _require_few_tokens(found, most)
        return found

    async def messages(self, engine: Engine, body: ChatTemplateFields, **writing: Any) -> tuple[int, ...]:
        """Return the token ids of a conversation. ``writing`` are further arguments of `TextCodec.encode_chat`."""
        encode, num_characters = self._conversation(engine, body, writing)
        return await self._lanes.run_on_text(num_characters, encode)

    async def prediction(self, engine: Engine, text: str) -> tuple[int, ...]:
        _require_plausible_length(engine, len(text), "prediction")
        encode = partial(_encode, codec_of(engine), text, most=engine.max_model_len, param="prediction")
        return await self._lanes.run_on_text(len(text), encode)

    async def bad_words(self, engine: Engine, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        cost = sum(len(word) + _CHARACTERS_A_TEXT for word in words)
        return await self._lanes.run_on_text(2 * cost, partial(encode_bad_words, codec_of(engine), words))

    async def echoes(self, engine: Engine, prompts: Sequence[str | list[int]]) -> list[str]:
        """Return the texts of prompts that the response repeats (``echo``)."""
        codec = codec_of(engine)

        def text_of(prompt: str | list[int]) -> str:
            if isinstance(prompt, str):
                return prompt
            known = [token for token in prompt if 0 <= token < codec.vocab_size]  # the engine rejects other ids
            return codec.decode(known, skip_special_tokens=True)

        if isinstance(prompts[0], str):
            return list(map(text_of, prompts))
        return await self._lanes.run_on_text(sum(map(len, prompts)), partial(list, map(text_of, prompts)))

    async def tokenize(self, engine: Engine, body: TokenizeTextBody) -> dict[str, Any]:
        """Return the token ids of a text, as the JSON fields of /tokenize."""
        most, special = self._max_tokens(engine), body.add_special_tokens
        encode = partial(_encode, codec_of(engine), body.prompt, most=most, param="prompt", special=special)
        return await self._tokenize(engine, encode, shows_texts=body.return_token_strs)

    async def tokenize_messages(self, engine: Engine, body: TokenizeChatBody, **writing: Any) -> dict[str, Any]:
        """Return the token ids of a conversation, as the JSON fields of /tokenize; ``writing`` as for `messages`."""
        encode, _ = self._conversation(engine, body, writing)
        return await self._tokenize(engine, encode, shows_texts=body.return_token_strs)

    async def _tokenize(
        self, engine: Engine, encode: Callable[[], tuple[int, ...]], *, shows_texts: bool
    ) -> dict[str, Any]:
        def call() -> dict[str, Any]:
            tokens = encode()
            texts = [codec_of(engine).decode([token]) for token in tokens] if shows_texts else None
            return {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": texts}

        return await self._lanes.tools.run(call)

    async def detokenize(self, engine: Engine, tokens: list[int]) -> str:
        codec, most = codec_of(engine), max(_MAX_DETOKENIZED, engine.max_model_len)
        if len(tokens) > most:
            raise RequestError(
                f"tokens has {len(tokens)} token ids, at most {most} are accepted: split the request", param="tokens"
            )
        if tokens and not (min(tokens) >= 0 and max(tokens) < codec.vocab_size):
            raise RequestError(f"tokens has a token id outside 0..{codec.vocab_size - 1}", param="tokens")
        return await self._lanes.tools.run(codec.decode, tokens)

    def _max_tokens(self, engine: Engine) -> int:
        return max(self._limits.max_request_tokens, engine.max_model_len)

    def _conversation(
        self, engine: Engine, body: ChatTemplateFields, writing: Mapping[str, Any]
    ) -> tuple[Callable[[], tuple[int, ...]], int]:
        """Return a function that tokenizes a conversation, and the conversation's approximate number of characters."""
        contents = [str(message.get("content")) for message in body.messages]
        contents += [text for document in body.documents for text in document.values()]
        contents += [str(calls) for message in body.messages if (calls := message.get("tool_calls"))]
        contents += [str(function.for_template()) for function in (tool.function for tool in body.tools)]
        num_characters = sum(map(len, contents))
        _require_plausible_length(engine, num_characters, "messages")
        others = [message[name] for message in body.messages for name in message.keys() - {"content", "tool_calls"}]
        others += body.chat_template_kwargs.values()  # a template may or may not print these
        num_other = sum(len(each if isinstance(each, str) else str(each)) for each in others)
        codec = codec_of(engine)
        arguments = {
            **body.template_arguments(),
            "allow_special_tokens": self._settings.allow_special_tokens,
            **writing,
        }

        def call() -> tuple[int, ...]:
            self._require_few_values(body.messages)
            if num_characters > _USUAL_CHARACTERS_PER_TOKEN * engine.max_model_len:
                check_token_count(codec, "\n".join(contents), engine.max_model_len, "messages")
            return tuple(codec.encode_chat(body.messages, **arguments))

        return call, num_characters + num_other + _CHARACTERS_A_TEXT * len(contents)

    def _require_few_values(self, messages: Sequence[dict[str, Any]]) -> None:
        """Raise RequestError if the JSON arguments of earlier tool calls contain too many values to be parsed."""
        lists = [calls for message in messages if isinstance(calls := message.get("tool_calls"), list)]
        functions = [call.get("function") for calls in lists for call in calls if isinstance(call, dict)]
        functions += [message.get("function_call") for message in messages]
        written = [function.get("arguments") for function in functions if isinstance(function, dict)]
        text = ",".join(arguments for arguments in written if isinstance(arguments, str))
        most = self._limits.max_body_values
        if len(text) > most and num_values(text.encode(errors="replace")) > most:
            raise RequestError(
                f"the arguments of all tool calls have more than {most} JSON values: shorten them", param="messages"
            )


def _require_few_tokens(prompts: Sequence[Sequence[int]], most: int) -> None:
    if sum(map(len, prompts)) > most:
        message = f"all prompts of a request together may have at most {most} tokens: send several requests"
        raise RequestError(message, param="prompt")


def _encode(codec: TextCodec, text: str, *, most: int, param: str, special: bool = False) -> tuple[int, ...]:
    check_token_count(codec, text, most, param)
    return tuple(codec.encode_prompt(text) if special else codec.encode_completion(text))


def check_token_count(codec: TextCodec, text: str, most_tokens: int, param: str) -> None:
    """Raise ContextTooLong if a long text has too many tokens, or QueueFull if memory for its tokenization is short.

    The tokens are counted chunk by chunk, because a tokenizer that runs out of memory aborts the process. This count
    may be slightly too high, so a small excess is allowed.
    """
    if len(text) <= _PIECE_CHARACTERS:
        return
    num_bytes = len(text.encode(errors="replace"))
    if num_bytes <= _USUAL_CHARACTERS_PER_TOKEN * most_tokens and _is_free(num_bytes * _BYTES_A_TOKEN):
        return
    num_tokens = 0
    for first in range(0, len(text), _PIECE_CHARACTERS):
        num_tokens += len(codec.encode_completion(text[first : first + _PIECE_CHARACTERS]))
        if num_tokens > most_tokens + _TOKENS_CUT * (1 + first // _PIECE_CHARACTERS):
            raise ContextTooLong(
                f"{param} has more than {most_tokens} tokens, which is the maximum: shorten it", param=param
            )
    if not _is_free(num_tokens * _BYTES_A_TOKEN + num_bytes * _BYTES_A_BYTE):
        raise QueueFull(f"too little memory is free to tokenize {len(text)} characters: try later, or send less text")


def _is_free(num_bytes: int) -> bool:
    """Return whether ``num_bytes`` of memory can be allocated within the limits of the cgroup and the system."""
    import torch  # by now loaded with the engine

    from ssd.model.loading.memory import free_bytes

    try:
        mmap(-1, num_bytes).close()  # fails if memory is limited; costs nothing, as no page is touched
    except (OSError, MemoryError):
        return False
    return num_bytes < free_bytes(torch.device("cpu"))


def _parts(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Divide texts into groups of consecutive texts, each group short enough for one call on the thread pool."""
    first = num_characters = 0
    for place, text in enumerate(texts):
        num_characters += len(text) + _CHARACTERS_A_TEXT
        if num_characters > LONG_CHARACTERS and place > first:
            yield texts[first:place]
            first, num_characters = place, len(text) + _CHARACTERS_A_TEXT
    yield texts[first:]


def _require_plausible_length(engine: Engine, num_characters: int, param: str) -> None:
    """Raise ContextTooLong if a text has too many characters to fit the context, before it is tokenized."""
    limit = engine.max_model_len * _MAX_CHARACTERS_PER_TOKEN
    if num_characters > limit:
        raise ContextTooLong(
            f"{param} has {num_characters} characters, which exceeds this model's maximum context length of "
            f"{engine.max_model_len} tokens: shorten it",
            param=param,
        )


def codec_of(engine: Engine) -> TextCodec:
    assert engine.codec is not None
    return engine.codec
