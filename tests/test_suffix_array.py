from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.errors import CacheError
from ssd.retrieval.segment import FENCE_STEP, GUARD_BYTES, SEPARATOR
from ssd.retrieval.suffix_array import build_order, build_segment
from tests.reference.retrieval import naive_order


@given(st.lists(st.one_of(st.integers(-1, 3), st.integers(-1, 70_000), st.integers(-1, 2**31 - 1)), max_size=60))
def test_equals_sorting_the_order(tokens: list[int]) -> None:
    assert build_order(np.array(tokens, np.int32)).tolist() == naive_order(tokens)


def test_a_million_equal_tokens_are_no_worst_case() -> None:
    assert np.array_equal(build_order(np.zeros(1_000_000, np.int32)), np.arange(1, 1_000_001))


@pytest.mark.parametrize("width", [2, 3, 4])
@given(tokens=st.lists(st.integers(-1, 2), min_size=1, max_size=60))
def test_every_width_of_the_sort_orders_alike(width: int, tokens: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssd.retrieval.suffix_array._narrowest", lambda _: np.uint16 if width == 2 else np.uint32)
        patch.setattr("ssd.retrieval.suffix_array._sorted_width", lambda _: width)
        assert build_order(np.array(tokens, np.int32)).tolist() == naive_order(tokens)


def test_a_text_too_long_for_the_sorter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd.retrieval.suffix_array._MAX_SORTED_BYTES", 3)
    with pytest.raises(CacheError, match=r"at most 3"):
        build_order(np.arange(4, dtype=np.int32))


def test_the_fence_holds_what_stands_before_every_post() -> None:
    tokens = np.append(np.random.default_rng(0).integers(0, 70_000, 1000), SEPARATOR).astype(np.int32)
    segment = build_segment(tokens, start=0, segment_id="a")
    packed = segment.text.tobytes()
    for post, position in enumerate(segment.order[::FENCE_STEP].tolist()):
        end = GUARD_BYTES + segment.width * position
        assert int(segment.fence[post]) == int.from_bytes(packed[end - 8 : end], "little")
    assert (np.diff(segment.fence.astype(object)) >= 0).all()
