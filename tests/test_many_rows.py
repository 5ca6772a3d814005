"""Rows of one call are drafted as one after the other would be."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.retrieval.snapshot import Snapshot
from tests.reference.drafting import make_snapshot

VOCAB_SIZE = 6


def said(draft: Draft) -> tuple[object, ...]:
    """All of a draft, its estimates to the last bit."""
    parents = None if draft.parents is None else draft.parents.tolist()
    estimates = None if draft.probabilities is None else draft.probabilities.tobytes()
    return draft.token_ids.tolist(), draft.match_length, draft.source, parents, estimates


def some_text(random: np.random.Generator, most: int) -> list[int]:
    """Repetitive, or one token again and again, or nothing."""
    period = random.integers(0, VOCAB_SIZE, int(random.integers(1, 9)))
    text = np.tile(period, 1 + most // len(period))[: int(random.integers(0, most + 1))]
    return [int(token) if random.random() < 0.9 else int(random.integers(0, VOCAB_SIZE)) for token in text]


def some_snapshot(random: np.random.Generator) -> Snapshot:
    parts = [[*some_text(random, 90), -1] for _ in range(int(random.integers(0, 5)))]
    return make_snapshot(parts, [*some_text(random, 40), -1][: int(random.integers(0, 42))])


def some_requests(random: np.random.Generator, count: int) -> list[DraftRequest]:
    snapshots = [None, *(some_snapshot(random) for _ in range(2))]
    requests = []
    for row in range(count):
        context = np.array(some_text(random, 60), np.int32)
        requests.append(
            DraftRequest(
                str(row),
                context,
                int(random.integers(0, len(context) + 1)),
                snapshots[int(random.integers(3))],
                int(random.integers(0, 12)),
                prices=[None, np.array([0.02]), np.array([0.01, 0.05, 0.3])][int(random.integers(3))],
                tree=bool(random.random() < 0.3),
                prediction=np.array(some_text(random, 50), np.int32) if random.random() < 0.3 else None,
            )
        )
    return requests


def grow(request: DraftRequest, draft: Draft, random: np.random.Generator) -> None:
    """One step: a part of the draft came, then what the target says."""
    num_accepted = 0 if draft.parents is not None else int(random.integers(0, len(draft.token_ids) + 1))
    new = [*draft.token_ids[:num_accepted], int(random.integers(0, VOCAB_SIZE))]
    request.context = np.concatenate([request.context, np.array(new, np.int32)])


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_drafts_are_those_of_one_row_at_a_time(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    together, alone = SuffixDrafter(), SuffixDrafter()
    requests = some_requests(random, count)
    for _ in range(4):
        found = together.propose(requests)
        assert [said(draft) for draft in found] == [said(alone.propose([request])[0]) for request in requests]
        for request, draft in zip(requests, found, strict=True):
            grow(request, draft, random)
