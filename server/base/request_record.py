"""The record of one HTTP request, for the access log, the metrics and the trace.

It contains only names and counts: no text, token, key or salt of a request.
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
_MOST_BYTES = 512
"""The maximum size of either trace header in bytes; the recommendation requires this much for ``tracestate``."""


def trace_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the W3C trace context of raw headers with lower-case names; empty without a valid ``traceparent``."""
    parent, state = (
        b",".join(value for name, value in headers if name == wanted).decode("latin-1").strip(" \t")
        for wanted in (b"traceparent", b"tracestate")
    )
    if len(parent) > _MOST_BYTES or not _PARENT.fullmatch(parent) or (parent[:2] == "00" and len(parent) > 55):
        return {}
    return {"traceparent": parent, "tracestate": state if len(state) <= _MOST_BYTES else ""}


@dataclass(slots=True)
class RequestRecord:
    """The facts about one HTTP request. Times are those of ``time.perf_counter``; 0: never."""

    received_s: float = field(default_factory=time.perf_counter)
    trace: dict[str, str] = field(default_factory=dict)
    """The client's trace context, see `trace_headers`."""
    request_id: str | None = None
    tenant: str | None = None
    """The tenant of the request's key. None: there are no keys."""
    status: int | None = None
    """The status code. None: no answer was sent."""
    refusal: str | None = None
    """Why the request was rejected or aborted, see `rejection_reason`."""
    param: str | None = None
    """The faulty field of a rejected request, as the client wrote it."""
    is_gone: bool = False
    """Whether the client disconnected before it had its answer."""
    is_stream: bool = False
    model: str | None = None
    """The served name of the requested model."""
    response_id: str | None = None
    namespace: str | None = None
    sampling: SamplingParams | None = None
    """The sampling parameters of the first choice."""
    num_choices: int = 0
    """The number of choices; 0 for a request without generation."""
    finish_reasons: tuple[str, ...] = ()
    """The finish reasons of the choices in the order in which they ended."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    """The number of verification passes of all choices."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    is_coupled: bool = False
    """Whether the request was sampled with noise that other requests share."""
    submitted_s: float = 0.0
    started_s: float = 0.0
    """The time at which the first choice was given a slot."""
    first_token_s: float = 0.0
    last_token_s: float = 0.0


def seconds_between(begin_s: float, end_s: float) -> float | None:
    """Return the seconds between two times of a record; None if one of them never came."""
    return end_s - begin_s if begin_s and end_s else None


_CURRENT: ContextVar[RequestRecord] = ContextVar("record")


def begin_record() -> RequestRecord:
    """Create a record and make it the current one of this task and of the tasks that it starts."""
    record = RequestRecord()
    _CURRENT.set(record)
    return record


def current_record() -> RequestRecord:
    """Return the record of the current request, or outside of requests one that is never read."""
    return _CURRENT.get(None) or RequestRecord()


def rejection_reason(status: int, code: str | None) -> str | None:
    """Return the reason of a rejection as one word; None for a server error."""
    if status == 503:
        return code or "unavailable"
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if code == "context_length_exceeded":
        return "too_long"
    return "invalid" if status < 500 else None


_BY_STATUS = {401: "auth", 403: "auth", 404: "not_found", 405: "method", 408: "too_slow", 413: "too_long", 429: "quota"}
