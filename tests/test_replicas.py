"""Two servers on one Redis: what one learns speeds up the other, and losing Redis costs speed only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.redis_server import RedisServer, redis_server
from tests.server.client import greedy_completion, metric, until_ready, wait_until
from tests.server.test_process import SMALL, running

__all__ = ["redis_server"]  # a fixture

PROMPTS = [
    "def read_lines(path):\n",
    "class Connection:\n    def close(self):\n",
    "import threading\n\n\nclass Worker",
    "    for name, value in options.items():\n",
]


@pytest.fixture
def replicas(redis_server: RedisServer) -> Iterator[tuple[int, int]]:
    with ExitStack() as stack:
        ports, shared = [], ("--redis", redis_server.url, "--namespace", "shared")
        for _ in range(2):
            _, port = stack.enter_context(running(*shared, *SMALL, program="tests.fixed_times"))
            ports.append(port)
        for port in ports:
            until_ready(port)
        yield ports[0], ports[1]


def complete(port: int, prompt: str) -> str:
    text: str = greedy_completion(port, prompt=prompt, max_tokens=48).json["choices"][0]["text"]
    return text


def steps_of(port: int, prompt: str) -> tuple[str, float]:
    before = metric(port, "ssd:verify_steps_total")
    text = complete(port, prompt)
    return text, metric(port, "ssd:verify_steps_total") - before


def test_replicas_share_and_outlive_redis(replicas: tuple[int, int], redis_server: RedisServer) -> None:
    first, second = replicas

    # What was asked of the first is drafted by the second.
    learned = {prompt: steps_of(first, prompt) for prompt in PROMPTS}
    wait_until(lambda: metric(second, "ssd:sharing_received_total") >= len(PROMPTS))
    again = {prompt: steps_of(second, prompt) for prompt in PROMPTS}
    assert all(again[prompt][0] == text for prompt, (text, _) in learned.items())
    num_steps, num_before = (sum(steps for _, steps in each.values()) for each in (again, learned))
    assert 2 * num_steps <= num_before

    # kill -9 under load: no failed request, no changed output.
    stop = threading.Event()
    outcomes: list[Any] = []

    def load(port: int) -> None:
        while not stop.is_set():
            for prompt in PROMPTS:
                try:
                    outcomes.append(complete(port, prompt) == learned[prompt][0])
                except Exception as error:
                    outcomes.append(error)

    threads = [threading.Thread(target=load, args=(port,)) for port in replicas]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(outcomes) >= 4)
    redis_server.kill()
    num_until = len(outcomes)
    time.sleep(3)  # both notice
    wait_until(lambda: len(outcomes) >= num_until + 8)
    stop.set()
    for thread in threads:
        thread.join()
    assert all(outcome is True for outcome in outcomes), outcomes[:5]

    # Redis is back, empty: sharing resumes by itself.
    redis_server.start()
    received = metric(second, "ssd:sharing_received_total")
    prompt = "def unheard_of(value):\n"

    def resumed() -> bool:
        complete(first, prompt)
        return metric(second, "ssd:sharing_received_total") > received

    wait_until(resumed)
