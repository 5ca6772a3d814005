"""Response bodies of completions and chat completions, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any

from .generation import Choice, Generation
from .settings import ServerSettings


class Bodies(ABC):
    """Writes the bodies of one HTTP request; all share its id and time."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, settings: ServerSettings, *, return_token_ids: bool) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.return_token_ids = return_token_ids
        self._common: dict[str, Any] = {
            "created": int(time.time()),
            "model": settings.model_name,
            "system_fingerprint": settings.system_fingerprint,
        }

    @abstractmethod
    def whole_choice(self, generation: Generation, index: int) -> dict[str, Any]:
        """The content fields of a finished choice."""

    @abstractmethod
    def first_chunks(self, generation: Generation, index: int) -> list[dict[str, Any]]:
        """Content fields of chunks that go before the first text of a choice."""

    @abstractmethod
    def text_chunk(self, text: str) -> dict[str, Any]:
        """The content fields of a chunk with new text, possibly empty."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        choices = []
        for index, choice in enumerate(generation.choices):
            body = {"index": index, **self.whole_choice(generation, index), **_ending(choice)}
            if self.return_token_ids:
                body |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt_of(generation, index)}
            choices.append(body)
        return {
            "id": self.id, "object": self.object_name, **self._common, "choices": choices,
            "usage": generation.usage.body(),
        }  # fmt: skip

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One streamed chunk around its choices."""
        return {"id": self.id, "object": self.chunk_name, **self._common, "choices": choices}

    def chunk_choice(
        self, index: int, content: dict[str, Any], token_ids: tuple[int, ...] = (), ended: Choice | None = None
    ) -> dict[str, Any]:
        """One choice of a chunk; ``ended`` is the choice when this is its last chunk."""
        body = {"index": index, **content, **_ending(ended or Choice())}
        if self.return_token_ids:
            body["token_ids"] = list(token_ids)
        return body


class CompletionBodies(Bodies):
    """/v1/completions."""

    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def whole_choice(self, generation: Generation, index: int) -> dict[str, Any]:
        """``text``."""
        return self.text_chunk("".join(generation.choices[index].text))

    def first_chunks(self, generation: Generation, index: int) -> list[dict[str, Any]]:
        """None are needed, unless the prompt's ids were asked for."""
        if not self.return_token_ids:
            return []
        return [{**self.text_chunk(""), "prompt_token_ids": prompt_of(generation, index)}]

    def text_chunk(self, text: str) -> dict[str, Any]:
        """``text``, and no logprobs."""
        return {"text": text, "logprobs": None}


class ChatBodies(Bodies):
    """/v1/chat/completions."""

    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole_choice(self, generation: Generation, index: int) -> dict[str, Any]:
        """``message``."""
        content = "".join(generation.choices[index].text)
        return {"message": {"role": "assistant", "content": content, "refusal": None}, "logprobs": None}

    def first_chunks(self, generation: Generation, index: int) -> list[dict[str, Any]]:
        """The role goes first, with no text."""
        first: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        if self.return_token_ids:
            first["prompt_token_ids"] = prompt_of(generation, index)
        return [first]

    def text_chunk(self, text: str) -> dict[str, Any]:
        """``delta``."""
        return {"delta": {"content": text} if text else {}, "logprobs": None}


def prompt_of(generation: Generation, index: int) -> list[int]:
    """The prompt of a choice: each prompt has equally many choices, in order."""
    per_prompt = len(generation.choices) // len(generation.prompts)
    return list(generation.prompts[index // per_prompt])


def _ending(choice: Choice) -> dict[str, Any]:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
