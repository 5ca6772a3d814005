"""Verifying drafts against a recorded text, and walking whole outputs."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.walk import Proposal, agreeing, walk
from tests.reference import walk as reference

TOKENS = st.lists(st.integers(0, 2), max_size=8)
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree of at most eight nodes; siblings may be equal."""
    token_ids = draw(TOKENS)
    return token_ids, [draw(st.integers(-1, index - 1)) for index in range(len(token_ids))]


class Scripted:
    """Drafts what it is told to, by position, and notes what it is told back."""

    def __init__(self, drafts: Sequence[tuple[list[int], list[int]]]) -> None:
        self.drafts = drafts
        self.asked: list[int] = []
        self.told: list[int] = []

    def draft(self, position: int) -> tuple[list[int], list[int]]:
        return self.drafts[position % len(self.drafts)]

    def ask(self, position: int) -> Proposal:
        self.asked.append(position)
        token_ids, parents = self.draft(position)
        return Proposal(7, token_ids, parents)

    def tell(self, num_accepted: int) -> None:
        self.told.append(num_accepted)


def test_a_chain_is_accepted_up_to_its_first_difference_and_of_a_tree_the_longest_branch() -> None:
    assert agreeing([5, 6, 9, 8], None, [4, 5, 6, 7, 8], 1) == 2
    assert agreeing([1, 2, 3, 3], [-1, -1, 0, 1], [2, 3], 0) == 2
    assert agreeing([], None, [1, 1], 0) == agreeing([1], None, [1, 1], 2) == 0


@given(trees(), TEXTS, st.integers(0, 12))
def test_a_tree_is_verified_as_its_branches_are(tree: tuple[list[int], list[int]], text: list[int], at: int) -> None:
    position = min(at, len(text))
    assert agreeing(*tree, text, position) == reference.longest_agreeing(*tree, text[position:])


@given(TOKENS, TEXTS)
def test_a_chain_is_a_tree_without_branches(token_ids: list[int], text: list[int]) -> None:
    assert agreeing(token_ids, None, text, 0) == agreeing(token_ids, range(-1, len(token_ids) - 1), text, 0)


@given(st.lists(st.lists(trees(), min_size=1, max_size=4), max_size=3), TEXTS, st.integers(0, 12))
def test_drafters_side_by_side_are_each_walked_as_alone(
    drafts: list[list[tuple[list[int], list[int]]]], text: list[int], at: int
) -> None:
    prompt_length = min(at, len(text))
    askers = [Scripted(some) for some in drafts]
    together = walk(text, prompt_length, askers)
    for asker, steps in zip(askers, together, strict=True):
        expected = reference.decode(text, prompt_length, asker.draft)
        assert list(zip(steps.drafted.tolist(), steps.accepted.tolist(), strict=True)) == expected
        assert int(steps.accepted.sum()) + len(steps.accepted) == len(text) - prompt_length
        assert asker.asked == sorted(asker.asked)
        assert len(asker.told) == len(asker.asked) == len(steps.ns)


def test_who_drafted_the_last_token_is_told_so_though_it_is_not_counted() -> None:
    asker = Scripted([([1, 2, 3], [-1, 0, 1])])
    (steps,) = walk([0, 1, 2, 3], 1, [asker])
    assert asker.told == [3]
    assert steps.accepted.tolist() == [2]
