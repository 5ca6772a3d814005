"""One line of log for a finished request, for those who ask for it."""

from __future__ import annotations

import logging

import pytest

from ssd.config import SamplingParams
from ssd.engine import Request
from tests.test_engine import finish_all, make_engine, prompt


def finish(name: str) -> None:
    """Answer one request that a constant logit bias makes repeat itself, so that drafts are accepted."""
    engine = make_engine()
    sampling = SamplingParams(max_tokens=24, temperature=0.0, logit_bias=((7, 100.0),), ignore_eos=True)
    engine.submit(Request(request_id=name, prompt_token_ids=(7,) * 9, sampling=sampling, namespace=None))
    finish_all(engine)


def test_line_says_how_the_tokens_came(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ssd.engine"):
        finish("cmpl-1")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ssd.engine"]
    event, *pairs = line.split()
    found = dict(pair.split("=") for pair in pairs)
    assert event == "finished"
    assert (found["request"], found["namespace"], found["reason"]) == ("cmpl-1", "-", "length")
    assert (found["prompt"], found["output"]) == ("9", "24")
    assert int(found["accepted"]) == 24 - int(found["steps"])
    assert int(found["drafted"]) >= int(found["accepted"]) > 0
    assert sum(int(part.split(":")[1]) for part in found["from"].split(",")) == int(found["accepted"])


def test_no_line_where_nobody_asks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ssd.engine"):
        finish("cmpl-2")
    assert not caplog.records


def test_cancelled_request_leaves_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    engine.submit(Request(request_id="gone", prompt_token_ids=prompt(1)))
    engine.cancel("gone")
    with caplog.at_level(logging.DEBUG, "ssd.engine"):
        finish_all(engine)
    assert any("request=gone " in message and "reason=cancelled" in message for message in caplog.messages)
