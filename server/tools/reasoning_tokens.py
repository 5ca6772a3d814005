"""How many tokens of an output were thought."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from server.tools.formats import REASONING_FORMATS
from server.tools.harmony import CHANNEL, END
from server.tools.reasoning import begins_inside

_BEGINNING = 16
"""Tokens among which the marker that begins it must be."""

Decode = Callable[[Sequence[int]], str]


def count_reasoning_tokens(name: str, prompt: str, token_ids: Sequence[int], decode: Decode) -> int:
    """Tokens up to the one that completes the marker that ends it, which counts; all, where it does not end.

    ``name`` : of the reasoning's format. ``prompt`` : the end of what was continued. ``decode`` : with special tokens.
    What counts is a matter of the output alone, not of the steps it came in. O(n log n).
    """
    form = REASONING_FORMATS[name].form
    beginning = decode(token_ids[:_BEGINNING]).lstrip()
    if form is None:
        end, begun = END, beginning.startswith(f"{CHANNEL}analysis")
    else:
        inside = begins_inside(form, prompt)
        end, begun = form.end[0], inside or (inside is False and beginning.startswith(form.begin))
    if not begun:
        return 0
    ends_within = bisect_left(range(len(token_ids)), True, key=lambda last: end in decode(token_ids[: last + 1]))
    return min(ends_within + 1, len(token_ids))
