"""Drafters against their slow twins and at the edges of their inputs."""

from __future__ import annotations

import numpy as np
import pytest

from ssd.config import DraftConfig
from ssd.drafting import DRAFTER_NAMES, make_drafter
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.lookup import MAX_SAMPLES
from ssd.drafting.protocol import DraftRequest
from ssd.errors import ConfigError
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import make_snapshot, segment_table
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
    snapshot = make_snapshot(1, segments, segment_table(segments), ring, 51, 61)
    for first, source in ((0, "warm"), (100, "segment"), (200, "tail")):
        request = ask([*range(first, first + 5)], snapshot, 4)
        request.tree = tree
        draft = SuffixDrafter(price=1e-4).propose([request])[0]
        assert (draft.token_ids[0], draft.source) == (first + 5, source)


def test_suffix_takes_own_text_when_the_index_is_empty_and_continues_repetition() -> None:
    draft = SuffixDrafter().propose([ask([7, 8, 9] * 8, None, 16)])[0]
    assert draft.token_ids.tolist() == ([7, 8, 9] * 6)[:16]
    assert draft.source == "own"


def test_work_is_bounded_when_everything_matches_in_many_segments() -> None:
    segments = [[0] * 50 + [SEPARATOR]] * (2 * MAX_SAMPLES)
    snapshot = reference.make_snapshot(segments, [0] * 60 + [SEPARATOR])
    draft = SuffixDrafter().propose([ask([0] * 8, snapshot, 8)])[0]
    assert set(draft.token_ids.tolist()) <= {0}


def test_more_requests_than_are_remembered_draft_as_well() -> None:
    snapshot = reference.make_snapshot([[*range(100), SEPARATOR]])
    drafter = SuffixDrafter(price=1e-6)
    for number in range(10_000):
        draft = drafter.propose([ask([*range(20)], snapshot, 2, str(number))])[0]
        assert draft.token_ids.tolist() == [20, 21]


def test_unknown_drafter_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="ssd, none"):
        make_drafter("oracle", DraftConfig())
