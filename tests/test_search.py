"""Lookup against its slow twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.retrieval.search import find_interval, longest_match
from ssd.retrieval.snapshot import SEPARATOR
from ssd.retrieval.suffix_array import build_segment, build_suffix_array
from tests.reference import drafting as reference

tokens = st.integers(0, 3)
sequences = st.lists(st.lists(tokens, max_size=8).map(lambda s: [*s, SEPARATOR]), min_size=1, max_size=5).map(
    lambda parts: [token for part in parts for token in part]
)
snapshots = st.builds(
    reference.make_snapshot,
    st.lists(sequences, max_size=4),
    st.one_of(st.just([]), sequences),
    st.just(64),
    st.integers(0, 200),
)
contexts = st.lists(st.integers(-1, 4), max_size=50)


def as_context(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


@given(snapshots, contexts, st.integers(1, 40))
@settings(max_examples=200)
def test_longest_match_equals_a_full_scan(snapshot, context, max_length):
    match = longest_match(snapshot, as_context(context), max_length)
    assert (match.length, match.support) == reference.longest_match(snapshot, context, max_length)


@given(sequences, st.lists(st.integers(0, 4), max_size=6))
@settings(max_examples=200)
def test_interval_holds_exactly_the_occurrences(text, pattern):
    array = as_context(text)
    suffixes = build_suffix_array(array)
    lo, hi = find_interval(array, suffixes, as_context(pattern))
    assert sorted(suffixes[lo:hi].tolist()) == [i for i in range(len(text)) if text[i : i + len(pattern)] == pattern]


def test_pattern_greater_than_every_suffix_is_absent():
    array = as_context([1, 2, 1, SEPARATOR])
    assert find_interval(array, build_suffix_array(array), as_context([3])) == (4, 4)
    assert find_interval(array, build_suffix_array(array), as_context([2, 1, 0])) == (4, 4)


@pytest.mark.parametrize("context", [[], [0], [SEPARATOR], [5] * 1000])
def test_empty_index_matches_nothing(context):
    assert longest_match(reference.make_snapshot([]), as_context(context), 32).length == 0


def test_one_token_repeated_a_million_times():
    text = np.zeros(1_000_001, np.int32)
    text[-1] = SEPARATOR
    snapshot = reference.make_snapshot([])
    segment = build_segment(text, start=0, segment_id="a")
    table = np.array([(segment.tokens.ctypes.data, segment.suffixes.ctypes.data, len(segment))], np.int64)
    snapshot = type(snapshot)(1, (segment,), table, snapshot.ring, len(text), len(text))
    match = longest_match(snapshot, np.zeros(100, np.int32), 32)
    assert (match.length, match.support) == (32, 1_000_000 - 31)


def test_more_than_65535_distinct_tokens():
    text = [*range(70_000, 0, -1), SEPARATOR]
    match = longest_match(reference.make_snapshot([text]), as_context([69_000, 68_999, 68_998]), 32)
    assert (match.length, match.support) == (3, 1)
