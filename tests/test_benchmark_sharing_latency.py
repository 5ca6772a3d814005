"""The benchmark of how soon replicas draft what another one learned: two replicas, a moment."""

from __future__ import annotations

import pytest

from benchmarks.report.fleet import latency_section
from benchmarks.sharing_latency import receiving
from benchmarks.sharing_latency.command import latency
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]  # a fixture


@pytest.mark.slow
def test_every_text_is_drafted_by_the_other_replica(redis_server: RedisServer) -> None:
    found = latency(redis_server.url, 2, 4000.0, 3.0)
    assert found["is_whole"]
    assert found["counted"] > 0
    assert found["xadd_calls"] == found["texts"]
    result = {
        "date": "today",
        "environment": {"cpu": "one", "cores": 2},
        "parameters": {"tokens_per_second": 4000.0},
        "latency": found,
    }
    assert "| p99 |" in latency_section(result)


def test_every_entry_that_is_counted_was_received(redis_server: RedisServer) -> None:
    found = receiving.measure(redis_server.url, 5)
    assert 0 < found["us_of_one"] <= found["median_us_of_one"] and 0 < found["calls"] < 1000
    assert f"{found['us_of_one']:.0f}, {found['us_of_several']:.0f} |" in latency_section(
        {
            "date": "today",
            "environment": {"cpu": "one", "cores": 2},
            "parameters": {"tokens_per_second": 1.0},
            "latency": {"p50_ms": 1, "p99_ms": 1, "most_ms": 1, "replicas": 2, "counted": 1},
            "receiving": found,
        }
    )
