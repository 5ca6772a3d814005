from __future__ import annotations

import math

import numpy as np
import pytest

from ssd.config import IndexConfig
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.segment import Segment
from ssd.retrieval.suffix_array import build_segment
from tests.reference.retrieval import snapshot_text


def _tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def _seal(index: SuffixIndex) -> Segment | None:
    due = index.tail_to_seal()
    if due is None:
        return None
    segment = build_segment(due[1], start=due[0], segment_id=str(due[0]))
    index.install_sealed(segment)
    return segment


def _merge(index: SuffixIndex) -> bool:
    inputs = index.merge_plan()
    if inputs is None:
        return False
    tokens = np.concatenate([segment.tokens for segment in inputs])
    return index.install_merged(inputs, build_segment(tokens, start=inputs[0].start, segment_id="merged"))


def _index(capacity_tokens: int = 800, seal_tokens: int = 4, merge_fanout: int = 2) -> SuffixIndex:
    return SuffixIndex(
        IndexConfig(
            capacity_tokens=capacity_tokens, seal_tokens=seal_tokens, merge_fanout=merge_fanout, lead_in_tokens=1
        )
    )


def test_a_snapshot_is_unchanged_by_a_later_seal_and_merge() -> None:
    index = _index()
    for token in range(8):
        index.append(_tokens(token, token, token))
        _seal(index)
    before = index.snapshot()
    text = snapshot_text(before)
    while _merge(index):
        pass
    assert len(index.snapshot().segments) < len(before.segments)
    assert snapshot_text(before) == text == snapshot_text(index.snapshot())


def test_sequences_dropped_while_they_are_being_sealed_are_not_lost() -> None:
    index = _index(capacity_tokens=16)
    index.append(_tokens(1))
    due = index.tail_to_seal()
    assert due is not None
    for token in range(2, 10):
        index.append(_tokens(token))
    assert index.num_dropped_tokens == 0  # [1] left the ring, but its copy is on the way
    index.install_sealed(build_segment(due[1], start=due[0], segment_id="a"))
    assert index.snapshot().num_tokens <= 16
    index.append(_tokens(10))
    assert index.num_dropped_tokens == 2


@pytest.mark.parametrize("fanout", [2, 4])
@pytest.mark.parametrize("size", [3, 4, 15, 16, 17])
def test_a_backlog_of_seals_is_sorted_about_as_often_as_a_steady_stream(fanout: int, size: int) -> None:
    random = np.random.default_rng(size)
    index, total = _index(capacity_tokens=10_000, seal_tokens=4, merge_fanout=fanout), 0
    while total < 2500:
        tokens = random.integers(0, 9, size + int(random.integers(0, 3))).astype(np.int32)
        index.append(tokens)
        _seal(index)
        total += len(tokens) + 1
    num_sorted, inputs = 0, index.merge_plan()
    while inputs is not None:
        num_sorted += sum(map(len, inputs))
        assert _merge(index)
        inputs = index.merge_plan()
    assert num_sorted <= 2.5 * total * math.log(1250 / size, fanout)
    assert len(index.snapshot().segments) <= 2 * fanout * math.log(1250 / size, fanout) + 8


def test_small_segments_between_large_ones_are_merged_too() -> None:
    index = _index(capacity_tokens=100_000, seal_tokens=4, merge_fanout=4)
    for i in range(400):
        index.append(_tokens(*range(30 if i % 2 else 1)))
        _seal(index)
        while _merge(index):
            pass
    assert len(index.snapshot().segments) <= 4 * 8
