"""Lookup against its slow twin: any text, and texts at the edges of the format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.index.longest_match import longest_match
from ssd.errors import CacheError
from ssd.jit.addresses import address, dtype_of
from ssd.retrieval.segment import SEPARATOR, SPARSE_INDEX_STEP
from ssd.retrieval.snapshot import SegmentTable, Snapshot
from ssd.retrieval.suffix_array import build_segment, build_suffix_array
from ssd.retrieval.suffix_array_search import (
    MAX_MATCH_LENGTH,
    PATTERNS_BYTES,
    RangeExpander,
    SegmentSearch,
    added_rank,
    as_context,
    binary_search_all,
    expand_ranges,
    num_added,
    range_size,
    request_range,
    start_searches,
)
from tests.reference.drafting import make_snapshot
from tests.reference.retrieval import longest_agreement, naive_order, num_agreeing

Text = list[int]

LIMITS = [0, 1, 255, 256, 65_533, 65_534, 65_535, 65_536, 2**24 - 2, 2**24 - 1, 2**24, 2**31 - 2, 2**31 - 1]
"""The last id of a width, the first of the next, those beside them, and ids whose packed bytes are mostly zeros."""

FENCE_SIZES = [posts * SPARSE_INDEX_STEP + beside for posts in (1, 2, 3, 8) for beside in (-1, 0, 1)]
"""Sizes, separator included, at which a post of the fence comes or goes."""


def closed(*parts: Text) -> Text:
    return [token for part in parts for token in [*part, SEPARATOR]]


def fibonacci(size: int, low: int = 0, high: int = 1) -> Text:
    """Every factor occurs early and often, and none four times in a row."""
    one, other = [low], [low, high]
    while len(other) < size:
        one, other = other, other + one
    return other[:size]


def periodic(size: int, period: int, step: int = 1) -> Text:
    return [i % period * step for i in range(size)]


def check(snapshot: Snapshot, context: Text, *max_lengths: int) -> None:
    for max_length in max_lengths or (1, 2, 32, MAX_MATCH_LENGTH):
        match = longest_match(snapshot, np.array(context, np.int64), max_length)
        expected = longest_agreement(snapshot, context, min(max_length, MAX_MATCH_LENGTH))
        assert (match.length, match.support) == expected, (max_length, context)


def check_inside(snapshot: Snapshot, text: Text, seed: int, count: int = 6) -> None:
    """With contexts from ``text``: as they are, with another token before them, and with another one after."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        stop = int(random.integers(1, len(text) + 1))
        start = int(random.integers(max(0, stop - 300), stop))
        context = text[start:stop]
        other = int(random.choice([token for token in {*text, 3, 4} if token >= 0]))
        for tried in (context, [other, *context], [*context, other]):
            check(snapshot, [token for token in tried if token >= 0])


tokens = st.integers(0, 3)
sequences = st.lists(st.lists(tokens, max_size=8).map(lambda s: [*s, SEPARATOR]), min_size=1, max_size=5).map(
    lambda parts: [token for part in parts for token in part]
)
snapshots = st.builds(
    make_snapshot,
    st.lists(sequences, max_size=4),
    st.one_of(st.just([]), sequences),
    st.just(64),
    st.integers(0, 200),
)
contexts = st.lists(st.integers(-1, 4), max_size=50)


@given(snapshots, contexts, st.integers(1, 40))
@settings(max_examples=200)
def test_longest_match_equals_a_full_scan(snapshot: Snapshot, context: list[int], max_length: int) -> None:
    check(snapshot, context, max_length)


@pytest.mark.parametrize("size", FENCE_SIZES)
@pytest.mark.parametrize("scale", [1, 70_000, 8_000_000])  # in 2, 3 and 4 bytes
def test_sizes_beside_a_post_of_the_fence(size: int, scale: int) -> None:
    texts = [
        closed([0] * (size - 1)),
        closed([3 * scale] * (size - 1)),
        closed(periodic(size - 1, 2, scale)),
        closed(periodic(size - 1, 7, scale)),
        closed([token * scale for token in fibonacci(size - 1)]),
        closed([i * scale for i in range(size - 1)]),
        closed([(size - i) * scale for i in range(size - 1)]),
        [SEPARATOR] * size,
        closed(*[[scale]] * (size // 2), *([[]] if size % 2 else [])),
    ]
    assert all(len(text) == size for text in texts)
    for seed, text in enumerate(texts):
        check_inside(make_snapshot([text]), text, seed, count=2)
    check_inside(make_snapshot(texts), texts[3], size, count=2)


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 8, 31, 32, 33])
def test_periodic_text_under_contexts_in_and_out_of_step(period: int) -> None:
    text = closed(periodic(600, period), periodic(40, period))
    snapshot = make_snapshot([text], closed(periodic(50, period)))
    for context in (periodic(300, period), periodic(256 + period - 1, period), periodic(39, period), [1, 0, 1, 0]):
        check(snapshot, context, 1, 31, 32, 33, 255, 256, 300)
    check(snapshot, [*periodic(100, period), 1000])
    check(snapshot, [1000, *periodic(100, period)])


@given(
    st.lists(st.lists(st.sampled_from(LIMITS), max_size=40).map(lambda text: [*text, SEPARATOR]), max_size=5),
    st.lists(st.sampled_from(LIMITS), max_size=30),
    st.lists(st.sampled_from([*LIMITS, -1]), max_size=30),
    st.integers(0, 40),
    st.sampled_from([0, 1, 2, 3, 4, 256]),
)
@settings(max_examples=150)
def test_ids_at_the_limits_of_every_width(
    parts: list[Text], tail: Text, context: Text, overlap: int, max_length: int
) -> None:
    snapshot = make_snapshot(parts, [*tail, SEPARATOR])
    whole = [token for part in parts for token in part]
    check(snapshot, context, max_length)
    check(snapshot, [*context, *tail[-overlap:]], max_length)
    check(snapshot, [*context, *whole[max(0, len(whole) - 1 - overlap) : -1]], max_length)


def test_one_token_repeated_a_million_times() -> None:
    text = np.zeros(1_000_001, np.int32)
    text[-1] = SEPARATOR
    snapshot = make_snapshot([])
    segment = build_segment(text, start=0, segment_id="a")
    snapshot = Snapshot(1, SegmentTable([segment]), snapshot.ring, len(text), len(text))
    match = longest_match(snapshot, np.zeros(100, np.int32), 32)
    assert (match.length, match.support) == (32, 1_000_000 - 31)


# What the drafters do: every shorter length from the same search.


def ranks_by_length(snapshot: Snapshot, context: Text, lengths: list[int], exact: int) -> list[list[list[int]]]:
    """The new ranks of each segment at each of ``lengths``, which fall."""
    count = len(snapshot.segments)
    segments: Any = snapshot.segment_table.records.array
    ids, patterns = as_context(np.array(context, np.int64)), np.zeros(PATTERNS_BYTES, np.uint8)
    lanes: Any = np.empty(count, dtype_of(SegmentSearch))
    walkers: Any = np.empty(2 * count, dtype_of(RangeExpander))
    for scratch in (lanes, walkers):
        scratch.view(np.int64)[:] = -7
    start_searches(segments, ids, min(len(ids), MAX_MATCH_LENGTH), address(patterns), lanes, walkers)
    binary_search_all(lanes, count)
    found = []
    for length in lengths:
        for lane in range(count):
            request_range(lanes[lane], length)
        expand_ranges(lanes, walkers, count, exact)
        found.append([[added_rank(lanes, walkers, n, i) for i in range(num_added(walkers, n))] for n in range(count)])
    totals = [sum(len(new[lane]) for new in found) for lane in range(count)]
    assert totals == [range_size(walkers, lane) for lane in range(count)]
    return found


def agreeing_ranks(snapshot: Snapshot, context: Text) -> list[list[int]]:
    """How many tokens agree at each rank of each segment."""
    texts = [segment.tokens.tolist() for segment in snapshot.segments]
    return [
        [num_agreeing(text, position, context, MAX_MATCH_LENGTH) for position in segment.order.tolist()]
        for text, segment in zip(texts, snapshot.segments, strict=True)
    ]


SMALL = st.lists(st.integers(0, 2), max_size=60)


@given(
    st.lists(st.tuples(SMALL, st.sampled_from([1, 30_000, 2_000_000, 2**30 - 1])), min_size=1, max_size=4),
    SMALL.filter(bool),
    st.sampled_from([1, 30_000, 2_000_000, 2**30 - 1]),
    st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(lambda found: sorted(found, reverse=True)),
)
@settings(max_examples=150)
def test_widening_takes_exactly_the_ranks_that_agree(
    parts: list[tuple[Text, int]], context: Text, scale: int, lengths: list[int]
) -> None:
    snapshot = make_snapshot([closed([token * scale for token in text]) for text, scale in parts])
    context = [token * scale for token in context]
    agreeing = agreeing_ranks(snapshot, context)
    taken: list[set[int]] = [set() for _ in parts]
    for length, found in zip(lengths, ranks_by_length(snapshot, context, lengths, 1 << 62), strict=True):
        for lane, new in enumerate(found):
            assert new == sorted(set(new) - taken[lane])
            taken[lane] |= set(new)
            assert taken[lane] == {rank for rank, n in enumerate(agreeing[lane]) if n >= length}


@given(st.integers(1, 3), st.integers(30, 900), st.integers(1, 30), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_widening_that_does_not_close_in_takes_more_than_half(alphabet: int, size: int, exact: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    text = random.integers(0, alphabet, size).tolist()
    snapshot = make_snapshot([closed(text), closed(text[::-1])])
    stop = int(random.integers(1, size + 1))
    context, lengths = text[max(0, stop - 40) : stop], [32, 8, 4, 2, 1]
    agreeing = agreeing_ranks(snapshot, context)
    taken: list[set[int]] = [set() for _ in agreeing]
    for length, found in zip(lengths, ranks_by_length(snapshot, context, lengths, exact), strict=True):
        for lane, new in enumerate(found):
            assert new == sorted(set(new) - taken[lane])
            taken[lane] |= set(new)
            there = {rank for rank, n in enumerate(agreeing[lane]) if n >= length}
            assert taken[lane] <= there
            assert 2 * len(taken[lane]) > len(there) or not there
            assert len(taken[lane]) >= min(exact, len(there))


# What callers pass


@pytest.mark.parametrize(
    "bad", [np.zeros(3), np.zeros((2, 2), np.int32), np.array(["1"]), np.array(5), np.array([True])]
)
def test_what_is_no_sequence_of_integers_is_refused(bad: np.ndarray[Any, Any]) -> None:
    with pytest.raises(CacheError, match=r"one sequence of integers, got .*pass int32\[n\]"):
        longest_match(make_snapshot([closed([1])]), bad, 32)


# The order that is searched


@given(st.lists(st.one_of(st.integers(-1, 3), st.integers(-1, 70_000), st.integers(-1, 2**31 - 1)), max_size=60))
def test_equals_sorting_the_order(tokens: list[int]) -> None:
    assert build_suffix_array(np.array(tokens, np.int32)).tolist() == naive_order(tokens)


@pytest.mark.parametrize("width", [2, 3, 4])
@given(tokens=st.lists(st.integers(-1, 2), min_size=1, max_size=60))
def test_every_width_of_the_sort_orders_alike(width: int, tokens: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssd.retrieval.suffix_array._narrowest", lambda _: np.uint16 if width == 2 else np.uint32)
        patch.setattr("ssd.retrieval.suffix_array._sorted_width", lambda _: width)
        assert build_suffix_array(np.array(tokens, np.int32)).tolist() == naive_order(tokens)


def test_a_text_too_long_for_the_sorter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd.retrieval.suffix_array._MAX_SORTED_BYTES", 3)
    with pytest.raises(CacheError, match=r"at most 3"):
        build_suffix_array(np.arange(4, dtype=np.int32))


def test_a_million_equal_tokens_are_no_worst_case() -> None:
    assert np.array_equal(build_suffix_array(np.zeros(1_000_000, np.int32)), np.arange(1, 1_000_001))
