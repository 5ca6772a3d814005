"""The benchmark of how soon replicas draft what another one learned: two replicas, a moment."""

from __future__ import annotations

import pytest

from benchmarks.report.fleet import latency_section
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
