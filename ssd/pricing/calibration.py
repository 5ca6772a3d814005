"""What is learned of drafts while serving: which of what they promise comes, and whom it pays to ask."""

from __future__ import annotations

import math
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Record, Records, inlined, kernel, view_of

_FORGETTING: Final = 0.97
_FORGETTING_UNTRIED: Final = 0.99
_PRIOR_TOKENS: Final = 1.0
_KINDS: Final = 9
"""Of temperatures, which are at most 2: quarters, so that there are few."""


class SharesRecord(Record):
    """Promised and accepted tokens by kind of temperature, the older the less."""

    sums: Annotated[npt.NDArray[np.float64], np.float64, (_KINDS, 2)]


shares_at = view_of(SharesRecord)


@inlined
def kept_share(shares: SharesRecord, kind: int) -> float:
    """The share of a kind of temperature, 0 to 1."""
    return float(min(1.0, (shares.sums[kind, 1] + _PRIOR_TOKENS) / (shares.sums[kind, 0] + _PRIOR_TOKENS)))


@inlined
def count_promise(shares: SharesRecord, kind: int, promised: float, accepted: int) -> None:
    """See `KeptShares.observe`."""
    kept = _FORGETTING if promised > 0.0 else _FORGETTING_UNTRIED
    shares.sums[kind, 0] = shares.sums[kind, 0] * kept + promised
    shares.sums[kind, 1] = shares.sums[kind, 1] * kept + accepted


@kernel
def _share_at(shares: int, kind: int) -> float:
    return kept_share(shares_at(shares), kind)


@kernel
def _observe_at(shares: int, kind: int, promised: float, accepted: int) -> None:
    count_promise(shares_at(shares), kind, promised, accepted)


def kind_of(temperature: float) -> int:
    """The number of a temperature's kind."""
    return min(_KINDS - 1, round(4 * temperature))


class KeptShares:
    """The share of the promised tokens that was accepted of late, for each temperature; 1 where that is not known.

    Estimates are learned over all requests of a namespace; in a new one they are a rule of thumb. A token drawn at a
    high temperature is accepted less often than a greedy one after the same text, and until the model has found out,
    its drafts would cost more than they give. What is distrusted is drafted rarely, so old observations fade, though
    slowly, with the passes without a draft too, and drafts are tried again. O(1) each. ``address`` : of a
    `SharesRecord`.
    """

    def __init__(self) -> None:
        self._memory = Records(SharesRecord)
        self.address = self._memory.address

    def share(self, temperature: float) -> float:
        """The share for a temperature, 0 to 1."""
        share: float = _share_at(self.address, kind_of(temperature))
        return share

    def observe(self, temperature: float, promised: float, accepted: int) -> None:
        """Learn from one row of a pass: the tokens that its draft brought, and those that were expected of it as far as
        it was tested. So one long draft that is wrong at once weighs as one wrong token."""
        _observe_at(self.address, kind_of(temperature), promised, accepted)


_LEARNING_RATE = 0.02
_CLIP = 6.0
_SHIFT_RANGE = (-4.0, 4.0)
_SCALE_RANGE = (0.0, 3.0)


class PlattScaling:
    """Log odds of acceptance = shift + scale * log odds of the draft model's probability (Platt 1999, section 2).

    Fitted while serving by gradient steps on the log loss. Greedy and sampled requests need a model each: with shared
    noise an unlikely token is often the target's too.
    """

    def __init__(self, shift: float, scale: float) -> None:
        self.shift = shift
        self.scale = scale

    def estimate(self, chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Chance of acceptance of tokens of which the draft model says ``chances``: float64[n] each."""
        estimates: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(-self.shift - self.scale * _log_odds(chances)))
        return estimates

    def learn(self, chances: npt.NDArray[np.float64], accepted: npt.NDArray[np.bool_]) -> None:
        """Learn by one step. ``chances`` : float64[n], the draft model's; ``accepted`` : of each tested token."""
        log_odds = _log_odds(chances)
        error = accepted - self.estimate(chances)
        self.shift = float(np.clip(self.shift + _LEARNING_RATE * error.sum(), *_SHIFT_RANGE))
        self.scale = float(np.clip(self.scale + _LEARNING_RATE * (error * log_odds).sum(), *_SCALE_RANGE))


def _log_odds(chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    inside = np.clip(chances, 1e-9, 1 - 1e-9)
    return np.clip(np.log(inside / (1 - inside)), -_CLIP, _CLIP)


_SHARE = 0.005
"""Of a step that asking may take for rows that get nothing."""
_TELLING_SHARE = 0.005
"""Of a pass that telling a drafter what the target said may take where nothing was drafted."""
SURE: Final = 0.9
"""Chance of its first token that a draft must have in the pass that a client waits for: that takes longer with a draft,
and the first token is the target's own in any case. A text that comes again is worth it."""

FRUITLESS_AFTER: Final = 4
"""Times in a row that a request got no draft worth verifying."""
_LONGEST_PAUSE = 8
_TIME_FORGETTING = 0.9
_COMPILED_S = 1.0
"""What takes longer has compiled its kernels, and says nothing of the next time."""


class Throttle:
    """Asks a request that got nothing lately every second, third ... step, as seldom as keeps asking cheap.

    Looking up takes each row the same, while a pass takes little more for another row: beside one row it is nothing,
    in a large batch of new text it would be several percent of a step. A request that gets a draft is asked at every
    step, the others, which got none FRUITLESS_AFTER times in a row, all at the same one: a call takes something of its
    own. Only speed depends on it, never a token.

    Likewise a drafter is told of every pass that verified a draft; of the others as seldom as keeps telling cheap.
    """

    def __init__(self) -> None:
        self._row_s = self._pass_s = self._telling_s = 0.0
        self._num_spared = 0  # steps since all rows were asked
        self._num_untold = 0  # passes since a drafter was told

    def asks_all(self, num_rows: int) -> bool:
        """Whether all of so many rows are asked at this step, and not only those that got something lately."""
        return self._num_spared + 1 >= self.period(num_rows)

    def period(self, num_rows: int) -> int:
        """Steps from one time to the next that a fruitless row is asked."""
        if self._pass_s == 0.0:
            return 1
        return max(1, min(_LONGEST_PAUSE, math.ceil(num_rows * self._row_s / self._pass_s / _SHARE)))

    def observe_asking(self, num_asked: int, seconds: float, *, spares_some: bool) -> None:
        """Count an asking for so many rows, which took so many seconds. ``spares_some`` : of others nothing was asked,
        as they got nothing lately."""
        self._num_spared = self._num_spared + 1 if spares_some else 0
        if num_asked and seconds < _COMPILED_S:
            self._row_s = _recent(self._row_s, seconds / num_asked)

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
    return now if before == 0.0 else _TIME_FORGETTING * before + (1 - _TIME_FORGETTING) * now
