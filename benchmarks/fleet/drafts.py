"""Drafting for the requests of a fleet from what its replicas know, and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.fleet.traffic import Request
from benchmarks.fleet.views import View
from benchmarks.peers.walk import Counts, Proposal, Steps, walk
from ssd.config import DraftConfig
from ssd.drafting import Drafter, make_drafter
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.retrieval.segment_store import LearnedState
from ssd.retrieval.snapshot import Snapshot

MAX_DRAFT: Final = 16


def make_ready() -> Drafter:
    """Our drafter, its kernels compiled."""
    drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=MAX_DRAFT))
    getattr(drafter, "warm_up", lambda: None)()
    return drafter


def replay(
    requests: Sequence[Request],
    places: Sequence[int],
    view: View,
    drafter: Drafter,
    judges: Sequence[LearnedState] = (),
) -> list[tuple[int, Steps]]:
    """The steps of each scored request, by its number. Requests that end are learned before others arrive.

    ``judges`` : what each replica has learned of how likely drafts are; without, all replicas learn that together.
    """
    ends = sorted(range(len(requests)), key=lambda number: requests[number].end)
    next_end, found = 0, list[tuple[int, Steps]]()
    for number, request in enumerate(requests):
        while next_end < len(ends) and requests[ends[next_end]].end <= request.arrival:
            _learn(requests[ends[next_end]], places[ends[next_end]], view)
            next_end += 1
        if request.is_scored:
            judge = judges[places[number]] if judges else None
            asker = _Asker(drafter, str(number), request, view.snapshot(places[number], request.arrival), judge)
            found.append((number, walk(request.text.tolist(), len(request.row.context), [asker])[0]))
            drafter.finish(str(number))
    for number in ends[next_end:]:
        _learn(requests[number], places[number], view)
    return found


def counted(requests: Sequence[Request], steps: Sequence[tuple[int, Steps]]) -> Counts:
    """All steps together; every output is checked to be whole."""
    counts = Counts()
    for number, one in steps:
        counts.add(one, len(requests[number].row.output))
    return counts


def _learn(request: Request, place: int, view: View) -> None:
    view.learn(place, request.end, request.text, len(request.row.context))


class _Asker:
    """The drafter on one request, with what its replica knew when it arrived."""

    def __init__(
        self, drafter: Drafter, request_id: str, asked: Request, snapshot: Snapshot, judge: LearnedState | None
    ) -> None:
        self._drafter, self._request_id, self._text = drafter, request_id, asked.text
        self._prompt_length, self._snapshot, self._judge = len(asked.row.context), snapshot, judge
        self._draft: Draft | None = None

    def ask(self, position: int) -> Proposal:
        request = DraftRequest(
            self._request_id,
            self._text[:position],
            self._prompt_length,
            self._snapshot,
            MAX_DRAFT,
            learned=self._judge,
        )
        self._draft = self._drafter.propose([request])[0]
        return Proposal(0, self._draft.token_ids.tolist())

    def tell(self, num_accepted: int) -> None:
        assert self._draft is not None
        self._drafter.observe(self._request_id, self._draft, num_accepted)
