"""What coupled sampling is meant to bring, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.coupled.workloads import LAST_FIFTH, NEW, REPEATS, VARIANTS

LEAST_OVER_OFF = {REPEATS: 6.0, VARIANTS: 1.4, LAST_FIFTH: 1.5}
"""Tokens/s over speculation off, the median over groups of requests."""


def marks_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every row that has a mark: what is asked, what was measured, and whether it is met."""
    found = []
    for row in rows:
        workload = row["workload"]
        where = {"workload": workload, "temperature": row["temperature"], "streams": row["streams"]}
        if workload in LEAST_OVER_OFF:
            measured, least = row["coupled"]["over_off"][0], LEAST_OVER_OFF[workload]
            found.append({**where, "asked": f"at least {least}x off", "measured": measured, "met": measured >= least})
        elif workload == NEW:
            measured, interval = row["coupled_over_uncoupled"][0], row["coupled_over_uncoupled_95"]
            # Both say other things, and so differ by chance: below is what the interval of 95 % does not explain.
            met = interval[1] >= 1.0
            found.append({**where, "asked": "not below uncoupled", "measured": measured, "met": met})
    return found
