"""Whose rows a pass has, as a drafter is told of it: made once a batch, because it is the same for many passes."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ssd.engine.sequence import Sequence
from ssd.retrieval.segment_store import LearnedState


@dataclass(frozen=True, slots=True, eq=False)
class Audience:
    """Of each row of a batch, ``request_ids``, ``learned`` and ``may_keep`` as ``ScoredPass`` has them."""

    batch: Rows[Sequence]
    request_ids: list[str]
    learned: list[LearnedState | None]
    may_keep: npt.NDArray[np.bool_]
    is_final: bool
    """Whether all caches are open: what is learned of a namespace has a place only then."""

    @classmethod
    def of(cls, batch: Rows[Sequence], known: Audience | None) -> Audience:
        """That of ``batch``; ``known``, the one before it, where that is the same. O(rows)."""
        if known is not None and known.is_final and known.batch == batch:
            return known
        names, learned, may_keep, is_final = list[str](), list[LearnedState | None](), list[bool](), True
        for sequence in batch:
            request, namespace = sequence.request, sequence.namespace
            cache = None if namespace is None else namespace.cache
            names.append(request.request_id)
            learned.append(None if cache is None else cache.learned)
            may_keep.append(cache is not None and request.learn)
            is_final = is_final and (cache is not None or namespace is None)
        return cls(batch, names, learned, np.array(may_keep), is_final)
