"""Which drafts have paid, and what withheld ones would have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ssd.drafting import Draft
from ssd.pricing.account import Account, Withheld, gain, promise_tested
from tests.reference.pricing import slow_path, slow_promise


def row() -> Any:
    return SimpleNamespace(balance=0.0)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Chains and trees over few tokens, no two children of a node the same."""
    size, known = draw(st.integers(1, 10)), set[tuple[int, int]]()
    tokens, parents = list[int](), list[int]()
    for node in range(size):
        parent, token = draw(st.integers(-1, node - 1)), draw(st.integers(0, 3))
        if (parent, token) not in known:
            known.add((parent, token))
            tokens.append(token)
            parents.append(parent if parent < len(tokens) - 1 else len(tokens) - 2)
    chances = np.array(draw(st.lists(st.floats(0, 1), min_size=len(tokens), max_size=len(tokens))))
    tree = None if draw(st.booleans()) else np.array(parents, np.int32)
    return Draft(np.array(tokens, np.int32), probabilities=chances, parents=tree)


@given(drafts(), st.lists(st.integers(0, 3), max_size=12), st.data())
def test_a_withheld_draft_is_followed_as_slowly_as_can_be(draft: Draft, came: list[int], data: st.DataObject) -> None:
    parents = draft.parents_of_all()
    path, goes_on = slow_path(draft.token_ids.tolist(), parents, came)
    withheld, at = Withheld(draft, 3, 0.5), 0
    context, found = np.array([9, 9, 9, *came], np.int32), True
    while found and at < len(came):
        at = data.draw(st.integers(at + 1, len(came)))
        found = withheld.follow(context[: 3 + at])
    assert withheld.num_right == len(path) and (found == goes_on or not came)
    assert np.isclose(withheld.promised, slow_promise(draft.probabilities.tolist(), parents, path))  # type: ignore[union-attr]
    assert promise_tested(draft, path) == withheld.promised


def test_what_does_not_pay_is_stopped_after_a_few_tokens_and_begins_again_when_it_would_pay() -> None:
    account, lost = Account(), 0.0
    for _ in range(20):
        request = row()
        for _ in range(50):
            if account.pays(1.0, request):
                lost += 0.2
            account.settle(1.0, request, gain(0, 0.2))
    assert lost < 1.0
    request, steps = row(), 0
    while not account.pays(1.0, request):
        account.settle(1.0, request, gain(1, 0.1))
        steps += 1
    assert steps < 5 and not account.pays(1.0, row()), "it pays for the request that proves it, not yet for others"
    assert account.pays(0.0, row()), "nothing is known of another temperature"


@given(st.lists(st.tuples(st.integers(0, 16), st.floats(0, 3)), max_size=200))
def test_what_paid_long_is_stopped_as_soon(history: list[tuple[int, float]]) -> None:
    account = Account()
    for num_right, cost in history:
        account.settle(0.7, row(), gain(num_right, cost))
    request, num_wrong = row(), 0
    while account.pays(0.7, request):
        account.settle(0.7, request, gain(0, 0.5))
        num_wrong += 1
    assert num_wrong <= 4
