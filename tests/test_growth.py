"""The service needs fewer passes with use: counts only, no times."""

from __future__ import annotations

import pytest

from benchmarks.growth import repeat
from benchmarks.workloads import MIXED, NO_REPEATS, checksum, stream
from ssd.bundled import MODEL_PATH
from ssd.model.loading.load_target import load_model
from ssd.text.codec import TextCodec


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(str(MODEL_PATH))


@pytest.mark.slow
def test_the_same_requests_again_need_far_fewer_passes(codec: TextCodec) -> None:
    """At least 3x fewer; where own text drafted the first run well, 1.5x fewer and 8 tokens a step."""
    found = repeat(load_model(MODEL_PATH, dtype="float32", device="cpu"), codec, 50, 32, 16)
    assert found["mismatches"] == 0
    fewer = found["steps_first"] / found["steps_second"]
    assert fewer >= 3 or (fewer >= 1.5 and found["tokens_per_step_second"] >= 8), found


def test_a_stream_is_the_same_every_time_and_has_its_shares() -> None:
    requests = stream(MIXED, 300, seed=3)
    assert checksum(requests) == checksum(stream(MIXED, 300, seed=3)) != checksum(stream(MIXED, 300, seed=4))
    kinds = [request.kind for request in requests]
    assert abs(kinds.count("variant") / 300 - MIXED.variant) < 0.08
    assert kinds[:60].count("repeat") < kinds[-60:].count("repeat")  # what is known grows with use
    asked = [request.text for request in requests if request.kind != "variant"]
    assert len(set(asked)) == len(asked) - kinds.count("repeat")
    assert {request.kind for request in stream(NO_REPEATS, 50)} == {"new"}
    assert not any(request.text.rstrip("\n").endswith(" ") for request in requests)
