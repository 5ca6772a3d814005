"""Slow twin of what an engine makes of its rows' drafts: one row after the other, drafts as objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ssd.cost_model.calibration import BACKOFF_AFTER, FIRST_TOKEN_THRESHOLD
from ssd.cost_model.cost_model import CostModel
from ssd.drafting.protocol import EMPTY_DRAFT, Draft

PASSES_AHEAD = 3


def promise_tested(draft: Draft, path: Sequence[int]) -> float:
    """How many of its tokens should have come of those that were tested, on ``path`` and beside it."""
    assert draft.probabilities is not None
    reached = {-1, *path}
    chances = zip(draft.probabilities.tolist(), draft.parents_of_all(), strict=True)
    return float(sum(chance for chance, parent in chances if parent in reached))


class SlowShares:
    """By kind of temperature."""

    def __init__(self) -> None:
        self.sums: dict[int, tuple[float, float]] = {}

    def share(self, kind: int) -> float:
        promised, accepted = self.sums.get(kind, (0.0, 0.0))
        return min(1.0, (accepted + 1.0) / (promised + 1.0))

    def observe(self, kind: int, promised: float, accepted: int) -> None:
        before, kept = self.sums.get(kind, (0.0, 0.0)), 0.97 if promised else 0.99
        self.sums[kind] = before[0] * kept + promised, before[1] * kept + accepted


@dataclass
class SlowRow:
    """``verified`` : of the pass that was begun last; EMPTY_DRAFT where nobody was asked. ``prepared`` : the whole
    draft, where in it the one under way begins, where to go on, at which length."""

    tokens: list[int]
    num_prompt: int
    end: int
    most: int
    kind: int
    verified: Draft = field(default_factory=lambda: EMPTY_DRAFT)
    prepared: tuple[Draft, int, int, int] | None = None
    used: tuple[Draft, int] | None = None
    num_fruitless: int = 0
    is_wanted: bool = False

    def most_drafted(self, limit: int) -> int:
        return max(0, min(limit, self.end - len(self.tokens) - 1, self.most))


@dataclass
class SlowDrafts:
    """All rows of a batch."""

    rows: list[SlowRow]
    prices: CostModel
    vocab_size: int
    shares: SlowShares = field(default_factory=SlowShares)

    def begin(self, limit: int, *, should_draft_all: bool) -> None:
        for row in self.rows:
            prepared, row.prepared, row.used, row.verified = row.prepared, None, None, EMPTY_DRAFT
            if prepared is not None and prepared[3] == len(row.tokens):
                whole, _, begin, _ = prepared
                end = begin + row.most_drafted(limit)
                if begin < end <= len(whole.token_ids) and whole.token_ids[begin - 1] == row.tokens[-1]:
                    row.used = whole, begin
                    chances = None if whole.probabilities is None else whole.probabilities[begin:end]
                    row.verified = Draft(whole.token_ids[begin:end], whole.match_length, whole.source, chances)
            row.is_wanted = row.used is None and (should_draft_all or row.num_fruitless < BACKOFF_AFTER)

    def take(self, found: Sequence[Draft]) -> None:
        """``found`` : of every row."""
        for row, draft in zip(self.rows, found, strict=True):
            if row.is_wanted and self.is_of_vocabulary(draft):
                chances = draft.probabilities
                is_sure = (
                    chances is None
                    or not len(chances)
                    or self.shares.share(row.kind) * chances[0] >= FIRST_TOKEN_THRESHOLD
                )
                if is_sure or len(row.tokens) > row.num_prompt:
                    row.verified = draft
        width = self.best_draft_length()
        for row in self.rows:
            if row.verified is not EMPTY_DRAFT:
                row.verified = row.verified.cut(width)
            if row.is_wanted:
                row.num_fruitless = 0 if len(row.verified.token_ids) else row.num_fruitless + 1

    def best_draft_length(self) -> int:
        drafts = [row.verified for row in self.rows]
        widest = max(len(draft.token_ids) for draft in drafts)
        if any(len(draft.token_ids) and draft.probabilities is None for draft in drafts):
            return widest
        gains = np.zeros(widest)
        for row, draft in zip(self.rows, drafts, strict=True):
            if len(draft.token_ids):
                gains[: len(draft.token_ids)] += self.shares.share(row.kind) * draft.path_probabilities()
        return self.prices.num_steps_to_verify(gains, len(drafts)) if widest else 0

    def plan_ahead(self, limit: int, came_true: Sequence[bool]) -> None:
        for row, is_right in zip(self.rows, came_true, strict=True):
            size = len(row.verified.token_ids)
            row.is_wanted = is_right and size > 0 and row.verified.parents is None
            if row.is_wanted and row.used is not None:
                whole, begin = row.used
                if begin + size + 1 + limit <= len(whole.token_ids):
                    row.prepared, row.is_wanted = (whole, begin, begin + size + 1, len(row.tokens) + size + 1), False

    def take_ahead(self, found: Sequence[Draft]) -> None:
        for row, draft in zip(self.rows, found, strict=True):
            if not row.is_wanted:
                continue
            whole = draft if self.is_of_vocabulary(draft) else EMPTY_DRAFT
            ahead, said = whole.token_ids.tolist(), row.verified.token_ids.tolist()
            common = next((i for i, (one, other) in enumerate(zip(ahead, said, strict=False)) if one != other), None)
            common = min(len(ahead), len(said)) if common is None else common
            length = len(row.tokens) + len(said) + 1 if common == len(said) else -1
            row.prepared = whole, 0, common + 1, length

    def count(self, paths: Sequence[Sequence[int]]) -> None:
        """``paths`` : the accepted tokens of each row's draft, by index."""
        for row, path in zip(self.rows, paths, strict=True):
            draft = row.verified
            if draft is EMPTY_DRAFT or (len(draft.token_ids) and draft.probabilities is None):
                continue
            promised = promise_tested(draft, path) if len(draft.token_ids) else 0.0
            self.shares.observe(row.kind, promised, len(path))

    def is_of_vocabulary(self, draft: Draft) -> bool:
        return all(0 <= token < self.vocab_size for token in draft.token_ids.tolist())
