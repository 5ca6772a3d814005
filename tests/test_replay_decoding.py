"""Outputs decoded by one kernel call each, against the drafter asked a step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_builder.evaluation.costs import CostCurve, flat
from cache_builder.evaluation.decoding import OutputDecoder
from cache_builder.evaluation.log import Row
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.drafting.ask import SOURCES
from ssd.pricing.calibration import SURE
from ssd.retrieval.cache import CacheSet, SuffixCache
from tests.reference.decoding import SlowDecoder

STEEP = CostCurve("steep", np.array([1.0, 2.0, 8.0]), np.array([1.0, 1.3, 1.6]))


@contextmanager
def small_cache() -> Iterator[SuffixCache]:
    with CacheSet(CacheConfig(index=IndexConfig(seal_tokens=64)), "0" * 32, inline=True) as caches:
        yield caches.get()


@st.composite
def traffic(draw: st.DrawFn) -> list[Row]:
    """Requests of a few phrases in any order, here and there another token."""
    phrases = [draw(st.lists(st.integers(1, 40), min_size=3, max_size=12)) for _ in range(4)]
    rows = []
    for _ in range(draw(st.integers(1, 8))):
        parts = [phrases[i] for i in draw(st.lists(st.integers(0, 3), min_size=2, max_size=8))]
        text = np.array([token for part in parts for token in part], np.int32)
        for place in draw(st.lists(st.integers(0, len(text) - 1), max_size=3)):
            text[place] = draw(st.integers(1, 40))
        cut = draw(st.integers(0, len(text) - 1))
        rows.append(Row(text[:cut], text[cut:]))
    return rows


@settings(max_examples=40)
@given(traffic(), st.booleans(), st.sampled_from([1, 2, 5, 16]), st.sampled_from([flat(8), STEEP]), st.booleans())
def test_a_whole_output_at_once_is_decoded_as_step_by_step(
    rows: list[Row], tree: bool, limit: int, curve: CostCurve, is_first_drafted: bool
) -> None:
    sure = 0.0 if is_first_drafted else SURE
    fast = OutputDecoder(curve, draft=DraftConfig(num_speculative_tokens=limit), tree=tree, sure=sure)
    slow = SlowDecoder(curve, limit, tree=tree, sure=sure)
    with small_cache() as cache:
        for row in rows:
            expected = slow.decode(row, cache.snapshot())
            found = fast.decode(row, cache.snapshot())
            assert found.drafted.tolist() == [step[0] for step in expected]
            assert found.accepted.tolist() == [step[1] for step in expected]
            drafts = zip(found.sources.tolist(), expected, strict=True)
            assert all(SOURCES[source] == step[2] for source, step in drafts if step[0])
            assert int(found.accepted.sum()) + len(found.accepted) == len(row.output)
            cache.append(row.text(), prompt_length=len(row.context))
            cache.maintain()


def test_what_was_drafted_is_counted_by_source() -> None:
    decoder = OutputDecoder(flat(64), draft=DraftConfig(), sure=0.0)
    phrase = np.arange(1, 33, dtype=np.int32)
    with small_cache() as cache:
        cache.append(np.concatenate([phrase, phrase]))
        steps = decoder.decode(Row(phrase, np.append(phrase, np.int32(99))), cache.snapshot())
    by_source = decoder.by_source()
    assert sum(each[1] for each in by_source.values()) == steps.drafted.sum()
    assert sum(each[2] for each in by_source.values()) == steps.accepted.sum()


@pytest.mark.parametrize("limit", [0, 64])
def test_without_a_cache_and_with_one_token_there_is_one_step(limit: int) -> None:
    decoder = OutputDecoder(flat(8), draft=DraftConfig(num_speculative_tokens=limit))
    steps = decoder.decode(Row(np.zeros(0, np.int32), np.array([3], np.int32)), None)
    assert steps.accepted.tolist() == [0]
