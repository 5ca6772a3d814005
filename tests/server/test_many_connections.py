"""As many idle connections as the system allows, and a short soak: the benchmarks at a smaller size."""

from __future__ import annotations

import pytest

from benchmarks.connections import measure
from benchmarks.soak import main as soak


@pytest.mark.slow
def test_ten_thousand_idle_connections_keep_nobody_waiting() -> None:
    found = measure(10_000, 50)
    rows = {row["beside"]: row for row in found["rows"]}
    assert found["connections"] >= 500
    for kind in ("idle", "half a head"):
        assert rows[kind]["kib_each"] < 64
        assert rows[kind]["p99_ms"] < 30_000  # nobody was left to a time-out


@pytest.mark.slow
def test_every_answer_is_right_under_random_cancels() -> None:
    # Memory is still growing so early; all else is judged.
    status = soak(
        ["--seconds", "12", "--clients", "16", "--questions", "45", "--max-tokens", "16", "--most-growth", "9"]
    )
    assert status == 0
