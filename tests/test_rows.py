"""The row drafter: against its slow twin as rows come, move and go, and texts that cannot follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import CacheConfig, IndexConfig
from ssd.drafting.batch_drafter import BatchDrafter
from ssd.drafting.row_texts import NUM_HEADER_WORDS, RowText, TokenRows, Tokens
from ssd.drafting.suffix_drafter import NO_SNAPSHOT
from ssd.retrieval.cache_manager import CacheManager, NamespaceCache
from ssd.retrieval.snapshot import Snapshot
from tests.reference.rows import SlowRowDrafter

WIDTH = 96
VOCAB_SIZE = 12
LIMIT = 8
SETTINGS: dict[str, Any] = {"max_length": WIDTH, "vocab_size": VOCAB_SIZE, "end_of_text_ids": (3, 7)}


@pytest.fixture
def drafter() -> BatchDrafter:
    return BatchDrafter(longest=LIMIT, **SETTINGS)


def filled(random: np.random.Generator) -> Iterator[NamespaceCache]:
    """A namespace with repetitive text, a part of it sealed; some ids are not the target's."""
    with CacheManager(CacheConfig(index=IndexConfig(capacity_tokens=4096)), "0" * 32, inline=True) as caches:
        cache = caches.get()
        for number in range(12):
            cache.append(np.tile(random.integers(0, VOCAB_SIZE + (number % 3 == 0), 9), 4))
            if number == 6:
                cache.flush()
        yield cache


def said(lengths: list[int], sampled: list[list[int]]) -> Tokens:
    """What a step gave, as `BatchDrafter.append` has it."""
    words = np.zeros((len(sampled), NUM_HEADER_WORDS + max(map(len, sampled), default=0)), np.int32)
    for row, (length, new) in enumerate(zip(lengths, sampled, strict=True)):
        words[row, : NUM_HEADER_WORDS + len(new)] = [length, len(new), *new]
    return words


def engine_rows(texts: list[list[int]]) -> TokenRows:
    """An engine's arrays with these texts, and other tokens behind them."""
    tokens = np.full((len(texts) + 1, WIDTH), 11, np.int32)
    for row, text in zip(tokens, texts, strict=False):
        row[: len(text)] = text
    return TokenRows(tokens, np.array([*map(len, texts), 0], np.int32))


def drafted(
    drafter: BatchDrafter,
    wanted: list[bool],
    snapshot: Snapshot,
    seconds: float = 0.0,
    source: TokenRows | None = None,
) -> list[list[int]]:
    """What it drafts for the texts that are seated."""
    words = drafter.new_words(len(wanted) + 1)
    assert drafter.draft(wanted, snapshot, words, LIMIT, seconds, source) == []
    return [row[NUM_HEADER_WORDS : NUM_HEADER_WORDS + row[1]] for row in words[: len(wanted)].tolist()]


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.booleans(), st.data())
def test_drafts_are_those_of_the_twin_however_rows_move(seed: int, reads_arrays: bool, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    for cache in filled(random):
        fast, slow = BatchDrafter(longest=LIMIT, **SETTINGS), SlowRowDrafter(limit=LIMIT, **SETTINGS)
        texts: dict[str, list[int]] = {}
        known: dict[str, RowText] = {}
        names: list[str] = []
        for step in range(data.draw(st.integers(4, 25), label="steps")):
            moves = data.draw(st.integers(0, 5), label="moves") == 0 or not names
            if moves and names:
                gone = names.pop(int(random.integers(len(names))))
                slow.drafter.finish(gone)
                known.pop(gone)
                fast.clear()
            if moves:
                for _ in range(int(random.integers(1, 4))):
                    if len(names) < 6:
                        names.append(name := f"{step}-{len(names)}")
                        texts[name] = random.integers(0, VOCAB_SIZE, int(random.integers(1, 20))).tolist()
                        prompt_length = min(5, len(texts[name]))
                        known[name] = RowText(np.array(texts[name], np.int32), prompt_length, WIDTH)
                random.shuffle(names)
                fast.assign([known[name] for name in names])
                slow.asked = []
            sampled = []
            for name in names:
                new = random.integers(0, VOCAB_SIZE, int(random.integers(0, 4))).tolist()
                new = new[: WIDTH - len(texts[name])]
                if len(texts[name]) > 8 and random.random() < 0.7:  # repeat, so that there is something to draft
                    new = texts[name][-8 : -8 + len(new)]
                texts[name] += new
                sampled.append(new)
            seconds, snapshot = float(random.uniform(0.001, 0.01)), cache.snapshot()
            rows = [known[name] for name in names]
            if reads_arrays:
                engine = engine_rows([texts[name] for name in names])
                got = drafted(fast, [True] * len(names), snapshot, seconds, engine)
            else:
                assert fast.append(rows, said([len(texts[name]) for name in names], sampled)) == []
                got = drafted(fast, [bool(new) for new in sampled], snapshot, seconds)
            prompts = [known[name].prompt_length for name in names]
            want = slow.draft(names, [texts[name] for name in names], prompts, [*map(len, sampled)], snapshot, seconds)
            assert got == want
            for name, text in known.items():
                assert text.tokens.tolist() == texts[name]


def test_a_text_whose_tokens_are_missing_does_not_follow(drafter: BatchDrafter) -> None:
    text, other = (RowText(np.array([1, 2, 4, 5] * 6, np.int32), 1, 26) for _ in range(2))
    texts = [text, None, other]
    assert drafter.append(texts, said([24, 9, 25], [[5], [5], [1]])) == [0], "none is new, so it says"
    assert drafter.append(texts, said([26, 0, 27], [[1], [], [1, 2]])) == [0, 2], "one between; no room"
    assert (text.length, other.length) == (24, 25)
    text.replace(np.array([1, 2, 4, 5] * 6 + [1, 2], np.int32), 1)
    assert (text.length, text.num_new) == (26, 1)
    assert drafter.append([text], np.array([[25, -1, 3]], np.int32)) == [0]


def test_a_text_that_differs_from_the_engines_is_named_and_not_extended(drafter: BatchDrafter) -> None:
    known = [1, 2, 4, 5] * 6
    texts = [RowText(np.array(known, np.int32), 1, 26) for _ in range(4)]
    drafter.assign([*texts, None])
    source = engine_rows([[*known, 1], [*known[:-1], 6, 1], known[:-1], [*known, 1, 2, 4], known])
    words = drafter.new_words(5)
    assert drafter.draft([True] * 5, NO_SNAPSHOT, words, LIMIT, source=source) == [1, 2, 3], "other, shorter, no room"
    assert [text.length for text in texts] == [25, 24, 24, 24] and texts[0].num_new == 1
    assert words[:, 1].tolist()[1:] == [0, 0, 0, 0] and words[0, 1] > 0
    texts[1].replace(source.tokens[1, :25], 1)
    assert drafter.draft([True] * 5, NO_SNAPSHOT, words, LIMIT, source=source) == [2, 3]
    assert words[:, 1].tolist() == [0] * 5, "nothing is new"


def test_more_rows_than_there_was_room_for(drafter: BatchDrafter) -> None:
    texts = [RowText(np.array([1, 2, 4, 5] * 6, np.int32), 1, WIDTH) for _ in range(40)]
    drafter.assign([*texts, None])
    drafts = drafted(drafter, [True] * 41, NO_SNAPSHOT)
    assert drafts[0] == drafts[39] != [] and drafts[40] == []
    assert drafter.counts[:2] == (40, 40)
