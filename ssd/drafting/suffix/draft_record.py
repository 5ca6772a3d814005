"""A draft as kernels write it."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import Float64s, TokenIds, inlined
from ssd.compiled.records import Int64, Record, views_of

MAX_DRAFT: Final = 128
"""Longest draft; a greater limit is cut to it."""


class DraftRecord(Record):
    """A chain or a tree of ``size`` tokens.

    ``source`` : what most of the first token's evidence is, a number in SOURCES. ``parents`` : of a tree, the node that
    each comes after, -1 for the context's end. ``probabilities`` : the estimate of each token.
    """

    size: Int64
    match_length: Int64
    source: Int64
    is_tree: Int64
    tokens: Annotated[TokenIds, np.int32, MAX_DRAFT]
    parents: Annotated[TokenIds, np.int32, MAX_DRAFT]
    probabilities: Annotated[Float64s, np.float64, MAX_DRAFT]


drafts_at = views_of(DraftRecord)


@inlined
def clear(out: DraftRecord) -> None:
    """Make ``out`` an empty draft."""
    out.size, out.match_length, out.source, out.is_tree = 0, 0, 0, 0


@inlined
def parent_of(out: DraftRecord, node: int) -> int:
    """The node that one comes after, -1 for the context's end."""
    return int(np.int64(out.parents[node])) if out.is_tree == 1 else node - 1
