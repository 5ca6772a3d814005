"""A stream of requests, decoded one after another: nothing is seen ahead of its turn."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Protocol

from cache_builder.replay.counts import UNSCORED_SHARE, Counts
from cache_builder.replay.rows import Row, Turn
from cache_builder.replay.walk import Steps


class Replayer(Protocol):
    """What decodes requests with drafts, under several settings over one memory of them."""

    @property
    def settings(self) -> Sized:
        """As many as ``replay`` returns."""
        ...

    def replay(self, request_id: str, row: Row) -> list[Steps]:
        """Decode a row under each setting, then learn it."""
        ...

    def learn(self, request_id: str, row: Row) -> None:
        """Keep a row as a completed request."""
        ...

    def num_cached_tokens(self) -> int:
        """Tokens held for later requests; 0 where it does not tell."""
        ...


def replay_stream(turns: Sequence[Turn], replayer: Replayer) -> list[Counts]:
    """What each setting comes to on one stream."""
    num_output_tokens = sum(len(turn.row.output) for turn in turns if turn.is_scored)
    counts = [Counts(int(UNSCORED_SHARE * num_output_tokens)) for _ in range(len(replayer.settings))]
    for number, turn in enumerate(turns):
        if turn.is_scored:
            for one, steps in zip(counts, replayer.replay(str(number), turn.row), strict=True):
                one.add(steps, len(turn.row.output))
        else:
            replayer.learn(str(number), turn.row)
    for one in counts:
        one.num_cached_tokens = replayer.num_cached_tokens()
    return counts
