"""Response bodies, whole and in chunks: what all have in common, and those of completions."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pydantic_core

from server.base.record import current_record
from server.base.settings import ServerSettings
from server.running.generation import Choice, Generation
from ssd.text.token_text import TokenTexts

if TYPE_CHECKING:
    from ssd.engine import RequestOutput, RequestStats, TokenLogprobs


_PIECE = 256
"""Elements of a list that are written at once: below a millisecond even where each is a token with its alternatives."""


def json_text(value: Any) -> bytes:
    """``value`` as JSON, which the compact form of `pydantic_core.to_json` equals."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        before = b"{"
        for name, each in value.items():
            yield before + pydantic_core.to_json(name) + b":"
            yield from _pieces(each)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, (list, tuple)) and len(value) > _PIECE:
        for begin in range(0, len(value), _PIECE):
            yield (b"," if begin else b"[") + pydantic_core.to_json(value[begin : begin + _PIECE])[1:-1]
        yield b"]"
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):  # choices, each of any length
        before = b"["
        for each in value:
            yield before
            yield from _pieces(each)
            before = b","
        yield b"]"
    else:
        yield pydantic_core.to_json(value)


def draft_counts(stats: RequestStats | None, *, is_detailed: bool) -> dict[str, Any] | None:
    """Counts over the passes that had a draft; None where nothing was kept. O(passes).

    ``is_detailed`` : also of each draft, in order, how long it was and how much was accepted.
    """
    if stats is None or stats.steps is None:
        return None
    drafted = [length for length, _ in stats.steps]
    accepted = [length for _, length in stats.steps]
    histogram = [0] * (max(accepted, default=0) + 1)
    for length in accepted:
        histogram[length] += 1
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else None,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if drafted else None,
        "acceptance_histogram": histogram if accepted else [],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
    }
    if is_detailed:
        found |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return found


class LogprobsWriter:
    """Writes those of one HTTP request. Not thread-safe."""

    def __init__(self, texts: TokenTexts, *, as_token_ids: bool) -> None:
        """``as_token_ids`` : tokens are written as "token_id:123", which is unambiguous where their text is not."""
        self._texts = texts
        self._as_token_ids = as_token_ids

    def completion(self, entries: Sequence[TokenLogprobs | None], first: int | None, offset: int) -> dict[str, Any]:
        """``logprobs`` of /v1/completions.

        entries : None for a prompt's first token, which nothing predicts and which is then token ``first``.
        offset : characters of the text before the first token. Each entry of ``top_logprobs`` holds the token itself as
        well; where several tokens have the same text, the most probable.
        """
        token_ids = [first if entry is None else entry.token_id for entry in entries]
        tokens = [self._text(token_id) if token_id is not None else "" for token_id in token_ids]
        offsets = []
        for token_id in token_ids:
            offsets.append(offset)
            offset += self._texts.shown_length(token_id) if token_id is not None else 0
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """``logprobs`` of a chat completion's choice."""
        content = [
            {**self._token(entry.token_id, entry.logprob), "top_logprobs": [self._token(*each) for each in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """``prompt_logprobs``: for each token an object by token id, the token itself first."""
        return [None if entry is None else self._by_id(entry) for entry in entries]

    def _by_id(self, entry: TokenLogprobs) -> dict[str, Any]:
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
        chosen = {entry.token_id: (entry.logprob, entry.rank)}
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self._text(token_id)}
            for token_id, (logprob, rank) in {**chosen, **ranked, **chosen}.items()
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in sorted({*entry.top, (entry.token_id, entry.logprob)}, key=lambda pair: -pair[1]):
            top.setdefault(self._text(token_id), logprob)
        return top

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token_id), "logprob": logprob, "bytes": list(self._texts.bytes_of(token_id))}

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._texts.text_of(token_id)

    def length_of(self, token_ids: Sequence[int]) -> int:
        """Characters of the text they are."""
        return sum(map(self._texts.shown_length, token_ids))


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
