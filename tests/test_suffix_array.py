from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.retrieval.snapshot import SEPARATOR
from ssd.retrieval.suffix_array import build_segment, build_suffix_array, dense_ranks
from tests.reference.retrieval import naive_suffix_array


@pytest.mark.parametrize("tokens", [[], [SEPARATOR], [7], [3, 3], [3, 5], [5, 3], [2**31 - 1, 0, SEPARATOR]])
def test_small_texts(tokens: list[int]) -> None:
    suffixes = build_suffix_array(np.array(tokens, np.int32))
    assert suffixes.dtype == np.int32
    assert suffixes.tolist() == naive_suffix_array(tokens)


@given(st.lists(st.one_of(st.integers(-1, 3), st.integers(-1, 70_000), st.integers(-1, 2**31 - 1)), max_size=60))
def test_equals_sorting_the_suffixes(tokens: list[int]) -> None:
    assert build_suffix_array(np.array(tokens, np.int32)).tolist() == naive_suffix_array(tokens)


@pytest.mark.parametrize(
    ("num_distinct", "dtype"), [(256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)]
)
def test_ranks_take_the_narrowest_type(num_distinct: int, dtype: type) -> None:
    for step in (1, 30_000):  # small ids by table, large ones by sorting
        ranks = dense_ranks(np.arange(num_distinct, dtype=np.int32) * step)
        assert ranks.dtype == dtype
        assert ranks.tolist() == list(range(num_distinct))


def test_more_distinct_tokens_than_two_bytes_hold() -> None:
    tokens = np.random.default_rng(0).permutation(70_000).astype(np.int32)
    suffixes = build_suffix_array(tokens)
    assert tokens[suffixes].tolist() == list(range(70_000))


def test_a_million_equal_tokens_are_no_worst_case() -> None:
    tokens = np.zeros(1_000_000, np.int32)
    started = time.perf_counter()
    suffixes = build_suffix_array(tokens)
    assert time.perf_counter() - started < 5.0
    assert np.array_equal(suffixes, np.arange(1_000_000)[::-1])


def test_a_read_only_text_can_be_sorted() -> None:
    tokens = np.array([2, 1, SEPARATOR], np.int32)
    tokens.flags.writeable = False
    segment = build_segment(tokens, start=5, segment_id="a")
    assert segment.suffixes.tolist() == [2, 1, 0]
    assert (segment.start, segment.stop, len(segment)) == (5, 8, 3)
    assert not segment.suffixes.flags.writeable
