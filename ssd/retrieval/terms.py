"""On what terms a namespace is used: its size, whether it outlives the process, and what it reads beside its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceTerms:
    """The same for all requests of a namespace; what the last of them said counts.

    ``capacity_tokens`` : most tokens kept, None for the configured number; of effect when the namespace is opened.
    ``reads_shared`` : drafts come from what the set's first namespace has sealed as well.
    ``is_kept`` : it has a directory, where the set has one, and is shared with other replicas; without, all stays in
        this process' memory.
    ``group`` : of the namespaces of one group at most ``most_in_group`` are open: the one used longest ago is closed
        for another; where requests hold them all, there is none for the next.
    """

    capacity_tokens: int | None = None
    reads_shared: bool = False
    is_kept: bool = True
    group: str | None = None
    most_in_group: int = 8


DEFAULT_TERMS = NamespaceTerms()
