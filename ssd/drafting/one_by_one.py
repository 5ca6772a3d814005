"""A request that makes a drafter fail costs no other request its drafts."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.drafting.protocol import EMPTY_DRAFT, Draft, Drafter, DraftRequest
from ssd.errors import require_fault


class OneByOne:
    """Asks a drafter for all requests at once; after a failure for each alone, to find those that it fails for.

    They get no draft and are not asked for again until ``forget``. Where all fail it is the drafter that does; where
    there is one only, and the drafter just worked for others, it is the request.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.num_failures = 0
        """Requests that the drafter failed for while it drafted for others."""
        self._drafter = drafter
        self._failing: set[str] = set()
        self._works = False  # when it was last asked

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; raises what the drafter raises where it fails for all of them."""
        if not self._failing:
            return self._ask(requests)
        is_asked = [request.request_id not in self._failing for request in requests]
        drafts = iter(self._ask([request for request, yes in zip(requests, is_asked, strict=True) if yes]))
        return [next(drafts) if yes else EMPTY_DRAFT for yes in is_asked]

    def forget(self, request_id: str) -> None:
        """The request has ended, or begins anew."""
        self._failing.discard(request_id)

    def _ask(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        if not requests:
            return []
        try:
            drafts = self._drafter.propose(requests)
        except BaseException as error:
            require_fault(error)
            return self._each_alone(requests, error)
        self._works = True
        return drafts

    def _each_alone(self, requests: Sequence[DraftRequest], failure: BaseException) -> list[Draft]:
        drafts, failed = [EMPTY_DRAFT] * len(requests), {request.request_id for request in requests}
        worked, self._works = self._works, False
        for index, request in enumerate(requests if len(requests) > 1 else ()):
            try:
                drafts[index : index + 1] = self._drafter.propose([request])
            except BaseException as error:
                require_fault(error)
            else:
                failed.discard(request.request_id)
                self._works = True
        if not (self._works or (worked and len(requests) == 1)):
            raise failure
        self.num_failures += len(failed)
        self._failing |= failed
        return drafts
