"""What a log costs a fleet of any size, from what one entry and one reply were measured to take: what breaks first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ssd.config import IndexConfig
from ssd.sharing.reader import GATHER_S
from ssd.sharing.redis_log import DEFAULT_MAX_TOKENS

REDIS_CORES: Final = 0.8
"""Of one core: Redis answers on one thread."""

REDIS_OUT_MB_S: Final = 1000.0
"""What a link of 10 Gbit/s carries with some room."""

RECEIVER_CORES: Final = 0.1
"""Of a core of each replica, beside the thread that steps its engine."""

CACHE_HOLDS_S: Final = 600.0
"""How long a text stays that nobody says again, in a cache of the default capacity."""

_MOST: Final = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What was measured. Rates are a replica's own, each second."""

    entries: float
    tokens: float
    sent_bytes: float
    """Of an entry, on the writer's connection, both ways."""
    read_bytes: float
    """Of an entry, on a reader's."""
    receive_s: float
    """CPU time of a reader for an entry."""
    write_us: float
    reply_us: float
    delivered_us: float


def load_of(unit: Unit, replicas: int, gather_s: float = GATHER_S) -> dict[str, float]:
    """What ``replicas`` make of it. ``gather_s`` : a reader's pause after a reply."""
    entries, tokens = replicas * unit.entries, replicas * unit.tokens
    # A reader that waits is answered by the next entry, and then pauses.
    reads = entries / (1.0 + entries * gather_s)
    redis_s = entries * unit.write_us + replicas * (reads * unit.reply_us + entries * unit.delivered_us)
    return {
        "replicas": replicas,
        "log_entries_per_s": entries,
        "log_tokens_per_s": tokens,
        "replica_commands_per_s": unit.entries + reads,
        "replica_sent_kb_per_s": unit.entries * unit.sent_bytes / 1e3,
        "replica_read_kb_per_s": entries * unit.read_bytes / 1e3,
        "replica_receive_cores": entries * unit.receive_s,
        "redis_commands_per_s": entries + replicas * reads,
        "redis_cores": redis_s / 1e6,
        "redis_out_mb_per_s": replicas * entries * unit.read_bytes / 1e6,
        "log_holds_s": DEFAULT_MAX_TOKENS / tokens,
        "cache_holds_s": IndexConfig().capacity_tokens / tokens,
    }


def limits_of(unit: Unit, gather_s: float = GATHER_S) -> dict[str, int]:
    """The most replicas that stay within each limit, the one that breaks first leading."""
    fits: dict[str, Any] = {
        "cache_holds": lambda load: load["cache_holds_s"] >= CACHE_HOLDS_S,
        "receiver": lambda load: load["replica_receive_cores"] <= RECEIVER_CORES,
        "redis_cpu": lambda load: load["redis_cores"] <= REDIS_CORES,
        "redis_network": lambda load: load["redis_out_mb_per_s"] <= REDIS_OUT_MB_S,
    }
    found = {name: _most(lambda count, fit=fit: fit(load_of(unit, count, gather_s))) for name, fit in fits.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _most(fits: Any) -> int:
    """The largest count that fits, by bisection; 0 where none does."""
    low, high = 0, _MOST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def rows(unit: Unit, replicas: Sequence[int]) -> list[dict[str, float]]:
    """``load_of`` each, as it stands in the JSON."""
    return [{name: _rounded(value) for name, value in load_of(unit, count).items()} for count in replicas]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
