"""Lookup against its slow twin."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.retrieval.search import longest_match
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot, make_snapshot, segment_table
from ssd.retrieval.suffix_array import build_segment
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


def as_context(values: list[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


@given(snapshots, contexts, st.integers(1, 40))
@settings(max_examples=200)
def test_longest_match_equals_a_full_scan(snapshot: Snapshot, context: list[int], max_length: int) -> None:
    match = longest_match(snapshot, as_context(context), max_length)
    assert (match.length, match.support) == reference.longest_match(snapshot, context, max_length)


WIDE = {2: 20_000, 3: 5_000_000, 4: 700_000_000}  # id n of the small texts stands for n times this


@given(
    st.lists(st.tuples(sequences, st.sampled_from([2, 3, 4])), max_size=4), contexts, st.sampled_from([2, 3, 4]),
    st.integers(1, 40),
)  # fmt: skip
@settings(max_examples=200)
def test_segments_of_every_width_are_searched_together(
    parts: list[tuple[list[int], int]], context: list[int], asked: int, max_length: int
) -> None:
    def spread(values: list[int], width: int) -> list[int]:
        return [value if value < 0 else value * WIDE[width] for value in values]

    snapshot = reference.make_snapshot([spread(text, width) for text, width in parts])
    wide = spread([min(value, 2) for value in context], asked)
    match = longest_match(snapshot, as_context(wide), max_length)
    assert (match.length, match.support) == reference.longest_match(snapshot, wide, max_length)


def test_one_token_repeated_a_million_times() -> None:
    text = np.zeros(1_000_001, np.int32)
    text[-1] = SEPARATOR
    snapshot = reference.make_snapshot([])
    segment = build_segment(text, start=0, segment_id="a")
    snapshot = make_snapshot(1, (segment,), segment_table([segment]), snapshot.ring, len(text), len(text))
    match = longest_match(snapshot, np.zeros(100, np.int32), 32)
    assert (match.length, match.support) == (32, 1_000_000 - 31)


def test_more_than_65535_distinct_tokens() -> None:
    text = [*range(70_000, 0, -1), SEPARATOR]
    match = longest_match(reference.make_snapshot([text]), as_context([69_000, 68_999, 68_998]), 32)
    assert (match.length, match.support) == (3, 1)
