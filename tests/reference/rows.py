"""Slow twin of the row drafter: one request at a time through the drafter that the engine uses, cut in Python."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.retrieval.snapshot import Snapshot
from tests.reference.cost_model import SlowRowPrices


class SlowRowDrafter:
    """Texts by name instead of rows of a matrix."""

    def __init__(self, *, limit: int, max_length: int, vocab_size: int, end_of_text_ids: Sequence[int]) -> None:
        self.drafter = SuffixDrafter()
        self.prices = SlowRowPrices()
        self.limit = limit
        self.max_length = max_length
        self.vocab_size = vocab_size
        self.ends = end_of_text_ids
        self.asked: list[str] = []
        self.num_positions = 0

    def draft(
        self,
        names: Sequence[str],
        texts: Sequence[list[int]],
        prompts: Sequence[int],
        num_new: Sequence[int],
        snapshot: Snapshot,
        seconds: float,
    ) -> list[list[int]]:
        """One draft for each text."""
        rows = [row for row, new in enumerate(num_new) if new]
        asked = [names[row] for row in rows]
        if asked == self.asked and len(asked) == len(names):
            self.prices.observe(self.num_positions, sum(num_new), seconds, self.num_positions > len(names))
        price = self.prices.price(len(asked))
        requests = [
            DraftRequest(
                names[row],
                np.array(texts[row], np.int32),
                prompts[row],
                snapshot,
                max(0, min(self.limit, self.max_length - len(texts[row]) - 1)),
                np.array([price]) if price > 0 else None,
            )
            for row in rows
        ]
        drafts = [self.usable(self.drafter.propose([request])[0]) for request in requests]
        said: list[list[int]] = [[] for _ in names]
        sizes = self.prices.sizes([[] if d.probabilities is None else d.probabilities.tolist() for d in drafts])
        for row, draft, size in zip(rows, drafts, sizes, strict=True):
            said[row] = draft.token_ids[:size].tolist()
        self.asked, self.num_positions = asked, len(names) + sum(map(len, said))
        return said

    def usable(self, draft: Draft) -> Draft:
        """Up to an end of text; nothing where an id is not the target's."""
        tokens = draft.token_ids.tolist()
        if any(token >= self.vocab_size for token in tokens):
            return EMPTY_DRAFT
        return draft.cut(next((at + 1 for at, token in enumerate(tokens) if token in self.ends), len(tokens)))
