"""Sequences read from segments a block at a time, and what a push unpacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_builder.commands.push import push
from ssd.retrieval import ring as module
from ssd.retrieval import segment as segment_module
from ssd.retrieval.ring import sequences_of
from ssd.retrieval.segment import SEPARATOR, unpack
from ssd.retrieval.static import StaticWriter
from ssd.retrieval.suffix_array import build_segment
from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server  # a fixture

FINGERPRINT = "0123456789abcdef" * 2


@given(
    st.lists(st.lists(st.lists(st.integers(0, 1 << 20), max_size=30), min_size=1, max_size=12), max_size=4),
    st.integers(1, 40),
)
def test_sequences_are_those_of_a_plain_split(texts: list[list[list[int]]], block_tokens: int) -> None:
    """Blocks of any length, sequences longer than several of them, empty ones."""
    segments = [
        build_segment(
            np.array([token for text in segment for token in (*text, SEPARATOR)], np.int32),
            start=None,
            segment_id="a",
        )
        for segment in texts
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_TOKENS", block_tokens)
        found = [each.tolist() for each in sequences_of(segments)]
    assert found == [text for segment in texts for text in segment if text]


def test_a_push_unpacks_each_token_a_few_times_and_never_many_at_once(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[int] = []

    def counting(packed: Any, num_tokens: int, *more: Any, **options: Any) -> Any:
        unpacked.append(num_tokens)
        return unpack(packed, num_tokens, *more, **options)

    for place in (module, segment_module):
        monkeypatch.setattr(place, "unpack", counting)
    with StaticWriter(tmp_path / "warm", fingerprint=FINGERPRINT) as writer:
        for number in range(1000):
            writer.append(np.full(200, number, np.int32))
    result = push(tmp_path / "warm", redis_server.url, "default")
    assert (result.num_sequences, result.num_tokens) == (1000, 200_000)
    assert sum(unpacked) <= 3 * 201_000
    assert max(unpacked) <= 1 << 16
