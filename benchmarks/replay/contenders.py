"""Other people's drafters that decode requests in processes of their own, and whether what ours promise is true."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from benchmarks.drafters import Replayer, Setting
from benchmarks.peers import Peer
from benchmarks.replay.settings import PEERS, PeerSetting
from benchmarks.walk import Steps
from cache_builder.evaluation.log import Row


class Contender(Replayer, AbstractContextManager["Contender"], Protocol):
    """Several settings over one memory of requests, and what they are."""

    @property
    def settings(self) -> Sequence[Setting]:
        """In the order of what ``replay`` returns."""
        ...

    def describe(self) -> dict[str, Any]:
        """Its configuration, as it stands in the JSON."""
        ...


class PeerDrafter:
    """Somebody else's drafter, in its own process and environment."""

    def __init__(self, settings: Sequence[Setting], **options: int | str) -> None:
        """``options`` : the peer's own, see `Peer`. Raises PeerUnavailable where it is not installed."""
        self.settings = settings
        self._peer = Peer(PEERS[settings[0].drafter], **options)
        self._options = options
        self._asked = [(setting.limit, _knobs(setting)) for setting in settings]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._peer.close()

    def replay(self, request_id: str, row: Row) -> list[Steps]:
        return self._peer.replay(request_id, row.text(), len(row.context), self._asked)

    def num_cached_tokens(self) -> int:
        return 0

    def describe(self) -> dict[str, Any]:
        return {"versions": self._peer.versions, **self._options}


def _knobs(setting: Setting) -> dict[str, float | str]:
    return setting.knobs if isinstance(setting, PeerSetting) else {}


Floats = npt.NDArray[np.float64]

NUM_BINS = 15


@dataclass(frozen=True, slots=True)
class Calibration:
    """Estimates against what came true, in bins of equal mass from the lowest estimates to the highest.

    ``estimated``, ``accepted`` : float64[b], means of each bin; ``num_tokens`` : int64[b].
    """

    estimated: Floats
    accepted: Floats
    num_tokens: npt.NDArray[np.int64]

    @property
    def error(self) -> float:
        """Expected calibration error: the mean over tokens of |accepted - estimated| of their bin."""
        return float((self.num_tokens * np.abs(self.accepted - self.estimated)).sum() / self.num_tokens.sum())


def calibrate(estimates: Floats, hits: Floats, num_bins: int = NUM_BINS) -> Calibration | None:
    """Bin ``estimates``, float64[t], and ``hits``, float64[t]; None without any. O(t log t).

    Equal-mass bins as in Nguyen & O'Connor (2015, section 3), but equal estimates share a bin, so there can be fewer.
    """
    if not len(estimates):
        return None
    num_smaller = np.searchsorted(np.sort(estimates), estimates)
    bins = num_smaller * num_bins // len(estimates)
    num_tokens = np.bincount(bins)
    used = num_tokens > 0
    estimated, accepted = (np.bincount(bins, weights=values)[used] / num_tokens[used] for values in (estimates, hits))
    return Calibration(estimated, accepted, num_tokens[used])
