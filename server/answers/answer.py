"""HTTP responses with generated text, complete or streamed: a base class for all APIs, and /v1/completions."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from server.answers.tokens import LogprobsWriter, ShownTokens, TokenAttribution, WrittenText
from server.answers.wire import encode_events
from server.base.errors import error_body
from server.base.request_record import current_record
from server.base.settings import ServerSettings
from server.running.generation import ChoiceState, Generation, Usage
from server.schema.body import Body, renamed
from server.schema.generate import StreamOptions
from ssd.errors import RequestError

if TYPE_CHECKING:
    from ssd.engine import RequestOutput, RequestStats, VerifiedDraft


_FEW_CHOICES = 16
_GOING_ON = ChoiceState()


def draft_counts(stats: RequestStats | None, *, is_detailed: bool) -> dict[str, Any] | None:
    """Return the draft statistics of one output for the response field ``metrics``; None if there are no statistics.

    With ``is_detailed``, the numbers of drafted and accepted tokens of each verification pass are included.
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


def _describe_draft(draft: VerifiedDraft, texts: list[str]) -> dict[str, Any]:
    """Return the field ``draft`` of a streamed chunk (docs/reference/api.md)."""
    return {
        "pass": draft.number,
        "source": draft.source if draft.num_drafted else None,
        "num_drafted": draft.num_drafted,
        "num_accepted": draft.num_accepted,
        "texts": texts,
    }


class Answer(ABC):
    """Serializes the response to one generation request, either as one JSON body or as server-sent events.

    Each API has a subclass. ``end`` is the last event of a stream, and ``keep_alive`` is sent while there is no output.
    """

    id_prefix: str
    object_name: str
    chunk_name: str
    end = b"data: [DONE]\n\n"
    keep_alive = b": keep-alive\n\n"

    generation: Generation
    spelling: TokenAttribution
    """Finds the text of each token of a choice. It must be set before the response is serialized."""

    def __init__(
        self,
        settings: ServerSettings,
        asked: Body,
        *,
        return_token_ids: bool = False,
        logprobs: LogprobsWriter | None = None,
        prompt_logprobs: LogprobsWriter | None = None,
    ) -> None:
        # As in vLLM, the response's id contains the request id, which the client may choose, so it may not be unique.
        self.id = self.id_prefix + (current_record().request_id or uuid.uuid4().hex)
        self.names = asked.chat_names
        """Maps field names of chat completions to field names of the client's API, for error messages."""
        self.return_token_ids, self.logprobs, self.prompt_logprobs = return_token_ids, logprobs, prompt_logprobs
        self.pad = False
        self._options = StreamOptions()
        self._has_begun = False
        self._spec_decode_metrics = settings.spec_decode_metrics
        self._common: dict[str, Any] = {
            "created": int(time.time()),
            "model": settings.adapter_of(asked.model) or settings.model_name,
            "system_fingerprint": settings.system_fingerprint,
        }

    @property
    def is_short(self) -> bool:
        """Whether the response is small enough to be serialized on the event loop."""
        is_plain = self.logprobs is None and self.prompt_logprobs is None and not self.return_token_ids
        return is_plain and len(self.generation.choices) <= _FEW_CHOICES

    def whole(self) -> dict[str, Any]:
        """Return the complete JSON body of a response that is not streamed."""
        choices = []
        for index, choice in enumerate(self.generation.choices):
            body = {"index": index, **self.whole_choice(index), **self.ending(index, choice)}
            if self.return_token_ids:
                body |= {"token_ids": choice.token_ids, "prompt_token_ids": self.prompt_of(index)}
            choices.append(body)
        return {
            "id": self.id,
            "object": self.object_name,
            **self._common,
            "choices": choices,
            "usage": self.generation.usage.body(),
            **self.whole_extras(),
            **self._draft_metrics(),
        }

    @abstractmethod
    def whole_choice(self, index: int) -> dict[str, Any]:
        """Return the text of a finished choice in the JSON fields of this API."""

    def whole_extras(self) -> dict[str, Any]:
        return {}

    def ending(self, _index: int, choice: ChoiceState) -> dict[str, Any]:
        refused = {} if choice.refusal is None else error_body(choice.refusal)
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason, **refused}

    def prompt_of(self, index: int) -> tuple[int, ...]:
        return self.generation.prompts[self.prompt_index(index)]

    def prompt_index(self, index: int) -> int:
        """Return the index of the prompt that a choice belongs to. Every prompt has the same number of choices."""
        return index // (len(self.generation.choices) // len(self.generation.prompts))

    def _draft_metrics(self) -> dict[str, Any]:
        choices = self.generation.choices
        if self._spec_decode_metrics == "none" or len(choices) != 1:
            return {}
        found = draft_counts(choices[0].stats, is_detailed=self._spec_decode_metrics == "detailed")
        return {} if found is None else {"metrics": {"speculative_decoding": found}}

    def stream(self, options: StreamOptions) -> None:
        self.pad, self._options = bool(options.include_obfuscation), options

    async def beginning(self) -> bytes:
        return b""

    async def opening(self, index: int, usage: Usage | None = None) -> bytes:
        """Return the server-sent events that precede the text of a choice, e.g. the chunk that repeats the prompt.

        The first call also returns the first chunk of every choice, e.g. with its role. ``usage`` contains the token
        counts for these events (default: the current counts of the generation).
        """
        begun = () if self._has_begun else range(len(self.generation.choices))
        self._has_begun = True

        def write() -> bytes:
            chunks = [self._choice(place, each) for place in begun for each in self.first_chunks(place)]
            return self._events([*chunks, *(self._choice(index, each) for each in self.prompt_chunks(index))], usage)

        return await self.serialize(write)

    async def serialize(self, write: Callable[[], bytes]) -> bytes:
        """Serialize the response by calling ``write``, on another thread if the response is long."""
        return write() if self.is_short else await self.generation.aside.run(write)

    def piece(self, index: int, output: RequestOutput, usage: Usage | None = None) -> bytes:
        """Return the server-sent events for new output of a choice.

        The finish reason is sent in a separate event without text. ``usage`` contains the token counts for these events
        (default: the current counts of the generation).
        """
        choices = []
        if contents := self.text_chunks(index, output):
            *first, last = contents
            choices = [self._choice(index, content) for content in first]
            choices.append(self._choice(index, last, output.token_ids))
            if self._options.include_drafts:
                texts = self.spelling.texts(index, output.token_ids, output.text)
                choices[-1]["draft"] = None if output.draft is None else _describe_draft(output.draft, texts)
        if output.finish_reason is not None:  # in a chunk without text: some clients drop the last chunk's text
            choices.append(self._choice(index, self.empty_chunk(), ended=self.generation.choices[index]))
        return self._events(choices, usage)

    @abstractmethod
    def first_chunks(self, index: int) -> list[dict[str, Any]]:
        """Return the JSON fields of the chunks that are sent for each choice at the beginning, e.g. with its role."""

    def prompt_chunks(self, _index: int) -> list[dict[str, Any]]:
        """Return the JSON fields of the chunks that repeat the prompt before the text of a choice."""
        return []

    @abstractmethod
    def empty_chunk(self) -> dict[str, Any]: ...

    @abstractmethod
    def text_chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the JSON fields of the chunks for new output of a choice; may be empty."""

    def needs_chunk(self, output: RequestOutput, shown: ShownTokens | None) -> bool:
        """Return whether output without text must still be sent as a chunk.

        That is the case if the chunk contains token ids, log-probabilities or draft details, or if the stream is
        obfuscated.
        """
        shows_draft = self._options.include_drafts and output.draft is not None
        has_tokens = (self.return_token_ids and output.token_ids) or (shown is not None and shown.entries)
        return bool(has_tokens or shows_draft or self.pad)

    def shown_tokens(self, index: int, part: RequestOutput | ChoiceState) -> ShownTokens | None:
        """Return the tokens whose log-probabilities are reported with an output; None if not requested."""
        if self.logprobs is None:
            return None
        if self.logprobs.every_token:
            return ShownTokens(part.logprobs or ())
        sampling = self.generation.sampling
        hides_ending = sampling is not None and not sampling.include_stop_str_in_output
        return self.spelling.shown(index, part, hides_ending=hides_ending)

    async def closing(self) -> bytes:
        if not self._options.include_usage:
            return b""
        last = {**self._chunk([]), "usage": self.generation.usage.body(), **self._draft_metrics()}
        return encode_events([("", last)], pad=self.pad)

    def failure(self, error: Exception) -> bytes:
        """Return the server-sent event for an error. Its message names an invalid field as the client's API does."""
        return self.failed(renamed(error, self.names) if isinstance(error, RequestError) else error)

    def failed(self, error: Exception) -> bytes:
        return encode_events([("", error_body(error))], pad=False)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": self.chunk_name, **self._common, "choices": choices}

    def _choice(
        self, index: int, content: dict[str, Any], token_ids: tuple[int, ...] = (), ended: ChoiceState | None = None
    ) -> dict[str, Any]:
        body = {"index": index, **content, **self.ending(index, ended or _GOING_ON)}
        if self.return_token_ids:
            body["token_ids"] = list(token_ids)
        return body

    def _events(self, choices: list[dict[str, Any]], usage: Usage | None) -> bytes:
        chunks = [self._chunk([choice]) for choice in choices]
        if self._options.include_usage:
            has_usage = self._options.continuous_usage_stats
            so_far = (usage or self.generation.usage).body() if has_usage else None
            chunks = [{**chunk, "usage": so_far} for chunk in chunks]
        return encode_events([("", chunk) for chunk in chunks], pad=self.pad)


async def events(answer: Answer, keep_alive_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of a streamed response: chunks, usage if requested, and the end mark (``[DONE]``).

    A keep-alive event is sent after ``keep_alive_s`` seconds without output.
    """
    begun: set[int] = set()
    ready = bytearray()
    try:
        if beginning := await answer.beginning():
            yield beginning
        async for arrived in answer.generation.outputs(wait_s=keep_alive_s):
            if arrived is None:
                yield answer.keep_alive
                continue
            index, output = arrived
            if index not in begun:
                begun.add(index)
                ready += await answer.opening(index)
            ready += answer.piece(index, output)
            # Outputs that arrived together are sent together, because a write costs more than serializing an event.
            if ready and not answer.generation.has_more_now:
                yield bytes(ready)
                ready.clear()
        ready += await answer.closing()
    except Exception as error:
        ready += answer.failure(error)
    yield bytes(ready + answer.end)


class CompletionAnswer(Answer):
    """The response of /v1/completions. ``echo`` contains the texts of the prompts if the response must repeat them."""

    id_prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, settings: ServerSettings, asked: Body, *, echo: Sequence[str] | None = None, **options: Any
    ) -> None:
        super().__init__(settings, asked, **options)
        self._echo = echo
        self._written: dict[int, WrittenText] = defaultdict(WrittenText)

    def whole_choice(self, index: int) -> dict[str, Any]:
        choice = self.generation.choices[index]
        text = self._echoed_text(index) + "".join(choice.text)
        body: dict[str, Any] = {"text": text, "logprobs": None}
        if self.logprobs is not None and (shown := self.shown_tokens(index, choice)) is not None:
            before = choice.prompt_logprobs if self._echo is not None else ()
            entries, first = [*before, *shown.entries], self.prompt_of(index)[0]
            body["logprobs"] = self.logprobs.completion(entries, first, text, WrittenText(), shown.cut)
        if self.prompt_logprobs is not None:
            body["prompt_logprobs"] = self.prompt_logprobs.prompt(choice.prompt_logprobs)
        return body

    def first_chunks(self, _index: int) -> list[dict[str, Any]]:
        return [self.empty_chunk()] if len(self.generation.choices) > 1 else []

    def prompt_chunks(self, index: int) -> list[dict[str, Any]]:
        if not self.return_token_ids and self._echo is None:
            return []
        prompt = self.prompt_of(index)
        body: dict[str, Any] = {"text": self._echoed_text(index), "logprobs": None}
        if self.return_token_ids:
            body["prompt_token_ids"] = prompt
        if self.logprobs is not None and self._echo is not None:
            entries = self.generation.choices[index].prompt_logprobs
            body["logprobs"] = self.logprobs.completion(entries, prompt[0], body["text"], self._written[index])
        return [body]

    def empty_chunk(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def text_chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        shown = self.shown_tokens(index, output)
        if not output.text and not self.needs_chunk(output, shown):
            return []
        body: dict[str, Any] = {"text": output.text, "logprobs": None}
        if self.logprobs is not None and shown is not None:
            written = self._written[index]
            body["logprobs"] = self.logprobs.completion(shown.entries, None, output.text, written, shown.cut)
        return [body]

    def _echoed_text(self, index: int) -> str:
        return "" if self._echo is None else self._echo[self.prompt_index(index)]
