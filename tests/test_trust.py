"""How far promises are trusted: less where they were not kept, and again after a while."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.drafting.protocol import EMPTY_DRAFT, Draft
from ssd.engine.trust import Trust, is_sure


@given(st.lists(st.tuples(st.floats(0.0, 64.0), st.integers(0, 64)), max_size=60))
def test_the_share_is_what_was_accepted_of_what_was_promised(rows: list[tuple[float, int]]) -> None:
    trust = Trust()
    for promised, accepted in rows:
        trust.observe(0.0, promised, accepted)
    kept = [0.97 if promised else 0.999 for promised, _ in rows]
    weights = [prod(kept[i + 1 :]) for i in range(len(rows))]
    all_promised = 1 + sum(w * p for w, (p, _) in zip(weights, rows, strict=True))
    all_accepted = 1 + sum(w * a for w, (_, a) in zip(weights, rows, strict=True))
    assert trust.share(0.0) == pytest.approx(min(1.0, all_accepted / all_promised))


def test_every_temperature_has_its_own() -> None:
    trust = Trust()
    for _ in range(50):
        trust.observe(1.0, 2.0, 0)
    assert trust.share(1.0) < 0.1
    assert trust.share(0.0) == trust.share(0.5) == 1.0


def test_trust_comes_back_while_nothing_is_drafted() -> None:
    trust = Trust()
    for _ in range(50):
        trust.observe(1.0, 2.0, 0)
    for _ in range(6000):
        trust.observe(1.0, 0.0, 0)
    assert trust.share(1.0) > 0.8


def test_only_what_is_almost_certain_may_delay_the_first_token() -> None:
    draft = Draft(np.array([5, 6], np.int32), probabilities=np.array([0.95, 0.2]))
    assert is_sure(draft, 1.0)
    assert not is_sure(draft, 0.8)
    assert not is_sure(Draft(draft.token_ids, probabilities=np.array([0.6, 0.99])), 1.0)
    assert is_sure(Draft(draft.token_ids), 0.1), "a drafter without estimates is taken at its word"
    assert is_sure(EMPTY_DRAFT, 1.0)
