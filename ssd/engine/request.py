"""What goes into the engine and what comes out of it."""

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
    """Why a completion ended; the values are OpenAI's."""

    STOP = "stop"
    """End of text, a stop token or a stop string."""
    LENGTH = "length"
    """``max_tokens`` or the model's context is used up."""
    CANCELLED = "cancelled"
    """The client went away."""
    ERROR = "error"
    """The engine failed on this step, or the request cannot be followed further; ``RequestOutput.error`` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to compute.

    ``request_id`` : unique for the life of the engine.
    ``choice_index`` : part of the sampling noise's key, so that ``n`` choices of one seed differ.
    ``noise_stream`` : where sampling is coupled, which stream of noise it draws with, >= 0; None draws one.
    ``namespace`` : which cache drafts come from and learns; None neither drafts from a cache nor learns.
    ``prediction_token_ids`` : what the client expects most of the output to equal; only this request drafts from it.
    ``priority`` : lower is earlier, 0 is usual; -100..100.
    ``namespace_policy`` : its size, and what is read beside it; the last request of a namespace says.
    ``cache_salt``, ``tenant`` : keys and values are reused among requests of one namespace, one salt and one tenant
        only; ``tenant`` is opaque, None for requests that belong to nobody in particular. Tenants take turns.
    ``max_running`` : most requests of the tenant that run at once; None: as many as there are slots.
    ``prefix_scope`` : where given, keys and values are reused among requests of one scope and salt, whatever their
        namespace and tenant.
    ``adapter`` : the adapter that it is computed with; None: the model as it is. Drafts are apart by namespace alone.
    ``num_speculative_tokens`` : most draft tokens per step, where that is less than the engine's; 0 drafts nothing.
    ``keeps_steps`` : its statistics shall say what every draft came to.
    ``learn`` : whether its text is added to the cache of its namespace; it is drafted for either way.
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
    keeps_steps: bool = False
    learn: bool = True
    adapter: str | None = None


def by_source_name(drafted: Int64s, accepted: Int64s) -> list[tuple[str, int, int]]:
    """Of each source with drafted tokens its name, these, and those accepted; both are given by its number."""
    rows = zip(range(NUM_SOURCES), drafted, accepted, strict=True)
    return [(source_name(number), int(of_all), int(right)) for number, of_all, right in rows if of_all]


class RowCounts(Record):
    """The counts of a `RequestStats` that every pass changes, as kernels find them."""

    num_output_tokens: Int64
    num_verify_steps: Int64
    num_drafts: Int64
    num_draft_tokens: Int64
    num_accepted_tokens: Int64
    first_token_s: Float64
    last_token_s: Float64
    by_source: Annotated[Int64s, np.int64, NUM_SOURCES]


class Row(Record):
    """What kernels find of a sequence, at one address for its life.

    ``tokens`` : int32[end], prompt and output so far are the first ``length``. ``endings`` : int32[num_endings], the
    ids that end the output. ``is_simple`` : whether tokens that end nothing need only to be appended.

    ``most_drafted`` : for a pass. ``may_branch`` : into a tree. ``kind`` : of its temperature, see
    `calibration.kind_of`. ``num_fruitless`` : times in a row that it was asked for and got no draft.
    ``drafting`` : what it is drafted for with. ``verified``, ``was_asked`` : what a pass is given, and whether it was
    drafted for at all; by the pass's turn, as the next one is drafted for before the last is counted.

    ``prepared`` : a draft that began before the one under way. ``prepared_at`` : the context's length at which it is to
    be used, from its token ``prepared_begin`` on; less than 0 where it says something else before, 0 for none.
    ``prepared_verified`` : where in it the draft under way begins. ``used_begin`` : where that begins, if it was
    prepared, else 0.
    """

    tokens: Address
    length: Int64
    end: Int64
    prompt_length: Int64
    endings: Address
    num_endings: Int64
    is_simple: Int64
    counts: RowCounts
    most_drafted: Int64
    may_branch: Int64
    kind: Int64
    num_fruitless: Int64
    drafting: DraftRow
    verified: Annotated[Sequence[DraftRecord], DraftRecord, 2]
    was_asked: Annotated[Int64s, np.int64, 2]
    prepared: DraftRecord
    prepared_at: Int64
    prepared_begin: Int64
    prepared_verified: Int64
    used_begin: Int64


class _Count(Generic[N]):
    """An attribute that lies in ``counts``."""

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, stats: RequestStats, _owner: type | None = None) -> N:
        found: N = getattr(stats.counts, self._name)
        return found

    def __set__(self, stats: RequestStats, value: N) -> None:
        setattr(stats.counts, self._name, value)


class RequestStats:
    """Counts of one request; accepted tokens are those that were emitted.

    ``num_cached_tokens`` : tokens of the prompt whose keys and values were there already. ``steps`` : of every draft
    its tokens and how many were accepted, where the request asks for that. ``is_coupled`` : whether it is drawn with
    noise that other requests share. ``started_s`` : when it was first given a slot. Times are those of
    ``time.perf_counter``, 0 while it has not come to that.
    """

    __slots__ = (
        "counts", "is_coupled", "num_cached_tokens", "num_prompt_tokens", "started_s", "steps", "submitted_s",
    )  # fmt: skip
    num_output_tokens = _Count[int]()
    num_verify_steps = _Count[int]()
    num_drafts = _Count[int]()
    num_draft_tokens = _Count[int]()
    num_accepted_tokens = _Count[int]()
    first_token_s = _Count[float]()
    last_token_s = _Count[float]()

    def __init__(self, num_prompt_tokens: int = 0, counts: RowCounts | None = None) -> None:
        """``counts`` : where those are that passes change, memory of its own where None."""
        self.counts = Records(RowCounts)[0] if counts is None else counts
        self.num_prompt_tokens, self.num_cached_tokens = num_prompt_tokens, 0
        self.steps: list[tuple[int, int]] | None = None
        self.submitted_s = self.started_s = 0.0
        self.is_coupled = False

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """Of the accepted tokens, how many by ``Draft.source``."""
        found = by_source_name(self.counts.by_source, self.counts.by_source)
        return {name: accepted for name, _, accepted in found}


class VerifiedDraft(NamedTuple):
    """What a pass said to a request's draft.

    ``number`` : of the pass, from 1, among those of the request. ``source`` : as in ``Draft.source``.
    ``num_drafted`` : tokens proposed. ``num_accepted`` : the first so many tokens of the output were drafted.
    """

    number: int
    source: str
    num_drafted: int
    num_accepted: int


@dataclass(slots=True, kw_only=True)  # not frozen: one is made for a row at every step
class RequestOutput:
    """What one step produced for one request.

    ``token_ids`` : new tokens of this step, the end-of-text or stop token included.
    ``text`` : new text that is safe to send: whole characters, and nothing that may yet become a stop string.
        Special tokens and (unless asked for) the stop string are left out. The last output flushes the rest.
    ``finish_reason`` : None while the request goes on.
    ``stop_reason`` : the stop string or stop token id that ended it, None for end of text.
    ``refusal`` : the same where it is the request's own fault.
    ``logprobs`` : one for each of ``token_ids``; None where the request asks for none.
    ``prompt_logprobs`` : with the first output, where asked for: one for each prompt token, None for the first.
    ``draft`` : what was drafted for the pass that gave the tokens; None where no pass did.
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
