"""Drafters against their slow twins and at the edges of their inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import DraftConfig
from ssd.drafting import DRAFTER_NAMES, make_drafter
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.lookup import MAX_SAMPLES
from ssd.drafting.prompt_lookup import PromptLookupDrafter
from ssd.drafting.protocol import DraftRequest
from ssd.errors import ConfigError
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot, make_snapshot, segment_table
from ssd.retrieval.suffix_array import build_segment
from tests.reference import drafting as reference
from tests.test_search import contexts, sequences, snapshots

limits = st.integers(0, 12)
LOOKUP = PromptLookupDrafter()


def ask(context: list[int], snapshot: object = None, limit: int = 8, request_id: str = "a") -> DraftRequest:
    return DraftRequest(request_id, np.array(context, np.int32), 0, snapshot, limit)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 2), max_size=40), limits)
@settings(max_examples=200)
def test_prompt_lookup_equals_a_full_scan(context: list[int], limit: int) -> None:
    draft = LOOKUP.propose([ask(context, None, limit)])[0]
    assert tuple(draft.token_ids.tolist()) == reference.prompt_lookup(context, 10, limit)


@given(st.lists(st.tuples(snapshots, contexts, limits), max_size=5))
@settings(max_examples=60)
@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_a_batch_drafts_what_its_rows_draft_alone(name: str, rows: list[tuple[Snapshot, list[int], int]]) -> None:
    requests = [ask(context, snapshot, limit, str(i)) for i, (snapshot, context, limit) in enumerate(rows)]
    together = make_drafter(name, DraftConfig()).propose(requests)
    alone = [make_drafter(name, DraftConfig()).propose([request])[0] for request in requests]
    assert [d.token_ids.tolist() for d in together] == [d.token_ids.tolist() for d in alone]
    assert [(d.match_length, d.source) for d in together] == [(d.match_length, d.source) for d in alone]
    for draft, request in zip(together, requests, strict=True):
        assert len(draft.token_ids) <= request.limit
        assert (draft.token_ids >= 0).all()
        assert draft.token_ids.dtype == np.int32


@pytest.mark.parametrize("name", DRAFTER_NAMES)
@pytest.mark.parametrize("context", [[], [3], [-5, -1], [2**31 - 1] * 3, [1] * 3000, [1, SEPARATOR]])
def test_odd_contexts_never_raise(name: str, context: list[int]) -> None:
    drafter = make_drafter(name, DraftConfig())
    for snapshot in (None, reference.make_snapshot([]), reference.make_snapshot([[1, 2, SEPARATOR]], [1, SEPARATOR])):
        for limit in (0, 1, 16, 1000):
            drafter.propose([ask(context, snapshot, limit)])
    assert drafter.propose([]) == []
    drafter.finish("never seen")


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_limit_zero_drafts_nothing(name: str) -> None:
    snapshot = reference.make_snapshot([[1, 2, 3, SEPARATOR]])
    assert len(make_drafter(name, DraftConfig()).propose([ask([1, 2, 1], snapshot, 0)])[0].token_ids) == 0


def test_suffix_copies_the_index_and_says_so() -> None:
    snapshot = reference.make_snapshot([[*range(50), SEPARATOR]])
    draft = SuffixDrafter(price=1e-4).propose([ask([*range(20)], snapshot, 16)])[0]
    assert draft.token_ids.tolist() == [*range(20, 36)]
    assert (draft.source, draft.match_length) == ("segment", 20)


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


def test_suffix_follows_the_majority_and_drops_those_who_disagree() -> None:
    text = [1, 2, 3, 4, 5, SEPARATOR] * 6 + [1, 2, 3, 9, 9, SEPARATOR] * 2
    draft = SuffixDrafter(price=0.01).propose([ask([1, 2, 3], reference.make_snapshot([text]), 2)])[0]
    assert draft.token_ids.tolist() == [4, 5]


def test_work_is_bounded_when_everything_matches_in_many_segments() -> None:
    segments = [[0] * 50 + [SEPARATOR]] * (2 * MAX_SAMPLES)
    snapshot = reference.make_snapshot(segments, [0] * 60 + [SEPARATOR])
    draft = SuffixDrafter().propose([ask([0] * 8, snapshot, 8)])[0]
    assert set(draft.token_ids.tolist()) <= {0}


@given(st.lists(sequences, max_size=3), st.one_of(st.just([]), sequences), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_following_from_step_to_step_drafts_what_stands_somewhere(
    parts: list[list[int]], tail: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    story = random.integers(0, 3, 60).tolist()
    snapshot = reference.make_snapshot([*parts, [*story, SEPARATOR]], tail)
    drafter = SuffixDrafter(max_match_length=8)
    text = [*story[:50], *random.integers(0, 3, 5).tolist(), *story[:30]]
    length = 5
    while length < len(text):
        context = text[:length]
        draft = drafter.propose([ask(context, snapshot, 4, "a")])[0].token_ids.tolist()
        places = [found for found, _, _ in reference.evidence(snapshot, context, 1, 4, True)]
        assert not draft or any(found and draft[: len(found)] == list(found[: len(draft)]) for found in places)
        accepted = 0
        while accepted < len(draft) and length + accepted < len(text) and draft[accepted] == text[length + accepted]:
            accepted += 1
        length += accepted + 1


def test_following_ends_when_the_segments_change_or_the_request_does() -> None:
    first = reference.make_snapshot([[*range(100), SEPARATOR]])
    second = reference.make_snapshot([[*range(50), *range(200, 250), SEPARATOR]])
    drafter = SuffixDrafter(price=1e-6, max_match_length=8)
    assert drafter.propose([ask([*range(20)], first, 4)])[0].token_ids.tolist() == [20, 21, 22, 23]
    assert drafter.propose([ask([*range(24)], first, 4)])[0].token_ids.tolist() == [24, 25, 26, 27]
    assert drafter.propose([ask([*range(50)], second, 4)])[0].token_ids.tolist() == [200, 201, 202, 203]
    drafter.finish("a")
    assert drafter.propose([ask([*range(60)], first, 4)])[0].token_ids.tolist() == [60, 61, 62, 63]


def test_more_requests_than_are_remembered_draft_as_well() -> None:
    snapshot = reference.make_snapshot([[*range(100), SEPARATOR]])
    drafter = SuffixDrafter(price=1e-6)
    for number in range(10_000):
        draft = drafter.propose([ask([*range(20)], snapshot, 2, str(number))])[0]
        assert draft.token_ids.tolist() == [20, 21]


def test_unknown_drafter_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="prompt-lookup"):
        make_drafter("oracle", DraftConfig())


def test_warm_up_leaves_nothing_to_compile() -> None:
    from ssd.drafting.propose import propose_suffix, propose_suffix_one

    kernels: tuple[Any, ...] = propose_suffix, propose_suffix_one
    drafter = make_drafter("ssd", DraftConfig())
    drafter.warm_up()  # type: ignore[attr-defined]
    compiled = [len(kernel.signatures) for kernel in kernels]
    request = ask([1, 2, 1], reference.make_snapshot([[1, 2, SEPARATOR]], [2, SEPARATOR]))
    drafter.propose([request])
    drafter.propose([request, request])
    assert [len(kernel.signatures) for kernel in kernels] == compiled
