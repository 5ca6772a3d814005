"""The throttle of drafting: rows are asked, and drafters told, unless that takes more of a step than it may."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

_SHARE = 0.0075
"""Of a step that asking may take for rows that get nothing."""
_TELLING_SHARE = 0.0075
"""Of a pass that telling a drafter what the target said may take where nothing was drafted."""
_FRUITLESS_AFTER = 4
"""Times in a row that a request got no draft worth verifying."""
_LONGEST_PAUSE = 8
_FORGETTING = 0.9
_COMPILED_S = 1.0
"""What takes longer has compiled its kernels, and says nothing of the next time."""


class Row(Protocol):
    """A request that may be asked for a draft."""

    num_fruitless: int
    """Times in a row that it was asked for and got no draft."""


class Throttle:
    """Asks a request that got nothing lately every second, third ... step, as seldom as keeps asking cheap.

    Looking up takes each row the same, while a pass takes little more for another row: beside one row it is nothing,
    in a large batch of new text it would be several percent of a step. A request that gets a draft is asked at every
    step, the others all at the same one: a call takes something of its own. Only speed depends on it, never a token.
    O(rows).

    Likewise a drafter is told of every pass that verified a draft; of the others as seldom as keeps telling cheap.
    """

    def __init__(self) -> None:
        self._row_s = self._pass_s = self._telling_s = 0.0
        self._num_spared = 0  # steps since all rows were asked
        self._num_untold = 0  # passes since a drafter was told

    def due(self, rows: Sequence[Row]) -> list[bool]:
        """Of each row whether it is asked at this step."""
        all_are = self._num_spared + 1 >= self.period(len(rows))
        return [all_are or row.num_fruitless < _FRUITLESS_AFTER for row in rows]

    def period(self, num_rows: int) -> int:
        """Steps from one time to the next that a fruitless row is asked."""
        if self._pass_s == 0.0:
            return 1
        return max(1, min(_LONGEST_PAUSE, math.ceil(num_rows * self._row_s / self._pass_s / _SHARE)))

    def observe_asking(
        self, asked: Sequence[Row], lengths: Sequence[int], seconds: float, *, spares_some: bool
    ) -> None:
        """Count an asking: those ``asked`` got drafts of these lengths, in so many seconds together.

        ``spares_some`` : whether some were not ``due``.
        """
        self._num_spared = self._num_spared + 1 if spares_some else 0
        for row, length in zip(asked, lengths, strict=True):
            row.num_fruitless = 0 if length else row.num_fruitless + 1
        if asked and seconds < _COMPILED_S:
            self._row_s = _recent(self._row_s, seconds / len(asked))

    def tells(self, *, has_drafts: bool) -> bool:
        """Whether a drafter is told of a pass. ``has_drafts`` : whether anything was drafted for it."""
        share = self._telling_s / self._pass_s / _TELLING_SHARE if self._pass_s else 1.0
        tells = has_drafts or self._num_untold + 1 >= min(_LONGEST_PAUSE, math.ceil(share))
        self._num_untold = 0 if tells else self._num_untold + 1
        return tells

    def observe_telling(self, seconds: float) -> None:
        """Count what telling a drafter of a pass took."""
        if seconds < _COMPILED_S:
            self._telling_s = _recent(self._telling_s, seconds)

    def observe_pass(self, seconds: float) -> None:
        """Count the pass that followed."""
        self._pass_s = _recent(self._pass_s, seconds)


def _recent(before: float, now: float) -> float:
    return now if before == 0.0 else _FORGETTING * before + (1 - _FORGETTING) * now
