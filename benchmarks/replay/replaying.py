"""Streams of requests through contenders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.replay.contenders import Contender, OurDrafters
from benchmarks.replay.settings import Setting
from benchmarks.replay.stream import Turn, limited, stream
from benchmarks.traces import Row
from cache_builder.replay.counts import UNSCORED_SHARE, Counts
from ssd.config import DraftConfig, IndexConfig
from ssd.drafting import Drafter


def replay_stream(turns: Sequence[Turn], contender: Contender) -> list[Counts]:
    """What each setting of a contender comes to on one stream: nothing is seen ahead of its turn."""
    num_output_tokens = sum(len(turn.row.output) for turn in turns if turn.is_scored)
    counts = [Counts(int(UNSCORED_SHARE * num_output_tokens)) for _ in contender.settings]
    for number, turn in enumerate(turns):
        if turn.is_scored:
            for one, steps in zip(counts, contender.replay(str(number), turn.row), strict=True):
                one.add(steps, len(turn.row.output))
        else:
            contender.learn(str(number), turn.row)
    for one in counts:
        one.num_cached_tokens = contender.num_cached_tokens()
    return counts


def replay(
    rows: Iterable[Row],
    drafter: Drafter,
    *,
    max_draft: int,
    max_output_tokens: int | None = None,
    index: IndexConfig | None = None,
    price: float | None = None,
) -> Counts:
    """Replay ``rows`` in order with one of our drafters and a fresh index.

    Stops before the row that would exceed ``max_output_tokens``. ``price`` : of a drafted token; None leaves it to the
    drafter.
    """
    setting = Setting("", "", max_draft, price=price)
    config, index = DraftConfig(), index or IndexConfig()
    with OurDrafters([setting], draft=config, index=index, drafters=[drafter]) as contender:
        return replay_stream(stream(limited([list(rows)], max_output_tokens)), contender)[0]
