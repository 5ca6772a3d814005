"""Was this text asked before by somebody else? Told by how fast the attacker's own request is answered.

How fast is how many seconds it took, or, whatever else the machine does, in how many records the answer came.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any, Literal

from benchmarks.side_channels.wire import watch, watch_all

_VICTIMS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Victim:
    """Under whose key somebody asked for texts, and with which fields; None where there are no keys."""

    key: str | None = None
    fields: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Attack:
    """A server, the attacker's key, how long the answers are, and what the attacker goes by."""

    port: int
    max_tokens: int
    key: str | None = None
    by: Literal["seconds", "records"] = "seconds"

    def rate(self, texts: Iterator[str], victim: Victim, *, num_texts: int, num_own: int) -> float:
        """Share of right guesses among ``num_texts`` that were asked and as many that were not.

        ``texts`` : new ones. The limit between fast and slow is learned from ``num_own`` that nobody else asks.
        Every text is tried once: afterwards it has been asked.
        """
        asked, others, own = (list(islice(texts, number)) for number in (num_texts, num_texts, num_own))
        victims = {**self._fields, **(victim.fields or {})}
        watch_all(self.port, asked, victims, victim.key, times=2, at_once=_VICTIMS_AT_ONCE)
        time.sleep(1)  # by now what was said can be drafted from
        limit, right = self._limit(own), 0
        for known, unknown in zip(asked, others, strict=True):
            right += self._slowness(known) < limit
            right += self._slowness(unknown) >= limit
        return right / (2 * num_texts)

    def _limit(self, own: Sequence[str]) -> float:
        first = [self._slowness(text) for text in own]
        again = [min(self._slowness(text) for _ in range(2)) for text in own]
        if max(again) < min(first):
            return (max(again) + min(first)) / 2
        return (median(first) + median(again)) / 2

    def _slowness(self, text: str) -> float:
        """How long the answer took after its first record, as reading the prompt is another matter; or how many."""
        times = watch(self.port, {**self._fields, "prompt": text}, self.key).times
        return times[-1] - times[0] if self.by == "seconds" else len(times)

    @property
    def _fields(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}
