"""Who asks what, when and where: recorded sessions as the requests of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from cache_builder.evaluation.log import Row, TokenIds

Routing = Literal["random", "sticky"]
ROUTINGS: Final[tuple[Routing, ...]] = ("random", "sticky")


@dataclass(frozen=True, slots=True)
class Session:
    """Rows of one conversation or trajectory, in order."""

    trace: str
    rows: list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a fleet is asked: each of ``replicas`` has ``concurrency`` requests running on average.

    ``tokens_per_s`` : of one request, so that when it ends does not depend on what is drafted. ``think_s`` : mean time
    between an answer and the next turn of its session. ``scored`` : share of the sessions that are drafted for; all
    are learned.
    """

    replicas: int
    concurrency: float
    tokens_per_s: float
    think_s: float
    scored: float
    seed: int


@dataclass(frozen=True, slots=True)
class Request:
    """One row in virtual time: drafted for as of ``arrival``, learned at ``end``, seconds."""

    session: int
    trace: str
    row: Row
    arrival: float
    end: float
    is_scored: bool

    @property
    def text(self) -> TokenIds:
        """int32[n], context then output."""
        return np.concatenate([self.row.context, self.row.output])


def requests_of(sessions: Sequence[Session], load: Load) -> list[Request]:
    """The requests in the order they arrive.

    Sessions come in random order, at times of a Poisson process whose rate keeps the fleet as busy as asked; a turn
    comes a while (exponential) after the one before it was answered.
    """
    random = np.random.default_rng(load.seed)
    total_s = sum(len(row.output) for session in sessions for row in session.rows) / load.tokens_per_s
    span_s = total_s / (load.replicas * load.concurrency)
    order = random.permutation(len(sessions))
    begins = np.sort(random.uniform(0.0, span_s, len(sessions)))  # a Poisson process of so many events
    is_scored = random.random(len(sessions)) < load.scored
    requests = []
    for number, time in zip(order, begins, strict=True):
        session = sessions[number]
        thinks = random.exponential(load.think_s, len(session.rows))
        for row, think_s in zip(session.rows, thinks, strict=True):
            end = time + len(row.output) / load.tokens_per_s
            requests.append(Request(int(number), session.trace, row, time, end, bool(is_scored[number])))
            time = end + think_s
    return sorted(requests, key=lambda request: request.arrival)


def places_of(requests: Sequence[Request], replicas: int, routing: Routing, seed: int) -> list[int]:
    """The replica of each request: any one, or for all of a session the same."""
    random = np.random.default_rng(seed)
    if routing == "random":
        return [int(place) for place in random.integers(replicas, size=len(requests))]
    by_session = random.integers(replicas, size=1 + max(request.session for request in requests))
    return [int(by_session[request.session]) for request in requests]
