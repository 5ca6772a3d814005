"""W3C trace context: the headers ``traceparent`` and ``tracestate``, level 2 of the recommendation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_PARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MOST_BYTES = 512
"""More of either header is not looked at; of ``tracestate`` the recommendation asks for so much."""
_SAMPLED = 1


class TraceContext(NamedTuple):
    """The span that a request was sent from: lower-case hexadecimal ids, and the vendors' part as it came."""

    trace_id: str
    parent_id: str
    is_sampled: bool
    state: str


def read_trace_context(headers: Sequence[tuple[bytes, bytes]]) -> TraceContext | None:
    """The context of raw headers with lower-case names; None without exactly one valid ``traceparent``."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1 or len(parents[0]) > _MOST_BYTES:
        return None
    found = _PARENT.fullmatch(parents[0].strip(b" \t"))
    if found is None or (found[1] == b"00" and found[5] is not None):  # later versions may have more fields
        return None
    state = b",".join(value for name, value in headers if name == b"tracestate")
    return TraceContext(
        found[2].decode(),
        found[3].decode(),
        bool(int(found[4], 16) & _SAMPLED),
        state.decode("latin-1") if len(state) <= _MOST_BYTES else "",
    )
