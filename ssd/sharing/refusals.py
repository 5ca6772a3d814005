"""Why sharing was interrupted, in few words that can be counted."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ssd.sharing.pages import OversizedReplyError

REASONS: Final = (
    "connection",
    "timeout",
    "authentication",
    "no_rights",
    "out_of_memory",
    "read_only",
    "wrong_type",
    "cluster_down",
    "busy",
    "oversized",
    "other",
)
"""What a server or the way to it may do: refuse or close a connection, not answer, know no such user, forbid a command,
be full, be a replica, hold a key of another kind, be without the node or the master that is needed, be loading or
running a script, answer too much, and all else."""

INVALID: Final = ("size", "format", "damaged", "checksum", "vocabulary")
"""What an entry that was skipped failed: its size, its format's version or numbers, its compression, its checksum, or a
token id beyond the vocabulary."""

_PREFIXES: Final = {
    "NOPERM": "no_rights",
    "WRONGTYPE": "wrong_type",
    "CLUSTERDOWN": "cluster_down",
    "MASTERDOWN": "cluster_down",
    "NOREPLICAS": "cluster_down",
    "TRYAGAIN": "cluster_down",
    "READONLY": "read_only",
    "OOM": "out_of_memory",
    "MISCONF": "read_only",
    "BUSY": "busy",
    "LOADING": "busy",
    "UNBLOCKED": "busy",
}


def reason_of(error: BaseException) -> str:
    """One of REASONS. Needs redis-py."""
    from redis import exceptions as of
    from redis.sentinel import MasterNotFoundError

    by_kind = (
        (OversizedReplyError, "oversized"),
        (of.BusyLoadingError, "busy"),
        (of.AuthenticationError, "authentication"),
        (of.AuthorizationError, "no_rights"),
        (of.NoPermissionError, "no_rights"),
        (of.OutOfMemoryError, "out_of_memory"),
        (of.ReadOnlyError, "read_only"),
        ((of.ClusterError, of.MasterDownError, of.AskError, MasterNotFoundError), "cluster_down"),
        ((of.TimeoutError, TimeoutError), "timeout"),
        ((of.ConnectionError, OSError), "connection"),
    )
    for kinds, reason in by_kind:
        if isinstance(error, kinds):
            return reason
    return _PREFIXES.get(str(error).partition(" ")[0], "other")


def all_reasons(refusals: Counter[str], invalid: Counter[str]) -> dict[str, int]:
    """Every reason with its count; those of entries as ``invalid_size`` and so on."""
    counts = {reason: refusals[reason] for reason in REASONS}
    return counts | {f"invalid_{kind}": invalid[kind] for kind in INVALID}
