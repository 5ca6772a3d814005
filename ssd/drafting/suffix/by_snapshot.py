"""Requests of several namespaces in one call: those of each snapshot and what goes with it together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.drafting.suffix.workspace import NO_SNAPSHOT
from ssd.retrieval.snapshot import Snapshot


def propose_by_snapshot(
    requests: Sequence[DraftRequest], propose: Callable[[Snapshot, Sequence[DraftRequest]], list[Draft]]
) -> list[Draft]:
    """Call ``propose`` once for the requests of each snapshot and ``learned``; no snapshot is an empty one.

    Drafts in order. What is learned is a namespace's own also where requests bring no snapshot.
    """
    if not requests:
        return []
    first = requests[0]
    snapshot, learned = first.snapshot, first.learned
    if all(each.snapshot is snapshot and each.learned is learned for each in requests):
        return propose(snapshot or NO_SNAPSHOT, requests)
    members: dict[tuple[int, int], list[int]] = {}
    for i, request in enumerate(requests):
        members.setdefault((id(request.snapshot), id(request.learned)), []).append(i)
    drafts = [EMPTY_DRAFT] * len(requests)
    for indices in members.values():
        same = [requests[i] for i in indices]
        for i, draft in zip(indices, propose(same[0].snapshot or NO_SNAPSHOT, same), strict=True):
            drafts[i] = draft
    return drafts
