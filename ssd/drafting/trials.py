"""Trials: a source that has not been worth its cost is asked all the same, now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ssd.drafting.source import Source

TRIAL_EVERY = 256
"""A source that has not been worth its cost is tried at most once in this many steps of requests."""
_TRIAL_SHARE = 0.01
"""Most that trials may cost, in output tokens for each step of a request."""


def tried(source: Source, num_rows: int, num_asked: int, costs: Callable[[], Mapping[int, float]]) -> int | None:
    """Which row of a step to try ``source`` for, None for none, after a step that asked it for ``num_asked``.

    ``costs`` : says of each row that can be asked for what a trial costs, in output tokens; called where one is due.
    """
    source.num_not_asked = 0 if num_asked else source.num_not_asked + num_rows
    if source.num_not_asked < TRIAL_EVERY:
        return None
    known = costs()
    cheapest = min(known, key=lambda i: known[i], default=None)
    if cheapest is None or known[cheapest] > _TRIAL_SHARE * source.num_not_asked:
        return None
    source.num_not_asked = 0
    return cheapest
