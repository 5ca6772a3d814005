"""Which rows are asked for a draft."""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import Draft, DraftRequest
from ssd.drafting.protocol import EMPTY_DRAFT
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import open_target
from ssd.pricing.calibration import Throttle
from tests.fixed_times import measure_asking
from tests.models import VOCAB, tiny_model

MODEL = tiny_model()


def row() -> Any:
    return SimpleNamespace(num_fruitless=0)


def run(throttle: Throttle, batch: list[Any], steps: int, lengths: Rows[int], ask_s: float, pass_s: float) -> list[int]:
    """How often each row was asked."""
    counts = [0] * len(batch)
    for _ in range(steps):
        due = throttle.due(batch)
        asked = [(row, length) for row, length, is_due in zip(batch, lengths, due, strict=True) if is_due]
        throttle.observe_asking(
            [row for row, _ in asked], [length for _, length in asked], ask_s * sum(due), spares_some=not all(due)
        )
        throttle.observe_pass(pass_s)
        counts = [count + is_due for count, is_due in zip(counts, due, strict=True)]
    return counts


def test_a_drafter_is_told_of_all_drafts_and_else_as_seldom_as_is_cheap() -> None:
    throttle = Throttle()
    assert throttle.tells(has_drafts=False)
    for told, passed, period in ((1e-5, 1e-2, 1), (3e-4, 1e-2, 4), (1e-1, 1e-2, 8)):
        for _ in range(200):
            throttle.observe_telling(told)
            throttle.observe_pass(passed)
        assert throttle.tells(has_drafts=True)
        assert [throttle.tells(has_drafts=False) for _ in range(2 * period)] == 2 * ([False] * (period - 1) + [True])


def test_where_asking_is_cheap_every_row_is_asked() -> None:
    assert run(Throttle(), [row()], 50, [0], 30e-6, 5e-3) == [50]


def test_rows_that_get_nothing_are_asked_less_and_others_always() -> None:
    counts = run(Throttle(), [row() for _ in range(32)], 84, [0] * 31 + [3], 30e-6, 20e-3)
    assert counts[:31] == [4 + 80 // 7] * 31 and counts[31] == 84  # 32 x 30 us are 4.8 % of a pass


def test_a_row_that_gets_a_draft_again_is_asked_at_every_step() -> None:
    throttle, batch = Throttle(), [row() for _ in range(8)]
    run(throttle, batch, 40, [0] * 8, 1e-3, 10e-3)
    assert throttle.period(8) == 8
    run(throttle, batch, 8, [1] * 8, 1e-3, 10e-3)
    assert run(throttle, batch, 10, [1] * 8, 1e-3, 10e-3) == [10] * 8


def test_a_call_that_compiled_kernels_is_not_counted() -> None:
    throttle, batch = Throttle(), [row()]
    throttle.observe_asking(batch, [1], 40.0, spares_some=False)
    throttle.observe_telling(40.0)
    throttle.observe_pass(0.01)
    assert throttle.period(64) == 1 and throttle.tells(has_drafts=False)


@given(st.floats(0, 1e-2), st.floats(1e-6, 10), st.integers(1, 64))
def test_the_period_is_bounded(ask_s: float, pass_s: float, num_rows: int) -> None:
    throttle = Throttle()
    assert throttle.period(num_rows) == 1
    run(throttle, [row() for _ in range(num_rows)], 3, [0] * num_rows, ask_s, pass_s)
    assert 1 <= throttle.period(num_rows) <= 8


@given(st.floats(1e-6, 1e-2), st.floats(1e-4, 1.0), st.integers(1, 64))
def test_asking_rows_that_get_nothing_takes_its_share_and_no_longer_pause_than_that_needs(
    ask_s: float, pass_s: float, num_rows: int
) -> None:
    throttle, batch, steps = Throttle(), [row() for _ in range(num_rows)], 840
    run(throttle, batch, 12, [0] * num_rows, ask_s, pass_s)
    counts = run(throttle, batch, steps, [0] * num_rows, ask_s, pass_s)
    pause = steps / counts[0]
    share = sum(counts) * ask_s / (steps * pass_s)
    if pause < 8:
        assert share <= 0.0075 * (1 + 1e-6)
    if pause > 1:
        assert share * pause / (pause - 1) > 0.0075 * (1 - 1e-6), "one step less would take too much"


class Nothing:
    """Never has a draft, and takes its time."""

    def __init__(self) -> None:
        self.num_asked = 0

    def propose(self, requests: Rows[DraftRequest]) -> list[Draft]:
        assert requests
        self.num_asked += len(requests)
        time.sleep(2e-3 * len(requests))
        return [EMPTY_DRAFT] * len(requests)

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        assert not len(draft.token_ids) and num_accepted == 0

    def finish(self, request_id: str) -> None:
        return


def test_the_engine_asks_a_slow_drafter_less_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_asking(monkeypatch)
    drafter = Nothing()
    texts = []
    for drafts in (DraftConfig(num_speculative_tokens=4), DraftConfig(num_speculative_tokens=0)):
        target = open_target(MODEL, num_slots=4, max_length=64)
        engine = Engine(target, drafter=drafter, config=EngineConfig(max_num_seqs=4), draft=drafts)
        said: dict[str, list[int]] = {}
        for number in range(4):
            prompt = tuple((7 * number + at) % VOCAB for at in range(5))
            sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            engine.submit(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
        while engine.has_work():
            for output in engine.step():
                said.setdefault(output.request_id, []).extend(output.token_ids)
        texts.append(said)
    assert texts[0] == texts[1] and all(len(text) == 40 for text in texts[0].values())
    assert 4 * 4 <= drafter.num_asked < 4 * 40
