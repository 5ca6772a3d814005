"""Inputs and outputs of the engine, and the records of a request that kernels update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Generic, NamedTuple, TypeVar

import numpy as np

from ssd.config import SamplingParams
from ssd.drafting.draft_kernel import DraftRow
from ssd.drafting.draft_records import NUM_SOURCES, DraftRecord, source_name
from ssd.errors import RequestError
from ssd.jit.addresses import Address, Float64, Int64, Int64s, Record, Records
from ssd.model.sampling.sampler import TokenLogprobs
from ssd.retrieval.namespace import DEFAULT_POLICY, NamespacePolicy

N = TypeVar("N", int, float)


class FinishReason(StrEnum):
    """The reason why a completion ended; the values are OpenAI's."""

    STOP = "stop"
    """The end of text, a stop token or a stop string was generated."""
    LENGTH = "length"
    """``max_tokens`` or the model's context length was reached."""
    CANCELLED = "cancelled"
    """The client disconnected or cancelled the request."""
    ERROR = "error"
    """The engine failed on this request; ``RequestOutput.error`` has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to compute.

    Attributes:
        request_id: The id, unique for the life of the engine.
        prompt_token_ids: The prompt.
        sampling: The sampling parameters.
        choice_index: The number of the choice; part of the sampling noise's key, so that ``n`` choices of one seed
            differ.
        noise_stream: The noise stream, >= 0, if sampling is coupled; None draws one at random.
        namespace: The namespace of the cache that drafts come from and text is added to; None uses no cache.
        prediction_token_ids: The client's prediction of the output; only this request drafts from it.
        priority: The priority, -100..100; lower is more urgent, 0 is the default.
        namespace_policy: The size of the namespace's cache and its prebuilt caches; the last request of a namespace
            decides.
        cache_salt: Reuse of the KV cache is limited to requests with the same salt, namespace and tenant.
        tenant: An opaque name of the tenant, None for requests without one. Tenants take turns.
        max_running: The maximum number of running requests of the tenant; None means the number of slots.
        prefix_scope: If given, the KV cache is reused among requests with the same scope and salt, whatever their
            namespace and tenant.
        num_speculative_tokens: The maximum draft length, if lower than the engine's; 0 disables drafts.
        record_steps: Whether the statistics list every draft.
        learn: Whether the text is added to the namespace's cache; the request gets drafts in any case.
        adapter: The LoRA adapter; None is the model itself. Caches are separated only by namespace.
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
    """Return (name, drafted tokens, accepted tokens) of each source with drafted tokens.

    Both arguments are indexed by the number of the source.
    """
    rows = zip(range(NUM_SOURCES), drafted, accepted, strict=True)
    return [(source_name(number), int(of_all), int(right)) for number, of_all, right in rows if of_all]


class RowCounts(Record):
    """The counters of a `RequestStats` that every pass updates, as kernels see them."""

    num_output_tokens: Int64
    num_verify_steps: Int64
    num_drafts: Int64
    num_draft_tokens: Int64
    num_accepted_tokens: Int64
    first_token_s: Float64
    last_token_s: Float64
    by_source: Annotated[Int64s, np.int64, NUM_SOURCES]


class Row(Record):
    """The record of a sequence that kernels update, at one address for its life.

    One long prepared draft may serve several passes: it consists of the draft in flight, the target's next token and
    the next draft, and so on.

    Attributes:
        tokens: The address of prompt and output, int32[end], of which the first ``length`` tokens exist.
        length: The number of tokens.
        end: The maximum number of tokens.
        prompt_length: The number of prompt tokens.
        stop_ids: The address of the token ids that end the output, int32[num_stop_ids].
        num_stop_ids: The number of these ids.
        uses_fast_path: Whether tokens that do not end the output only need to be appended.
        counts: The counters of the request.
        max_draft_length: The maximum draft length of a pass.
        allow_tree: Whether drafts may be trees.
        temperature_bucket: The bucket of the temperature, see `temperature_bucket_of`.
        num_empty_drafts: The number of empty drafts in a row.
        draft_row: The drafting state.
        drafts: The drafts to verify, in two buffers, because the next pass's draft is made before the last one is
            counted.
        was_drafted: Whether a draft was requested, for each buffer.
        prepared: The prepared draft.
        prepared_length: The number of tokens of the context at which the next part of ``prepared`` fits; 0 if nothing
            is prepared, -1 if ``prepared`` differs from the draft in flight.
        prepared_begin: The index in ``prepared`` of the next part; the token before it must be the last token of the
            context.
        prepared_offset: The index in ``prepared`` of the draft in flight.
        used_offset: The index in ``prepared`` of the current draft if it comes from there, else 0.
    """

    tokens: Address
    length: Int64
    end: Int64
    prompt_length: Int64
    stop_ids: Address
    num_stop_ids: Int64
    uses_fast_path: Int64
    counts: RowCounts
    max_draft_length: Int64
    allow_tree: Int64
    temperature_bucket: Int64
    num_empty_drafts: Int64
    draft_row: DraftRow
    drafts: Annotated[Sequence[DraftRecord], DraftRecord, 2]
    was_drafted: Annotated[Int64s, np.int64, 2]
    prepared: DraftRecord
    prepared_length: Int64
    prepared_begin: Int64
    prepared_offset: Int64
    used_offset: Int64


class _RecordField(Generic[N]):
    """An attribute that is stored in ``counts``."""

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, stats: RequestStats, _owner: type | None = None) -> N:
        found: N = getattr(stats.counts, self._name)
        return found

    def __set__(self, stats: RequestStats, value: N) -> None:
        setattr(stats.counts, self._name, value)


class RequestStats:
    """Statistics of one request; accepted tokens are draft tokens that were emitted.

    Times are those of ``time.perf_counter``, 0 if the event has not happened yet.

    Attributes:
        num_cached_tokens: The number of prompt tokens whose KV cache was reused.
        steps: The drafted and the accepted tokens of every draft, if the request records them.
        is_coupled: Whether the request is sampled with shared noise.
        submitted_s: The time of submission.
        started_s: The time of the first admission.
        first_token_s: The time of the first token.
        last_token_s: The time of the last token.
    """

    __slots__ = (
        "counts", "is_coupled", "num_cached_tokens", "num_prompt_tokens", "started_s", "steps", "submitted_s",
    )  # fmt: skip
    num_output_tokens = _RecordField[int]()
    num_verify_steps = _RecordField[int]()
    num_drafts = _RecordField[int]()
    num_draft_tokens = _RecordField[int]()
    num_accepted_tokens = _RecordField[int]()
    first_token_s = _RecordField[float]()
    last_token_s = _RecordField[float]()

    def __init__(self, num_prompt_tokens: int = 0, counts: RowCounts | None = None) -> None:
        """Create statistics; ``counts`` is the record that passes update, or None for a new one."""
        self.counts = Records(RowCounts)[0] if counts is None else counts
        self.num_prompt_tokens, self.num_cached_tokens = num_prompt_tokens, 0
        self.steps: list[tuple[int, int]] | None = None
        self.submitted_s = self.started_s = 0.0
        self.is_coupled = False

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """The number of accepted tokens of each ``Draft.source``."""
        found = counts_by_source(self.counts.by_source, self.counts.by_source)
        return {name: accepted for name, _, accepted in found}


class VerifiedDraft(NamedTuple):
    """The result of verifying a request's draft.

    Attributes:
        number: The number of the pass among those of the request, from 1.
        source: The source, as in ``Draft.source``.
        num_drafted: The number of draft tokens.
        num_accepted: The number of accepted draft tokens, which are the first tokens of the output.
    """

    number: int
    source: str
    num_drafted: int
    num_accepted: int


@dataclass(slots=True, kw_only=True)  # not frozen, because one is created per row and step
class RequestOutput:
    """The output of one request in one step.

    Attributes:
        request_id: The id of the request.
        token_ids: The new tokens, the end-of-text or stop token included.
        text: The new text that is safe to send: complete characters without a possible beginning of a stop string.
            Special tokens and, by default, the stop string are left out. The last output has the rest of the text.
        finish_reason: Why the request ended; None while it runs.
        stop_reason: The stop string or stop token id that ended it; None for end of text.
        error: The reason of a failure.
        refusal: The exception, if the failure is the request's own fault.
        logprobs: The log-probabilities of ``token_ids``; None if they were not requested.
        prompt_logprobs: In the first output, the log-probability of each prompt token (None for the first one), if
            requested.
        draft: The draft of the pass that produced the tokens; None if no pass did.
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
