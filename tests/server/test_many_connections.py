"""As many idle connections as the system allows, and a short soak: the benchmarks at a smaller size."""

from __future__ import annotations

import pytest

from benchmarks.http import beside_connections
from benchmarks.soak import main as soak


@pytest.mark.slow
def test_ten_thousand_idle_connections_keep_nobody_waiting() -> None:
    for row in beside_connections(10_000, 50):
        if row["beside"] != "none":
            assert row["connections"] >= 500 and row["kib_each"] < 64
            assert row["p99_ms"] < 30_000  # nobody was left to a time-out


@pytest.mark.slow
def test_every_answer_is_right_under_random_cancels() -> None:
    # Memory is still growing so early; all else is judged.
    status = soak(
        ["--seconds", "12", "--clients", "16", "--questions", "45", "--max-tokens", "16", "--most-growth", "9"]
    )
    assert status == 0
