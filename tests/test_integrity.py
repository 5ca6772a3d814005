"""The bookkeeping's check: silent when all is well, a sentence for each fault, and never a crash."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from ssd.engine import Engine
from tests.test_prefix_reuse import answer, expected, greedy, make_engine, request, text


def running_engine() -> Engine:
    """Two requests run, one waits, and none has been freed."""
    engine = make_engine(slots=2)
    for name in "abc":
        engine.submit(request(name, text(ord(name), 20), greedy(30)))
    engine.step()
    assert engine.check() == []
    return engine


def lose_a_slot(engine: Engine) -> None:
    engine._scheduler.running.pop()


def give_a_slot_twice(engine: Engine) -> None:
    engine._scheduler.running[1].slot = 0


def feed_other_tokens(engine: Engine) -> None:
    engine.target.rollback(0, 10)
    engine.target.prefill([0], np.array([[9, 9]]), [2])


def hold_too_much(engine: Engine) -> None:
    engine.target.prefill([0], np.full((1, 20), 9), [20])


def wait_and_run(engine: Engine) -> None:
    engine._scheduler._lines[None] = [engine._scheduler.running[0]]


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lose_a_slot, "slot 1 has 0 owners"),
        (give_a_slot_twice, "slot 0 has 2 owners"),
        (feed_other_tokens, "slot 0 holds other tokens than request a"),
        (hold_too_much, "of the 21 of request a"),
        (wait_and_run, "request a is in 2 places"),
    ],
)
def test_a_fault_is_named(break_it: Callable[[Engine], None], complaint: str) -> None:
    engine = running_engine()
    break_it(engine)
    assert any(complaint in found for found in engine.check()), engine.check()


def test_a_fault_in_an_idle_engine_is_logged_and_counted_and_what_was_kept_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    prompt = text(1, 30)
    answer(engine, request("a", prompt))
    slot = next(slot for slot in range(3) if engine.target.length(slot))
    engine.submit(request("b", text(2, 30)))
    engine.step()
    engine.target.rollback(slot, 20)
    engine.target.prefill([slot], np.array([[9] * 17]), [17])  # what is kept is no longer what is said
    with caplog.at_level(logging.ERROR):
        while engine.has_work():
            engine.step()
    assert engine.metrics.integrity_violations == 1
    assert "keeps other tokens than it was fed" in caplog.text
    assert answer(engine, request("c", prompt)) == (expected(request("", prompt)), 0)
    assert engine.check() == []
