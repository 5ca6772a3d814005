"""What is noted of one HTTP request while it is handled, for the access line, the metrics and the trace.

Names and counts alone: no text, no token, no key and no salt of a request comes in here.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.base.trace_context import TraceContext

if TYPE_CHECKING:
    from ssd.config import SamplingParams


@dataclass(slots=True)
class Record:
    """One HTTP request. Whoever learns something notes it; times are those of ``time.perf_counter``, 0 for never."""

    received_s: float = field(default_factory=time.perf_counter)
    trace: TraceContext | None = None
    """What the client's ``traceparent`` says."""
    request_id: str | None = None
    tenant: str | None = None
    """Whose key it brought; None where there are no keys."""
    status: int | None = None
    """None while nothing was answered."""
    refusal: str | None = None
    """Why it was not served, or not to its end: one of a few words, see `refusal_of`."""
    param: str | None = None
    """The field at fault where a request was refused, as the client wrote it."""
    is_gone: bool = False
    """The client left before it had its answer."""
    is_stream: bool = False
    model: str | None = None
    """The served name that was asked for, or stands in where none was."""
    response_id: str | None = None
    namespace: str | None = None
    sampling: SamplingParams | None = None
    """Of the first choice."""
    num_choices: int = 0
    """0 for a request that came to no generation."""
    finish_reasons: tuple[str, ...] = ()
    """Of the choices that ended, in order."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    """Passes that verified a row of it."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    is_coupled: bool = False
    """It was drawn with noise that other requests share."""
    submitted_s: float = 0.0
    started_s: float = 0.0
    """When the first choice was given a slot."""
    first_token_s: float = 0.0
    last_token_s: float = 0.0


_CURRENT: ContextVar[Record] = ContextVar("record")


def begin_record() -> Record:
    """A new record, which is the current one of this task and of those it starts."""
    record = Record()
    _CURRENT.set(record)
    return record


def current_record() -> Record:
    """The record of the request that is being handled; one that nobody reads outside of any."""
    return _CURRENT.get(None) or Record()


def refusal_of(status: int, code: str | None) -> str | None:
    """The word for why a request is answered with this error; None for a fault of ours."""
    if status == 503:
        return code or "unavailable"
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if code == "context_length_exceeded":
        return "too_long"
    return "invalid" if status < 500 else None


_BY_STATUS = {401: "auth", 403: "auth", 404: "not_found", 405: "method", 408: "too_slow", 413: "too_long", 429: "quota"}
