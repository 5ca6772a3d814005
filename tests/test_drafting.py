"""Drafters against their slow twins and at the edges of their inputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import DraftConfig
from ssd.drafting import DRAFTER_NAMES, make_drafter
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.errors import ConfigError
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import SegmentTable, Snapshot
from ssd.retrieval.suffix_array import build_segment
from tests.reference import drafting as reference


def ask(context: list[int], snapshot: object = None, limit: int = 8, request_id: str = "a") -> DraftRequest:
    return DraftRequest(request_id, np.array(context, np.int32), 0, snapshot, limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DRAFTER_NAMES)
@pytest.mark.parametrize("context", [[], [3], [-5, -1], [2**31 - 1] * 3, [1] * 3000, [1, SEPARATOR]])
def test_odd_contexts_never_raise(name: str, context: list[int]) -> None:
    drafter = make_drafter(name, DraftConfig())
    for snapshot in (None, reference.make_snapshot([]), reference.make_snapshot([[1, 2, SEPARATOR]], [1, SEPARATOR])):
        for limit in (0, 1, 16, 1000):
            drafter.propose([ask(context, snapshot, limit)])
    assert drafter.propose([]) == []
    drafter.finish("never seen")


@pytest.mark.parametrize("tree", [False, True])
def test_suffix_says_in_which_part_of_the_index_it_found_a_draft(tree: bool) -> None:
    static = build_segment(np.array([*range(50), SEPARATOR], np.int32), start=None, segment_id="static")
    born = build_segment(np.array([*range(100, 150), SEPARATOR], np.int32), start=0, segment_id="born")
    ring = np.full(64, 7, np.int32)
    ring[51:61] = range(200, 210)
    segments = (static, born)
    snapshot = Snapshot(1, SegmentTable(segments), ring, 51, 61)
    for first, source in ((0, "prebuilt"), (100, "cache"), (200, "recent")):
        request = ask([*range(first, first + 5)], snapshot, 4)
        request.allow_tree = tree
        draft = SuffixDrafter(default_token_cost=1e-4).propose([request])[0]
        assert (draft.token_ids[0], draft.source) == (first + 5, source)


def test_more_requests_than_are_remembered_draft_as_well() -> None:
    snapshot = reference.make_snapshot([[*range(100), SEPARATOR]])
    drafter = SuffixDrafter(default_token_cost=1e-6)
    for number in range(10_000):
        draft = drafter.propose([ask([*range(20)], snapshot, 2, str(number))])[0]
        assert draft.token_ids.tolist() == [20, 21]


def test_unknown_drafter_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="ssd, none"):
        make_drafter("oracle", DraftConfig())


# Rows of one call are drafted as one after the other would be


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
    return reference.make_snapshot(parts, [*some_text(random, 40), -1][: int(random.integers(0, 42))])


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
                token_costs=[None, np.array([0.02]), np.array([0.01, 0.05, 0.3])][int(random.integers(3))],
                allow_tree=bool(random.random() < 0.3),
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
