"""What is noted of one HTTP request while it is handled, for the access line, the metrics and the trace.

Names and counts alone: no text, no token, no key and no salt of a request comes in here.
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
"""More of either header is not looked at; of ``tracestate`` the recommendation asks for so much."""


def trace_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """W3C's trace context of raw headers with lower-case names, as it came; empty without a valid ``traceparent``."""
    parent, state = (
        b",".join(value for name, value in headers if name == wanted).decode("latin-1").strip(" \t")
        for wanted in (b"traceparent", b"tracestate")
    )
    if len(parent) > _MOST_BYTES or not _PARENT.fullmatch(parent) or (parent[:2] == "00" and len(parent) > 55):
        return {}
    return {"traceparent": parent, "tracestate": state if len(state) <= _MOST_BYTES else ""}


@dataclass(slots=True)
class Record:
    """One HTTP request. Whoever learns something notes it; times are those of ``time.perf_counter``, 0 for never."""

    received_s: float = field(default_factory=time.perf_counter)
    trace: dict[str, str] = field(default_factory=dict)
    """The client's `trace_headers`."""
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


def between(begin_s: float, end_s: float) -> float | None:
    """Seconds from one of a record's times to another; None where one of them never came."""
    return end_s - begin_s if begin_s and end_s else None


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
