"""Text of use stays, whatever is stored beside it: against a slow twin, and what floods, restarts and crashes leave."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.files import is_retained, new_segment_id
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.namespace_cache import NamespaceCache
from ssd.retrieval.reuse import WINDOW_TOKENS, reused_texts
from ssd.retrieval.segment import Segment
from ssd.retrieval.snapshot import Snapshot
from ssd.retrieval.suffix_array import build_segment
from tests.reference.eviction import SlowIndex
from tests.reference.retrieval import sequences, snapshot_text

Tokens = npt.NDArray[np.int32]
FINGERPRINT = "0" * 32
CAPACITY = 4096


def tokens_of(ids: list[int]) -> Tokens:
    return np.array(ids, np.int32)


def longest_known(snapshot: Snapshot, text: Tokens) -> int:
    """The longest part of ``text`` that is stored in one piece."""
    stored = ",".join(map(str, snapshot_text(snapshot)))
    best = 0
    for start in range(len(text)):
        while start + best < len(text) and ",".join(map(str, text[start : start + best + 1])) + "," in stored + ",":
            best += 1
    return best


# The policy


def seal(index: SuffixIndex) -> Segment | None:
    due = index.memtable_to_flush()
    if due is None:
        return None
    segment = build_segment(due[1], start=due[0], segment_id=new_segment_id(due[0]))
    index.install_flushed(segment)
    return segment


def merge(index: SuffixIndex) -> list[int]:
    """Start positions of what was merged."""
    inputs = index.plan_merge()
    if inputs is None:
        return []
    text = np.concatenate([segment.tokens for segment in inputs])
    kept = {is_retained(segment.segment_id) for segment in inputs}
    assert len(kept) == 1, "text of use is merged with text that is yet to be"
    merged = build_segment(text, start=inputs[0].start, segment_id=new_segment_id(inputs[0].start, retained=kept.pop()))
    assert index.install_merged(inputs, merged)
    return [segment.start or 0 for segment in inputs]


def keep(index: SuffixIndex) -> bool:
    due = index.eviction_pass()
    if due is None:
        return False
    kept = [
        (left, build_segment(text, start=left.start, segment_id=new_segment_id(left.start, retained=True)))
        for left, text in reused_texts(due)
    ]
    index.install_retained(due.evicted, kept)
    return True


@given(st.integers(0, 2**32 - 1), st.sampled_from([1024, 2048]), st.integers(2, 4))
@settings(max_examples=40)
def test_equals_the_slow_twin(seed: int, capacity: int, fanout: int) -> None:
    random = np.random.default_rng(seed)
    index = SuffixIndex(IndexConfig(capacity_tokens=capacity, flush_tokens=48, merge_fanout=fanout, lead_in_tokens=4))
    twin = SlowIndex(capacity)
    phrases = [random.integers(0, 500, int(random.integers(10, 60))).tolist() for _ in range(12)]
    num_kept = num_stored = 0
    for _ in range(150):
        operation = random.choice(["say", "say", "flood", "seal", "merge", "keep"])
        if index.num_memtable_tokens > capacity // 2:
            operation = "seal"  # or the ring would drop what is in no segment
        if operation in ("say", "flood"):
            prompt = random.integers(0, 500, int(random.integers(0, 20))).tolist()
            output = phrases[int(random.integers(len(phrases)))] if operation == "say" else []
            output = output or random.integers(0, 500, int(random.integers(1, 60))).tolist()
            pieces = index.append(tokens_of([*prompt, *output]), prompt_length=len(prompt))
            twin.append([piece.tolist() for piece in pieces], len(prompt))
            num_stored += sum(len(piece) + 1 for piece in pieces)
        elif operation == "seal":
            if segment := seal(index):
                twin.seal(len(segment))
        elif operation == "merge":
            twin.merge(merge(index))
        elif keep(index):
            twin.keep()
        assert snapshot_text(index.snapshot()) == twin.text()
        assert index.num_retained_tokens == sum(len(tokens) for _, tokens in twin.kept) <= capacity / 2
        assert index.snapshot().num_tokens == num_stored - index.num_evicted_tokens <= capacity
        assert all(len(segment) <= max(2, capacity // 8) for segment in index.snapshot().segments)
        starts = [segment.start or 0 for segment in index.ring_segments]
        assert starts == sorted(starts) and all(sequences(segment.tokens.tolist()) for segment in index.ring_segments)
        num_kept += index.num_retained_tokens
    assert num_kept > 0, "nothing was ever kept"


# The cache


def opened(directory: Path | None = None, capacity_tokens: int = CAPACITY) -> CacheManager:
    index = IndexConfig(capacity_tokens=capacity_tokens, flush_tokens=256, merge_fanout=2)
    return CacheManager(CacheConfig(index=index, directory=directory), FINGERPRINT, inline=True)


def said(cache: NamespaceCache, text: Tokens, *, prompt_length: int = 0) -> None:
    cache.append(text, prompt_length=prompt_length)
    cache.maintain()


def flood(cache: NamespaceCache, num_tokens: int, seed: int = 1) -> None:
    """Random text as prompts that come once."""
    random = np.random.default_rng(seed)
    for _ in range(num_tokens // 200):
        said(cache, random.integers(0, 30_000, 200).astype(np.int32), prompt_length=199)


TEXT = np.random.default_rng(0).integers(0, 30_000, 300).astype(np.int32)


def test_a_prompt_whose_text_was_evicted_is_stored_again() -> None:
    with opened() as caches:
        cache = caches.get()
        said(cache, TEXT)
        said(cache, TEXT)
        prompt = np.arange(300, dtype=np.int32)
        said(cache, prompt, prompt_length=300)
        flood(cache, 4 * CAPACITY)
        before = cache.stats().num_skipped_tokens
        said(cache, prompt, prompt_length=300)
        assert cache.stats().num_skipped_tokens == before
        assert longest_known(cache.snapshot(), prompt) == 300


def test_what_was_said_again_and_not_what_was_asked_again_outlives_a_flood_a_restart_and_another_one(
    tmp_path: Path,
) -> None:
    asked = TEXT[::-1].copy()
    with opened(tmp_path) as caches:
        cache = caches.get()
        for text in (TEXT, TEXT):
            said(cache, text)
        for text in (asked, np.concatenate([[7], asked]).astype(np.int32)):
            said(cache, text, prompt_length=len(text))
        flood(cache, 4 * CAPACITY)
        kept = cache.stats().num_retained_tokens
        assert 250 <= kept <= 600 and longest_known(cache.snapshot(), asked) < WINDOW_TOKENS
    with opened(tmp_path) as caches:
        assert caches.get().stats().num_retained_tokens == kept
        assert caches.get().stats().num_failures == 0
        flood(caches.get(), 4 * CAPACITY)
        assert longest_known(caches.get().snapshot(), TEXT) >= 250
        assert caches.get().stats().num_tokens <= CAPACITY


def test_a_smaller_capacity_after_a_restart_leaves_room_for_new_text(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    with opened(tmp_path) as caches:
        for _ in range(CAPACITY // 100):
            text = random.integers(0, 30_000, 100).astype(np.int32)
            said(caches.get(), text)
            said(caches.get(), text)
        assert caches.get().stats().num_retained_tokens > CAPACITY / 4
    with opened(tmp_path, capacity_tokens=CAPACITY // 4) as caches:
        assert caches.get().stats().num_tokens <= CAPACITY / 4
        assert caches.get().stats().num_retained_tokens <= CAPACITY / 8


# The index alone


def index_of(capacity_tokens: int = 800, merge_fanout: int = 2) -> SuffixIndex:
    config = IndexConfig(capacity_tokens=capacity_tokens, flush_tokens=4, merge_fanout=merge_fanout, lead_in_tokens=1)
    return SuffixIndex(config)


def test_sequences_dropped_while_they_are_being_sealed_are_not_lost() -> None:
    index = index_of(capacity_tokens=16)
    index.append(tokens_of([1]))
    due = index.memtable_to_flush()
    assert due is not None
    for token in range(2, 10):
        index.append(tokens_of([token]))
    assert index.num_dropped_tokens == 0  # [1] left the ring, but its copy is on the way
    index.install_flushed(build_segment(due[1], start=due[0], segment_id="a"))
    assert index.snapshot().num_tokens <= 16
    index.append(tokens_of([10]))
    assert index.num_dropped_tokens == 2


@pytest.mark.parametrize("fanout", [2, 4])
@pytest.mark.parametrize("size", [3, 4, 15, 16, 17])
def test_a_backlog_of_seals_is_sorted_about_as_often_as_a_steady_stream(fanout: int, size: int) -> None:
    random = np.random.default_rng(size)
    index, total = index_of(capacity_tokens=10_000, merge_fanout=fanout), 0
    while total < 2500:
        tokens = random.integers(0, 9, size + int(random.integers(0, 3))).astype(np.int32)
        index.append(tokens)
        seal(index)
        total += len(tokens) + 1
    num_sorted, inputs = 0, index.plan_merge()
    while inputs is not None:
        num_sorted += sum(map(len, inputs))
        assert merge(index)
        inputs = index.plan_merge()
    assert num_sorted <= 2.5 * total * math.log(1250 / size, fanout)
    assert len(index.snapshot().segments) <= 2 * fanout * math.log(1250 / size, fanout) + 8


def test_small_segments_between_large_ones_are_merged_too() -> None:
    index = index_of(capacity_tokens=100_000, merge_fanout=4)
    for i in range(400):
        index.append(tokens_of([*range(30 if i % 2 else 1)]))
        seal(index)
        while merge(index):
            pass
    assert len(index.snapshot().segments) <= 4 * 8
