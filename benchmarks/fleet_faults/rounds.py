"""A round: a load on all servers, some faults, and the verdict."""

from __future__ import annotations

import http.client
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from benchmarks.fleet_faults.fleet import Fleet
from benchmarks.fleet_faults.table import Fault

OUTCOMES: Final = ("right", "cancelled", "noted", "interrupted")
PROBLEMS: Final = ("failed", "changed", "died", "lost", "twice", "elsewhere", "deaf")
"""A request failed; an answer changed; a server ended by itself; a promised note is gone from its server, is twice in
one, or lies in another tenant's cache; a text did not reach all servers in time after the fault."""


@dataclass(slots=True)
class Row:
    """What came of one round."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    sharing_s: float | None = None
    """Seconds until a text learned by each server was drafted by all others, the longest."""
    memory_mib: float = 0.0
    """Of the largest server."""
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)

    @property
    def num_problems(self) -> int:
        """0 where all is well."""
        return sum(self.counts[name] for name in PROBLEMS)


def play(fleet: Fleet, faults: Sequence[Fault], *, num_clients: int, calm_s: float, return_s: float, seed: str) -> Row:
    """One round. ``num_clients`` : of each tenant at each server. ``return_s`` : after which sharing must be back."""
    row, begin, before = Row(" + ".join(fault.name for fault in faults)), time.monotonic(), fleet.counts
    with ExitStack() as stack:
        for number, load in enumerate(fleet.loads):
            stack.enter_context(load.running(num_clients, seed=f"{seed}-{number}"))
        fleet.hold(calm_s)
        with ThreadPoolExecutor(len(faults)) as lanes:
            for lane in [lanes.submit(fault.inject, fleet) for fault in faults]:
                lane.result()
        row.counts["died"] += sum(member.server.revive() for member in fleet.members)
        fleet.hold(calm_s)
    try:
        row.sharing_s = fleet.sharing_returns(return_s)
    except (OSError, http.client.HTTPException, ValueError) as error:
        row.counts["failed"] += 1
        row.reasons.append(f"a probe: {type(error).__name__}: {error}"[:200])
    row.counts["deaf"] += row.sharing_s is None
    row.counts += fleet.counts - before
    row.memory_mib = max(member.server.memory_mib() for member in fleet.members)
    row.seconds = time.monotonic() - begin
    for load in fleet.loads:
        row.reasons += load.failures
        load.failures.clear()
    return row


def close(fleet: Fleet) -> tuple[Row, int]:
    """Ends the servers in order and reads all their directories. Returns what was found and the notes promised."""
    row, num_promised, begin = Row("orderly close"), 0, time.monotonic()
    fleet.close_servers()
    for number, member in enumerate(fleet.members):
        verdict = member.history.check(fleet.notes_on_disk(member))
        num_promised += verdict.num_promised
        for name, notes in (("lost", verdict.lost), ("twice", verdict.twice), ("elsewhere", verdict.elsewhere)):
            row.counts[name] += len(notes)
            if notes:
                row.reasons.append(f"server {number}: {name}: notes {notes[:10]}")
    row.seconds = time.monotonic() - begin
    return row, num_promised
