"""Response bodies, whole and in chunks: what all have in common, and those of completions."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from server.answers.draft_metrics import draft_counts
from server.answers.logprobs import LogprobsWriter
from server.base.record import current_record
from server.base.settings import ServerSettings
from server.running.generation import Choice, Generation

if TYPE_CHECKING:
    from ssd.engine import RequestOutput

_FEW_CHOICES = 16
_GOING_ON = Choice()


class Bodies(ABC):
    """Writes the bodies of one HTTP request; all share its id and time."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(
        self,
        settings: ServerSettings,
        *,
        return_token_ids: bool = False,
        logprobs: LogprobsWriter | None = None,
        prompt_logprobs: LogprobsWriter | None = None,
    ) -> None:
        """``logprobs``, ``prompt_logprobs`` : write them; None where they were not asked for."""
        # As vLLM does, so that an answer is found by the id of its request, which clients choose: two may be alike.
        self.id = self.id_prefix + (current_record().request_id or uuid.uuid4().hex)
        self.return_token_ids = return_token_ids
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self._spec_decode_metrics = settings.spec_decode_metrics
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
    def text_chunk(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """The content fields of a chunk with what a step produced for a choice; its text may be empty."""

    def text_chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """`text_chunk` as several chunks, where clients expect that; none where there is nothing to show yet."""
        return [self.text_chunk(index, output)]

    def ending(self, _index: int, choice: Choice) -> dict[str, Any]:
        """How a choice ended; nulls before."""
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def is_shown(self, output: RequestOutput) -> bool:
        """Whether an output has anything that this request's client asked to see."""
        asked_for_tokens = self.return_token_ids or self.logprobs is not None
        return bool(output.text or output.finish_reason or (asked_for_tokens and output.token_ids))

    def is_short(self, generation: Generation) -> bool:
        """Whether the whole answer is little but the texts of a few choices."""
        is_plain = self.logprobs is None and self.prompt_logprobs is None and not self.return_token_ids
        return is_plain and len(generation.choices) <= _FEW_CHOICES

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        choices = []
        for index, choice in enumerate(generation.choices):
            body = {"index": index, **self.whole_choice(generation, index), **self.ending(index, choice)}
            if self.return_token_ids:
                body |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt_of(generation, index)}
            choices.append(body)
        return {
            "id": self.id, "object": self.object_name, **self._common, "choices": choices,
            "usage": generation.usage.body(), **self.whole_extras(generation), **self.draft_metrics(generation),
        }  # fmt: skip

    def draft_metrics(self, generation: Generation) -> dict[str, Any]:
        """The field ``metrics`` of an answer that has ended, where the operator lets answers have it."""
        if self._spec_decode_metrics == "none" or len(generation.choices) != 1:
            return {}
        found = draft_counts(generation.choices[0].stats, is_detailed=self._spec_decode_metrics == "detailed")
        return {} if found is None else {"metrics": {"speculative_decoding": found}}

    def whole_extras(self, _generation: Generation) -> dict[str, Any]:
        """Fields beside the choices."""
        return {}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One streamed chunk around its choices."""
        return {"id": self.id, "object": self.chunk_name, **self._common, "choices": choices}

    def chunk_choice(
        self, index: int, content: dict[str, Any], token_ids: tuple[int, ...] = (), ended: Choice | None = None
    ) -> dict[str, Any]:
        """One choice of a chunk; ``ended`` is the choice when this is its last chunk."""
        body = {"index": index, **content, **self.ending(index, ended or _GOING_ON)}
        if self.return_token_ids:
            body["token_ids"] = list(token_ids)
        return body


class CompletionBodies(Bodies):
    """/v1/completions. ``echo`` : the texts of the prompts where they are to be repeated."""

    id_prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def __init__(self, settings: ServerSettings, *, echo: Sequence[str] | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        self._echo = echo
        self._offsets: dict[int, int] = {}

    def whole_choice(self, generation: Generation, index: int) -> dict[str, Any]:
        """``text`` and ``logprobs``, the prompt's before them if it is repeated."""
        choice = generation.choices[index]
        text = self._echoed(generation, index) + "".join(choice.text)
        body: dict[str, Any] = {"text": text, "logprobs": None}
        if self.logprobs is not None:
            before = choice.prompt_logprobs if self._echo is not None else ()
            entries = [*before, *choice.logprobs]
            body["logprobs"] = self.logprobs.completion(entries, prompt_of(generation, index)[0], 0)
        if self.prompt_logprobs is not None:
            body["prompt_logprobs"] = self.prompt_logprobs.prompt(choice.prompt_logprobs)
        return body

    def first_chunks(self, generation: Generation, index: int) -> list[dict[str, Any]]:
        """The prompt, where its text or its ids were asked for."""
        if not self.return_token_ids and self._echo is None:
            return []
        prompt = prompt_of(generation, index)
        body: dict[str, Any] = {"text": self._echoed(generation, index), "logprobs": None}
        if self.return_token_ids:
            body["prompt_token_ids"] = prompt
        if self.logprobs is not None and self._echo is not None:
            entries = generation.choices[index].prompt_logprobs
            body["logprobs"] = self.logprobs.completion(entries, prompt[0], 0)
            self._offsets[index] = self.logprobs.length_of(prompt)
        return [body]

    def text_chunk(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """``text`` and ``logprobs``."""
        body: dict[str, Any] = {"text": output.text, "logprobs": None}
        if self.logprobs is not None:
            offset = self._offsets.get(index, 0)
            body["logprobs"] = self.logprobs.completion(output.logprobs or (), None, offset)
            self._offsets[index] = offset + self.logprobs.length_of(output.token_ids)
        return body

    def _echoed(self, generation: Generation, index: int) -> str:
        return "" if self._echo is None else self._echo[_prompt_index(generation, index)]


def prompt_of(generation: Generation, index: int) -> tuple[int, ...]:
    """The prompt of a choice."""
    return generation.prompts[_prompt_index(generation, index)]


def _prompt_index(generation: Generation, index: int) -> int:
    """Each prompt has equally many choices, in order."""
    return index // (len(generation.choices) // len(generation.prompts))
