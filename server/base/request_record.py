"""The record of one HTTP request, for the access log, the metrics and the trace.

It contains only names and counts, but no text, token ids, API keys or cache salts of a request.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssd.config import SamplingParams


_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
_MAX_BYTES = 512
"""The maximum size in bytes of a trace header. W3C's recommendation requires that ``tracestate`` may have this size."""


def trace_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the W3C trace context headers by lower-case name; empty if ``traceparent`` is missing or invalid."""
    parent, state = (
        b",".join(value for name, value in headers if name == wanted).decode("latin-1").strip(" \t")
        for wanted in (b"traceparent", b"tracestate")
    )
    if len(parent) > _MAX_BYTES or not _PARENT.fullmatch(parent) or (parent[:2] == "00" and len(parent) > 55):
        return {}
    return {"traceparent": parent, "tracestate": state if len(state) <= _MAX_BYTES else ""}


@dataclass(slots=True)
class RequestRecord:
    """Names, counts and times of one HTTP request, for logs, metrics and traces.

    Times are those of ``time.perf_counter``; 0 means that the event has not happened.
    """

    received_s: float = field(default_factory=time.perf_counter)
    trace: dict[str, str] = field(default_factory=dict)
    """The client's W3C trace context."""
    request_id: str | None = None
    tenant: str | None = None
    """The tenant of the request's API key. None if the server has no keys."""
    status: int | None = None
    """The HTTP status code. None if no response was sent."""
    refusal: str | None = None
    """The reason why the request was rejected or aborted, see `rejection_reason`."""
    param: str | None = None
    """The invalid field of a rejected request, by its name in the client's API."""
    is_gone: bool = False
    """Whether the client disconnected before it received the response."""
    is_stream: bool = False
    model: str | None = None
    response_id: str | None = None
    namespace: str | None = None
    sampling: SamplingParams | None = None
    num_choices: int = 0
    """The number of requested outputs; 0 for a request that generates no text."""
    finish_reasons: tuple[str, ...] = ()
    """The finish reasons of the choices in the order in which the choices ended."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    """The number of forward passes that produced output tokens, with or without drafts, summed over all choices."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    is_coupled: bool = False
    """Whether tokens were sampled with Gumbel noise that other requests share (coupled sampling)."""
    submitted_s: float = 0.0
    started_s: float = 0.0
    """The time at which the first choice was assigned a slot."""
    first_token_s: float = 0.0
    last_token_s: float = 0.0


def seconds_between(begin_s: float, end_s: float) -> float | None:
    """Return the seconds between two times of a `RequestRecord`; None if one of the events has not happened."""
    return end_s - begin_s if begin_s and end_s else None


_CURRENT: ContextVar[RequestRecord] = ContextVar("record")


def create_record() -> RequestRecord:
    """Create a request's record and make it the current one of this asyncio task and of tasks that it starts."""
    record = RequestRecord()
    _CURRENT.set(record)
    return record


def current_record() -> RequestRecord:
    """Return the record of the HTTP request that this asyncio task handles; outside of a request, an empty record."""
    return _CURRENT.get(None) or RequestRecord()


def rejection_reason(status: int, code: str | None) -> str | None:
    """Return a word for logs and metrics that says why a request was rejected; None for a server error."""
    if status == 503:
        return code or "unavailable"
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if code == "context_length_exceeded":
        return "too_long"
    return "invalid" if status < 500 else None


_BY_STATUS = {401: "auth", 403: "auth", 404: "not_found", 405: "method", 408: "too_slow", 413: "too_long", 429: "quota"}
