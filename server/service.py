"""From a validated body to running requests: the text's way into the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ssd.errors import ContextTooLong, RequestError
from ssd.text.bad_words import encode_bad_words
from ssd.text.stream import TextStream
from ssd.text.token_text import TokenTexts

from .bodies import Bodies, ChatBodies, CompletionBodies
from .errors import model_not_found
from .generation import Generation
from .logprobs import LogprobsWriter
from .metrics import NamespaceStats, ServerMetrics
from .obfuscation import EvenPieces, Pace, obfuscated_events
from .schema import (
    COMPLETION_MAX_TOKENS,
    Body,
    ChatBody,
    ChatTemplateFields,
    CompletionBody,
    GenerateBody,
    StreamOptions,
    TokenizeChatBody,
    TokenizeTextBody,
)
from .settings import ServerSettings
from .stream import EventWriter, events
from .worker import Worker, WorkerState

if TYPE_CHECKING:
    from ssd.engine import Engine
    from ssd.text.codec import TextCodec

P = ParamSpec("P")
T = TypeVar("T")


_MAX_CHARACTERS_PER_TOKEN = 512
"""No tokenizer in use has a longer token; those that come near are runs of spaces."""


class Service:
    """Tokenises on a thread beside the event loop, then submits to the worker."""

    def __init__(self, worker: Worker, settings: ServerSettings, sharing_stats: NamespaceStats | None = None) -> None:
        self.worker = worker
        self.settings = settings
        self.metrics = ServerMetrics(worker, settings.model_name, sharing_stats)
        self._token_texts: TokenTexts | None = None
        # One thread: tokenizers are not made to be used by several at once.
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """End the tokenizer's thread."""
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)

    def engine_for(self, body: Body) -> Engine:
        """The engine, once it is known to serve the model a body names; without a name it is the one there is."""
        if body.model is not None and body.model not in self.settings.model_names:
            raise model_not_found(body.model, self.settings.model_name)
        return self.worker.engine

    async def completion(self, body: CompletionBody, tenant: str | None) -> tuple[Generation, Bodies]:
        """Start every choice of every prompt. ``tenant`` : whose request it is."""
        engine = self.engine_for(body)
        prompts = [
            await self.encode_text(engine, prompt, special=body.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompts()
        ]
        echo = [await self._text_of(engine, prompt) for prompt in body.prompts()] if body.echo else None
        bodies = CompletionBodies(self.settings, echo=echo, **self._body_options(engine, body))
        limit = COMPLETION_MAX_TOKENS
        return await self._start(engine, body, prompts, bodies, default_limit=limit, tenant=tenant), bodies

    async def chat(self, body: ChatBody, tenant: str | None) -> tuple[Generation, Bodies]:
        """Start every choice of a conversation's next message. ``tenant`` : whose request it is."""
        engine = self.engine_for(body)
        prompt = await self.encode_messages(engine, body)
        bodies = ChatBodies(self.settings, **self._body_options(engine, body))
        return await self._start(engine, body, [prompt], bodies, default_limit=None, tenant=tenant), bodies

    def events(self, generation: Generation, bodies: Bodies, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        keep_alive_s = self.settings.keep_alive_s
        writer = EventWriter(generation, bodies, options)
        engine = self.worker.loaded_engine
        if not writer.pad or engine is None:
            return events(generation, bodies, writer, keep_alive_s)
        codec, stop = codec_of(engine), generation.stop
        streams = [TextStream(codec, stop=stop, include_stop=generation.include_stop) for _ in generation.choices]
        pace = Pace(self.settings.obfuscation_interval_s, lambda: self.worker.state is not WorkerState.READY)
        return obfuscated_events(generation, writer, EvenPieces(streams), pace, keep_alive_s)

    async def encode_text(self, engine: Engine, text: str, *, special: bool) -> list[int]:
        """Token ids of a text prompt, with the tokenizer's own special tokens around it if ``special``."""
        codec = codec_of(engine)
        _require_plausible_length(engine, len(text), "prompt")
        return await self._aside(codec.encode_prompt if special else codec.encode_completion, text)

    async def encode_messages(self, engine: Engine, body: ChatTemplateFields) -> list[int]:
        """Token ids of a conversation."""
        _require_plausible_length(
            engine, sum(len(str(message.get("content"))) for message in body.messages), "messages"
        )
        if body.chat_template is not None and not self.settings.trust_request_chat_template:
            raise RequestError(
                "chat templates of requests are not run here: a template is a program. "
                "Leave chat_template out, or start the server with --trust-request-chat-template",
                param="chat_template",
            )
        return await self._aside(
            codec_of(engine).encode_chat,
            body.messages,
            allow_special_tokens=self.settings.allow_special_tokens,
            **body.template_arguments(),
        )

    async def tokenize(self, body: TokenizeTextBody | TokenizeChatBody) -> dict[str, Any]:
        """The answer of /tokenize."""
        engine = self.engine_for(body)
        if isinstance(body, TokenizeTextBody):
            tokens = await self.encode_text(engine, body.prompt, special=body.add_special_tokens)
        else:
            tokens = await self.encode_messages(engine, body)
        codec = codec_of(engine)
        texts = [codec.decode([token]) for token in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": texts}

    async def detokenize(self, engine: Engine, tokens: list[int]) -> dict[str, Any]:
        """The answer of /detokenize."""
        codec = codec_of(engine)
        if not all(0 <= token < codec.vocab_size for token in tokens):
            raise RequestError(f"tokens has a token id outside 0..{codec.vocab_size - 1}", param="tokens")
        return {"prompt": await self._aside(codec.decode, tokens)}

    def _body_options(self, engine: Engine, body: GenerateBody) -> dict[str, Any]:
        """What the answer is to hold beside the text."""
        options: dict[str, Any] = {"return_token_ids": body.return_token_ids}
        wanted = {"logprobs": body.num_logprobs(), "prompt_logprobs": body.prompt_logprobs}
        if names := [name for name, number in wanted.items() if number is not None]:
            if self._token_texts is None:
                self._token_texts = TokenTexts(codec_of(engine))
            writer = LogprobsWriter(self._token_texts, as_token_ids=body.return_tokens_as_token_ids)
            options |= dict.fromkeys(names, writer)
        return options

    async def _text_of(self, engine: Engine, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        codec = codec_of(engine)
        known = [token for token in prompt if 0 <= token < codec.vocab_size]  # others are refused by the engine
        return await self._aside(codec.decode, known, skip_special_tokens=True)

    async def _start(
        self,
        engine: Engine,
        body: GenerateBody,
        prompts: list[list[int]],
        bodies: Bodies,
        *,
        default_limit: int | None,
        tenant: str | None,
    ) -> Generation:
        from ssd.engine import Request  # by now loaded by the engine's thread

        codec, prediction = codec_of(engine), None
        if body.prediction is not None:
            text = body.prediction.text
            _require_plausible_length(engine, len(text), "prediction")
            prediction = tuple(await self._aside(codec.encode_completion, text))
        bad_words = await self._aside(encode_bad_words, codec, body.bad_words) if body.bad_words else ()
        output = body.structured_output()
        if output is not None and engine.grammars is not None:
            await self._aside(engine.grammars.compile, output)  # kept there: it may take long, and others are streaming
        prompt_ids = [tuple(prompt) for prompt in prompts]
        generation = Generation(self.worker, self.metrics.latencies, prompt_ids, prediction)
        requests = []
        for number, prompt in enumerate(generation.prompts):
            room = engine.max_model_len - len(prompt)
            sampling = replace(
                body.sampling(self.settings.sampling_defaults, room=room, default_limit=default_limit),
                bad_words=bad_words,
            )
            requests += [
                Request(
                    request_id=f"{bodies.id}-{number}-{choice}",
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    choice_index=choice,
                    namespace=self._namespace(body),
                    priority=body.priority,
                    cache_salt=body.cache_salt,
                    tenant=None if self.settings.share_prefix_cache else tenant,
                    num_speculative_tokens=body.num_speculative_tokens,
                    prediction_token_ids=prediction or (),
                )
                for choice in range(body.n)
            ]
        generation.submit(requests)
        return generation

    def _namespace(self, body: GenerateBody) -> str | None:
        """Which cache a request uses. A salted one asks to share nothing, so it neither reads nor feeds one.

        Keys and values it shares with requests of its own salt.
        """
        return None if body.cache_salt is not None else self.settings.namespace

    async def _aside(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizer_thread, lambda: call(*args, **kwargs))


def _require_plausible_length(engine: Engine, num_characters: int, param: str) -> None:
    """Refuse text that cannot fit before time is spent on it: others wait while it is tokenised."""
    limit = engine.max_model_len * _MAX_CHARACTERS_PER_TOKEN
    if num_characters > limit:
        raise ContextTooLong(
            f"{param} has {num_characters} characters, which cannot fit this model's maximum context length of "
            f"{engine.max_model_len} tokens: shorten it",
            param=param,
        )


def codec_of(engine: Engine) -> TextCodec:
    """The tokenizer, which the engine of a server always has."""
    assert engine.codec is not None
    return engine.codec
