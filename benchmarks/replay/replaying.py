"""Rows through one of our drafters."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.drafters import OurDrafters, Setting, replay_stream
from benchmarks.orders import limited, stream
from benchmarks.walk import Counts
from cache_builder.evaluation.log import Row
from ssd.config import DraftConfig, IndexConfig
from ssd.drafting import Drafter


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
