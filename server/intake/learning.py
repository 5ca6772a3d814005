"""Whether a request may be learned from, by its header."""

from __future__ import annotations

from starlette.datastructures import Headers

from ssd.errors import RequestError, shown

NO_LEARN_HEADER = "x-ssd-no-learn"
_KEEP_OUT, _TAKE_IN = ("1", "true"), ("", "0", "false")


def may_learn(headers: Headers) -> bool:
    """False where the header `NO_LEARN_HEADER` keeps the request out of the cache, for clients that cannot send
    ``store``; raises RequestError where it is neither 0 nor 1.
    """
    value = headers.get(NO_LEARN_HEADER, "").strip().lower()
    if value not in (*_KEEP_OUT, *_TAKE_IN):
        raise RequestError(f"{NO_LEARN_HEADER} must be 1 or 0, got {shown(value)}", param=NO_LEARN_HEADER)
    return value in _TAKE_IN
