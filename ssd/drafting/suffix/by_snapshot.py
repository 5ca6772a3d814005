"""Requests of several namespaces in one call: those of each snapshot together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.drafting.suffix.workspace import NO_SNAPSHOT
from ssd.retrieval.snapshot import Snapshot


def propose_by_snapshot(
    requests: Sequence[DraftRequest], propose: Callable[[Snapshot, Sequence[DraftRequest]], list[Draft]]
) -> list[Draft]:
    """Call ``propose`` once for the requests of each snapshot; no snapshot is an empty one. Drafts in order."""
    if not requests:
        return []
    snapshot = requests[0].snapshot
    if all(request.snapshot is snapshot for request in requests):
        return propose(snapshot or NO_SNAPSHOT, requests)
    members: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        members.setdefault(id(request.snapshot), []).append(i)
    drafts = [EMPTY_DRAFT] * len(requests)
    for indices in members.values():
        same = [requests[i] for i in indices]
        for i, draft in zip(indices, propose(same[0].snapshot or NO_SNAPSHOT, same), strict=True):
            drafts[i] = draft
    return drafts
