"""The row drafter: against its slow twin as rows come, move and go, and what it says of rows that hold another text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import CacheConfig, IndexConfig
from ssd.drafting.drafter import NO_SNAPSHOT
from ssd.drafting.rows import RowDrafter, Text
from ssd.retrieval.cache import CacheSet, SuffixCache
from tests.reference.rows import SlowRowDrafter

WIDTH = 96
VOCAB_SIZE = 12
SETTINGS: dict[str, Any] = {"limit": 8, "max_length": WIDTH, "vocab_size": VOCAB_SIZE, "end_of_text_ids": (3, 7)}


@pytest.fixture
def drafter() -> RowDrafter:
    return RowDrafter(**SETTINGS)


def filled(random: np.random.Generator) -> Iterator[SuffixCache]:
    """A namespace with repetitive text, a part of it sealed; some ids are not the target's."""
    with CacheSet(CacheConfig(index=IndexConfig(capacity_tokens=4096)), "0" * 32, inline=True) as caches:
        cache = caches.get()
        for number in range(12):
            cache.append(np.tile(random.integers(0, VOCAB_SIZE + (number % 3 == 0), 9), 4))
            if number == 6:
                cache.flush()
        yield cache


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.data())
def test_drafts_are_those_of_the_twin_however_rows_move(seed: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    for cache in filled(random):
        fast, slow = RowDrafter(**SETTINGS), SlowRowDrafter(**SETTINGS)
        rows, lengths = np.zeros((6, WIDTH), np.int32), np.zeros(6, np.int32)
        texts: dict[str, list[int]] = {}
        known: dict[str, Text] = {}
        names: list[str] = []
        for step in range(data.draw(st.integers(4, 25), label="steps")):
            moves = data.draw(st.integers(0, 5), label="moves") == 0
            if moves and names:
                gone = names.pop(int(random.integers(len(names))))
                slow.drafter.finish(gone)
                fast.forget([known.pop(gone)] if gone in known else [])
            if moves or not names:
                for _ in range(int(random.integers(1, 4))):
                    if len(names) < 6:
                        names.append(f"{step}-{len(names)}")
                        texts[names[-1]] = random.integers(0, VOCAB_SIZE, int(random.integers(1, 20))).tolist()
                random.shuffle(names)
            sampled = []
            for row, name in enumerate(names):
                new = random.integers(0, VOCAB_SIZE, int(random.integers(0, 4))).tolist()
                new = new[: WIDTH - len(texts[name])]
                if len(texts[name]) > 8 and random.random() < 0.7:  # repeat, so that there is something to draft
                    new = texts[name][-8 : -8 + len(new)]
                texts[name] += new
                sampled.append(new)
                rows[row, : len(texts[name])], lengths[row] = texts[name], len(texts[name])
            for name in names:
                if name not in known and sampled[names.index(name)]:
                    known[name] = Text(name, min(5, len(texts[name])), 0)
            seconds = float(random.uniform(0.001, 0.01))
            snapshot = cache.snapshot()
            got = None if moves else fast.draft(sampled, lengths, rows, snapshot, seconds)
            if got is None:
                is_same = fast.seat([known.get(name) for name in names], lengths[: len(names)].tolist())
                seconds_told = seconds if is_same else 0.0
                got = fast.draft(sampled, lengths, rows, snapshot, seconds_told, is_seated=True)
            num_new = [len(new) if name in known else 0 for name, new in zip(names, sampled, strict=True)]
            prompts = [known[name].prompt_length if name in known else 0 for name in names]
            want = slow.draft(names, [texts[name] for name in names], prompts, num_new, snapshot, seconds)
            assert got == want
            for name, text in known.items():
                assert text.tokens.tolist() == texts[name]


def seated(drafter: RowDrafter, row: list[int]) -> tuple[Text, np.ndarray, np.ndarray]:
    """One text in the first of two rows."""
    rows, lengths = np.zeros((2, WIDTH), np.int32), np.zeros(2, np.int32)
    rows[0, : len(row)], lengths[0] = row, len(row)
    text = Text("a", 1, 0)
    assert drafter.draft([[row[-1]]], lengths, rows, NO_SNAPSHOT, 0.0) is None
    assert not drafter.seat([text], [len(row)])
    assert drafter.draft([[row[-1]]], lengths, rows, NO_SNAPSHOT, 0.0, is_seated=True) is not None
    return text, rows, lengths


def test_rows_that_hold_another_text_are_asked_about(drafter: RowDrafter) -> None:
    text, rows, lengths = seated(drafter, [1, 2, 4, 5] * 6)
    assert drafter.draft([[1], [1]], lengths, rows, NO_SNAPSHOT, 0.0) is None, "one more"
    lengths[0] = WIDTH + 1
    assert drafter.draft([[1]], lengths, rows, NO_SNAPSHOT, 0.0) is None, "longer than the rows are"
    lengths[0] = 25
    rows[0, 23] = 9
    assert drafter.draft([[1]], lengths, rows, NO_SNAPSHOT, 0.0, by_text=True) is None
    assert text.length == 24, "nothing was done"
    rows[0, 23] = 5
    assert drafter.draft([[1]], lengths, rows, NO_SNAPSHOT, 0.0, by_text=True) is not None
    drafter.forget([text])
    assert drafter.draft([[1]], lengths, rows, NO_SNAPSHOT, 0.0) is None


def test_more_rows_than_there_was_room_for(drafter: RowDrafter) -> None:
    count = 40
    rows, lengths = np.tile(np.array([1, 2, 4, 5] * 6, np.int32), (count, 1)), np.full(count, 24, np.int32)
    texts = [Text(str(number), 1, 0) for number in range(count)]
    assert not drafter.seat(texts, lengths.tolist())
    drafts = drafter.draft([[5]] * count, lengths, rows, NO_SNAPSHOT, 0.0, is_seated=True)
    assert drafts is not None and len(drafts) == count and drafts[0] == drafts[-1] != []
    assert drafter.seat(texts, lengths.tolist())
