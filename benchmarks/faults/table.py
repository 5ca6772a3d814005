"""The faults, each a few lines that do it to a scene."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.faults import disk, logs, processes_killed, requests
from benchmarks.faults.scene import Inject


@dataclass(frozen=True, slots=True)
class Fault:
    """``inject`` returns when the fault is over; the load runs meanwhile."""

    name: str
    inject: Inject
    needs_redis: bool = False
    needs_small_disk: bool = False
    ends_server: bool = False
    """Not for a soak, which looks at the memory of one life."""
    is_alone: bool = False
    """Never combined with others: it destroys what they are judged by."""


FAULTS: tuple[Fault, ...] = (
    Fault("server-kill-loading", processes_killed.server_loading, ends_server=True),
    Fault("server-kill-serving", processes_killed.server_serving, ends_server=True),
    Fault("server-kill-closing", processes_killed.server_closing, ends_server=True),
    Fault("worker-kill", processes_killed.worker),
    Fault("worker-stop", processes_killed.worker_stopped),
    Fault("disk-full", disk.full, needs_small_disk=True),
    Fault("disk-immutable", disk.immutable),
    Fault("segment-truncated", disk.segment_truncated, is_alone=True),
    Fault("segment-overwritten", disk.segment_overwritten, is_alone=True),
    Fault("learned-hostile", disk.learned_hostile, ends_server=True),
    Fault("redis-kill", logs.kill, needs_redis=True),
    Fault("redis-pause", logs.pause, needs_redis=True),
    Fault("redis-maxmemory", logs.maxmemory, needs_redis=True),
    Fault("redis-flushall", logs.flushall, needs_redis=True),
    Fault("redis-password", logs.password, needs_redis=True),
    Fault("redis-stop", logs.stop, needs_redis=True),
    Fault("redis-cuts", logs.cuts, needs_redis=True),
    Fault("log-junk", logs.junk, needs_redis=True),
    Fault("log-future-id", logs.future_id, needs_redis=True),
    Fault("log-last-id", logs.last_id, needs_redis=True),
    Fault("log-huge-values", logs.huge_values, needs_redis=True),
    Fault("log-key-of-another-kind", logs.another_kind, needs_redis=True),
    Fault("requests-hostile", requests.hostile),
)

NAMES = tuple(fault.name for fault in FAULTS)


def chosen(names: list[str] | None) -> list[Fault]:
    """The faults of these names, all of them where it is None."""
    is_chosen: Callable[[Fault], bool] = lambda fault: names is None or fault.name in names  # noqa: E731
    return list(filter(is_chosen, FAULTS))
