"""The published attacks on what is drafted, small: they succeed without the guards and fail with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.workloads import snippets
from tests.server.bundled_engine import load_bundled
from tests.server.eavesdropper import Attack, rate, watch_all
from tests.server.failing_engine import RunningServer, serving

NUM_PROMPTS = 10


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(load_bundled) as running:
        yield running


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    with serving(load_bundled, obfuscation="always", obfuscation_interval_s=0.4) as running:
        yield running


def guessed(server: RunningServer, *, at_once: int) -> tuple[float, set[tuple[int, ...]]]:
    """Share of prompts that are told from sizes and times of records, and the sizes that were seen."""
    prompts = [text[-200:] for text in snippets(seed=1)[:NUM_PROMPTS]]
    asked = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    _, known, seen = (watch_all(server.port, prompts, asked, times=times, at_once=at_once) for times in (1, 2, 1))
    return rate(known, seen), {trace.sizes for _, trace in (*known, *seen)}


def test_sizes_and_times_tell_which_prompt_was_asked_unless_streams_are_obfuscated(
    server: RunningServer, guarded: RunningServer
) -> None:
    plain, sizes = guessed(server, at_once=1)
    assert plain >= 0.7 and len(sizes) > NUM_PROMPTS // 2
    hidden, sizes = guessed(guarded, at_once=4)
    assert len(sizes) == 1
    assert hidden <= 0.6  # chance is 0.1, and what is left is how busy the machine was


def test_speed_of_own_requests_tells_what_was_asked_before_unless_namespaces_are_apart(server: RunningServer) -> None:
    texts = iter([text[-200:] for text in snippets(seed=2)])
    attack = Attack(server.port, max_tokens=24)
    assert attack.rate(texts, num_texts=6, num_own=4) >= 11 / 12
    assert attack.rate(texts, num_texts=6, num_own=4, cache_salt="mine") <= 10 / 12
