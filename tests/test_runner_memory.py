"""What a way is said to take is what its slots come to take."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ssd.model.loading.load_target import open_target
from ssd.model.runners.select_runner import select_runner
from tests.models import tiny_model

GROWS = ("Qwen3-Next", "Falcon-H1", "Granite 4 hybrid", "Jamba", "MiniMax", "BLOOM (ALiBi)")
DOES_NOT_GROW = ("Mamba", "Mamba-2")


@pytest.mark.parametrize("name", GROWS + DOES_NOT_GROW)
def test_the_bytes_of_slots_are_known_before_they_are_taken(name: str) -> None:
    model = tiny_model(name)
    way = select_runner(model)
    assert (way.bytes_per_token > 0) == (name in GROWS)
    target = way.kind(model, 1, 64)
    target.prefill([0], np.ones((1, 60), np.int64), [60])
    foretold = way.bytes_per_slot + 60 * way.bytes_per_token
    assert 0.5 * foretold <= target.slot_bytes(0) <= 1.05 * foretold


def test_slots_of_states_are_as_many_as_memory_holds(caplog: pytest.LogCaptureFixture) -> None:
    way = select_runner(tiny_model("Mamba-2"))
    with caplog.at_level(logging.WARNING):
        target = open_target(
            tiny_model("Mamba-2"), num_slots=8, max_length=32, kv_cache_memory_bytes=3 * way.bytes_per_slot + 1000
        )
    assert target.num_slots == 3 and "serving 3" in caplog.text
