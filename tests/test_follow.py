"""A drafter carried from step to step, while the index changes under it, against one that knows nothing yet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ssd.config import IndexConfig
from ssd.drafting.draft_batch import draft_batch
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.segment import SEPARATOR, Segment, concatenate
from ssd.retrieval.snapshot import Snapshot
from ssd.retrieval.suffix_array import build_segment
from tests.reference import drafting as reference

Text = list[int]

LONGEST = 8  # tokens looked up
LIMIT = 4


def drafter() -> SuffixDrafter:
    return SuffixDrafter(max_match_length=LONGEST, default_token_cost=1e-6)


def learn_nothing(carried: SuffixDrafter) -> None:
    """Take away what it would learn from at the next step, so that only what it follows makes it differ."""
    for kept in carried._rows.values():
        kept.record.state.scored.count = 0


def ask(context: Any, snapshot: Snapshot | None, limit: int = LIMIT, request_id: str = "a") -> DraftRequest:
    ids = context if isinstance(context, np.ndarray) else np.array(context, np.int32)
    return DraftRequest(request_id, ids, 0, snapshot, limit)


def parts_of(draft: Draft) -> tuple[Text, Text, int, str]:
    estimates = [] if draft.probabilities is None else draft.probabilities.tolist()
    return draft.token_ids.tolist(), estimates, draft.match_length, draft.source


STORY: Text = np.random.default_rng(7).integers(0, 40, 60).tolist()
"""What is said again and again, whole or in parts."""


class Story:
    """An index that something befalls between steps, and the output of a request, all from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        config = IndexConfig(
            capacity_tokens=int(self.random.choice([64, 256, 1024])), flush_tokens=4, merge_fanout=2, lead_in_tokens=1
        )
        self.index = SuffixIndex(config)
        self.num_built = 0
        self.index.add_prebuilt([self.build(np.array([*STORY, SEPARATOR], np.int32), None)])  # stays
        for _ in range(int(self.random.integers(1, 4))):
            self.append()
        self.output = [token for _ in range(6) for token in self.text()]

    def text(self) -> Text:
        """A part of what is always said, what is said with a slip, or a stammer."""
        start = int(self.random.integers(0, 50))
        said = STORY[start : start + int(self.random.integers(1, 60))]
        kind = int(self.random.integers(0, 4))
        if kind == 0:
            said[len(said) // 2] = int(self.random.integers(0, 40))
        return self.random.integers(0, 2, 20).tolist() if kind == 1 else said

    def build(self, tokens: np.ndarray[Any, Any], start: int | None) -> Segment:
        self.num_built += 1
        return build_segment(tokens, start=start, segment_id=f"s{self.num_built}")

    def append(self) -> None:
        text = self.text()
        if self.index.num_memtable_tokens + len(text) + 1 > self.index.config.capacity_tokens // 2:
            self.seal()  # sealing that keeps up: nothing is dropped unsealed
        self.index.append(np.array(text, np.int32))

    def seal(self) -> None:
        due = self.index.memtable_to_flush()
        if due is not None:
            self.index.install_flushed(self.build(due[1], due[0]))

    def merge(self) -> None:
        inputs = self.index.plan_merge()
        if inputs is not None:
            self.index.install_merged(inputs, self.build(concatenate(inputs), inputs[0].start))

    def add_prebuilt(self) -> None:
        self.index.add_prebuilt([self.build(np.array([*self.text(), SEPARATOR], np.int32), None)])

    def go_on(self) -> None:
        """Often nothing, sometimes several things."""
        kinds = [self.append, self.append, self.seal, self.merge, self.add_prebuilt]
        for _ in range(max(0, int(self.random.integers(-3, 4)))):
            kinds[int(self.random.integers(0, len(kinds)))]()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=80)
def test_what_is_carried_over_gives_a_fresh_drafters_draft_or_follows_a_place_that_is_there(seed: int) -> None:
    """A draft may differ from a fresh one only where all of these hold: it is as long as was asked for, the segments
    are those of the step before, and it copies a place, stored now or the request's own, before which as many tokens
    agree as a search looks at. (It was found at an earlier step and is not weighed against what came since.)"""
    story = Story(seed)
    carried, length, segments = drafter(), 10, None
    while length < min(150, len(story.output)):
        story.go_on()
        snapshot, context = story.index.snapshot(), story.output[:length]
        draft, fresh = (d.propose([ask(context, snapshot)])[0] for d in (carried, drafter()))
        learn_nothing(carried)
        if parts_of(draft) != parts_of(fresh):
            event("followed")
            assert len(draft.token_ids) == LIMIT
            assert segments is snapshot.segment_table
            places = reference.evidence(snapshot, context, LONGEST, LIMIT, True)
            assert tuple(draft.token_ids.tolist()) in [found for found, _, _ in places]
            assert draft.match_length == LONGEST
        segments = snapshot.segment_table
        length += int(story.random.integers(1, 7))


@pytest.mark.parametrize("is_sealed", [False, True])
def test_text_that_is_gone_is_not_followed(is_sealed: bool) -> None:
    """Dropped by the ring where sealing lags; or sealed and evicted: no segments before and none after."""
    index = SuffixIndex(IndexConfig(capacity_tokens=2000, flush_tokens=4, lead_in_tokens=1))
    index.append(np.arange(100, dtype=np.int32))
    carried = drafter()
    assert carried.propose([ask([*range(20)], index.snapshot())])[0].token_ids.tolist() == [20, 21, 22, 23]
    if is_sealed:
        start, tokens = index.memtable_to_flush() or (0, np.empty(0, np.int32))
        index.install_flushed(build_segment(tokens, start=start, segment_id="s"))
    while index.num_dropped_tokens + index.num_evicted_tokens == 0:
        index.append(np.full(189, 777, np.int32))
    assert len(index.snapshot().segments) == 0
    for each in (drafter(), carried):
        assert each.propose([ask([*range(22)], index.snapshot())])[0].token_ids.tolist() == []


def test_a_read_only_or_foreign_context_compiles_nothing_and_drafts_the_same() -> None:
    snapshot = reference.make_snapshot([[*range(50), SEPARATOR]])
    warm = drafter()
    warm.warm_up()
    kernel: Any = draft_batch
    compiled = list(kernel.signatures)
    plain = np.arange(20, dtype=np.int32)
    read_only = plain.copy()
    read_only.flags.writeable = False
    unaligned = np.frombuffer(b"x" + plain.tobytes(), np.int32, len(plain), 1)
    forms = [plain, read_only, unaligned, np.repeat(plain, 2)[::2], plain[::-1].copy()[::-1]]
    forms += [plain.astype(kind) for kind in (">i4", np.int64, np.uint64, np.uint32, np.int16, np.uint8)]
    for number, form in enumerate(forms):
        draft = warm.propose([ask(form, snapshot, request_id=str(number))])[0]
        assert draft.token_ids.tolist() == [20, 21, 22, 23]
    rows = [ask(form, snapshot, request_id=str(number)) for number, form in enumerate(forms)]
    assert all(draft.token_ids.tolist() == [20, 21, 22, 23] for draft in warm.propose(rows))
    assert list(kernel.signatures) == compiled


def test_ids_that_no_int32_holds_draft_nothing() -> None:
    snapshot = reference.make_snapshot([[*range(50), SEPARATOR]])
    for beyond in (
        np.arange(20) + 2**32,
        np.arange(20).astype(np.uint32) + 2**31,
        np.append(np.arange(20), 2**32 + 20),
    ):
        assert len(drafter().propose([ask(beyond, snapshot)])[0].token_ids) == 0
