"""Requests to the engine, its outputs, and the per-sequence records that compiled kernels update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Generic, NamedTuple, TypeVar

import numpy as np

from ssd.config import SamplingParams
from ssd.drafting.draft_records import NUM_SOURCES, DraftRecord, DraftRow, source_name
from ssd.errors import RequestError
from ssd.jit.addresses import Address, Float64, Int64, Int64s, Record, Records
from ssd.model.sampling.sampler import TokenLogprobs
from ssd.retrieval.namespace import DEFAULT_POLICY, NamespacePolicy

N = TypeVar("N", int, float)


class FinishReason(StrEnum):
    """The reason why an output ended. "stop" and "length" are values of the OpenAI API."""

    STOP = "stop"
    """An end-of-text token, stop token or stop string was generated."""
    LENGTH = "length"
    """``max_tokens`` or the model's context length was reached."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """The engine failed on this request; ``RequestOutput.error`` has the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt to complete once, with the sampling parameters and settings of the request.

    Attributes:
        request_id: The id, unique for the life of the engine.
        prompt_token_ids: The token ids of the prompt.
        sampling: The sampling parameters.
        choice_index: The index of the output, if several requests complete one prompt with one seed (``n``). The index
            makes their outputs differ.
        noise_stream: The number of the noise stream. Requests with the same stream share sampling noise if
            ``EngineConfig.coupled_streams`` is set; None draws a stream at random.
        namespace: The namespace of the cache that drafts come from and to which the text is added; None uses no cache.
        prediction_token_ids: The client's prediction of the output. Only this request gets drafts from it.
        priority: The priority, -100..100; lower is more urgent, 0 is the default.
        namespace_policy: The settings of the namespace's cache; those of the latest request apply.
        cache_salt: The KV cache is reused only among requests with the same salt.
        tenant: The name of the tenant, None for requests without one. Free slots are given to the tenants in turn.
        max_running: The maximum number of running requests of the tenant; None means the number of slots.
        prefix_scope: A key that takes the place of namespace and tenant for reuse of the KV cache: requests with the
            same key, salt and adapter reuse each other's KV cache.
        num_speculative_tokens: The maximum draft length, if lower than the engine's; 0 disables drafts.
        record_steps: Whether ``RequestStats.steps`` lists every draft.
        learn: Whether the text is added to the namespace's cache; the request gets drafts in any case.
        adapter: The name of the LoRA adapter; None uses the model itself. Requests with different adapters share the
            text of a namespace.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    choice_index: int = 0
    noise_stream: int | None = None
    namespace: str | None = "default"
    prediction_token_ids: tuple[int, ...] = ()
    priority: int = 0
    namespace_policy: NamespacePolicy = DEFAULT_POLICY
    cache_salt: str | None = None
    tenant: str | None = None
    max_running: int | None = None
    prefix_scope: str | None = None
    num_speculative_tokens: int | None = None
    record_steps: bool = False
    learn: bool = True
    adapter: str | None = None


def counts_by_source(drafted: Int64s, accepted: Int64s) -> list[tuple[str, int, int]]:
    """Return a tuple (source name, draft tokens, accepted tokens) for each draft source that proposed tokens.

    ``drafted`` and ``accepted`` are the numbers of tokens, int64[NUM_SOURCES], indexed by the number of the source.
    """
    rows = zip(range(NUM_SOURCES), drafted, accepted, strict=True)
    return [(source_name(number), int(of_all), int(right)) for number, of_all, right in rows if of_all]


class RowCounts(Record):
    """The counters of a request. They are at a fixed address, because kernels update them after every forward pass."""

    num_output_tokens: Int64
    num_verify_steps: Int64
    num_drafts: Int64
    num_draft_tokens: Int64
    num_accepted_tokens: Int64
    first_token_s: Float64
    last_token_s: Float64
    by_source: Annotated[Int64s, np.int64, NUM_SOURCES]


class SequenceRecord(Record):
    """The state of a sequence that compiled kernels update, in a record at a fixed address.

    It includes the prepared draft: a long draft for several forward passes, made ahead while a pass runs. The prepared
    draft consists of the draft being verified, the token that the target probably adds after it, the draft of the pass
    after that, and so on.
    """

    tokens: Address  # the address of prompt and output, int32[end], of which the first ``length`` tokens exist
    length: Int64
    end: Int64  # the maximum number of tokens
    stop_ids: Address  # the address of the token ids that end the output, int32[num_stop_ids]
    num_stop_ids: Int64
    uses_fast_path: Int64  # whether kernels may append tokens that do not end the output
    counts: RowCounts
    max_draft_length: Int64
    allow_tree: Int64
    temperature_bucket: Int64  # the bucket of the temperature, see `temperature_bucket_of`
    num_empty_drafts: Int64  # the number of consecutive empty drafts
    draft_row: DraftRow
    # The drafts to verify, in two buffers, because the next pass's draft is made before the last one is counted.
    drafts: Annotated[Sequence[DraftRecord], DraftRecord, 2]
    was_drafted: Annotated[Int64s, np.int64, 2]  # whether a draft was requested, for each buffer
    prepared: DraftRecord
    # The number of tokens of the context at which the next part of ``prepared`` fits; 0 if nothing is prepared, -1 if
    # ``prepared`` differs from the draft in flight.
    prepared_length: Int64
    # The index in ``prepared`` of the next part; the token before it must be the last token of the context.
    prepared_begin: Int64
    prepared_offset: Int64  # the index in ``prepared`` of the draft in flight
    used_offset: Int64  # the index in ``prepared`` of the current draft if it comes from there, else 0


class _RecordField(Generic[N]):
    """An attribute of `RequestStats` whose value is stored in the ``counts`` record, which kernels update."""

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, stats: RequestStats, _owner: type | None = None) -> N:
        found: N = getattr(stats.counts, self._name)
        return found

    def __set__(self, stats: RequestStats, value: N) -> None:
        setattr(stats.counts, self._name, value)


class RequestStats:
    """Statistics of one request.

    Accepted tokens are draft tokens that became output. Times are values of ``time.perf_counter``; 0 means that the
    event has not happened yet.

    Attributes:
        num_cached_tokens: The number of prompt tokens whose KV cache was reused.
        steps: For each draft, a tuple (draft tokens, accepted tokens); None unless ``Request.record_steps``.
        is_coupled: Whether the request is sampled with noise that other requests share.
        submitted_s: The time of submission.
        started_s: The time of the first assignment of a slot.
        first_token_s: The time of the first token.
        last_token_s: The time of the last token.
    """

    __slots__ = (
        "counts",
        "is_coupled",
        "num_cached_tokens",
        "num_prompt_tokens",
        "started_s",
        "steps",
        "submitted_s",
    )
    num_output_tokens = _RecordField[int]()
    num_verify_steps = _RecordField[int]()
    num_drafts = _RecordField[int]()
    num_draft_tokens = _RecordField[int]()
    num_accepted_tokens = _RecordField[int]()
    first_token_s = _RecordField[float]()
    last_token_s = _RecordField[float]()

    def __init__(self, num_prompt_tokens: int = 0, counts: RowCounts | None = None) -> None:
        self.counts = Records(RowCounts)[0] if counts is None else counts
        self.num_prompt_tokens, self.num_cached_tokens = num_prompt_tokens, 0
        self.steps: list[tuple[int, int]] | None = None
        self.submitted_s = self.started_s = 0.0
        self.is_coupled = False

    def __repr__(self) -> str:
        names = (
            "num_prompt_tokens num_cached_tokens num_output_tokens num_verify_steps num_draft_tokens "
            "num_accepted_tokens accepted_by_source"
        )
        counts = ", ".join(f"{name}={getattr(self, name)}" for name in names.split())
        seconds = f"{self.last_token_s - self.submitted_s:.3f}" if self.last_token_s else "unknown"
        return f"RequestStats({counts}, seconds={seconds})"

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """The number of accepted draft tokens by their source, e.g. the context or the cache, see ``Draft.source``."""
        found = counts_by_source(self.counts.by_source, self.counts.by_source)
        return {name: accepted for name, _, accepted in found}


class VerifiedDraft(NamedTuple):
    """The draft of a request in one forward pass: where it came from, and how many of its tokens were accepted."""

    number: int  # the number of the request's forward pass, from 1
    source: str  # as in ``Draft.source``
    num_drafted: int
    num_accepted: int


@dataclass(slots=True, kw_only=True)  # not frozen, because one is created per row and step
class RequestOutput:
    """The new output of one request in one engine step.

    Attributes:
        request_id: The id of the request.
        token_ids: The new tokens, including an end-of-text or stop token.
        text: The new text that is safe to send: complete characters, without a suffix that could begin a stop string.
            Special tokens and, by default, the stop string are left out. The last output has the rest of the text.
        finish_reason: Why the request ended; None while it runs.
        stop_reason: The stop string or stop token id that ended the request; None for end of text.
        error: The message of a failure.
        refusal: The exception, if the failure is the client's fault.
        logprobs: The log-probabilities of ``token_ids``; None if they were not requested.
        prompt_logprobs: In the first output, the log-probability of each prompt token (None for the first one), if
            requested.
        draft: The draft of the forward pass that produced the tokens; None if no pass did.
        stats: The statistics of the request.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    refusal: RequestError | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    draft: VerifiedDraft | None = None
    stats: RequestStats
