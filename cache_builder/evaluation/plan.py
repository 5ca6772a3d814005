"""What an evaluation is to find out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from cache_builder.evaluation.runs import CacheUse
from cache_builder.replay.cost import at_batch
from cache_builder.replay.step_costs import StepCosts
from ssd.config import DraftConfig, IndexConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to find out.

    ``warm`` : directories searched beside what is learned. ``batch`` : sequences decoded together; above 1 drafts are
    chains unless ``shape`` says otherwise, as in the engine. ``sample_tokens`` : of output that every point of a curve
    decodes at most; 0 leaves the curves out. ``jobs`` : processes.
    """

    fingerprint: str
    cache: CacheUse = "growing"
    warm: tuple[Path, ...] = ()
    draft: DraftConfig = field(default_factory=DraftConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    batch: int = 1
    sample_tokens: int = 150_000
    jobs: int = 1
    seed: int = 0

    @property
    def is_tree(self) -> bool:
        """Whether drafts branch."""
        shape = self.draft.draft_shape
        return shape == "tree" or (shape == "auto" and self.batch == 1)


def in_batch(costs: StepCosts, batch: int) -> StepCosts:
    """Costs of a batch of rows that are all alike, from those of one row.

    What surrounds a pass is taken to grow with the rows; what the target's own candidates bring is left out, for it is
    the passes of one row that have room for them.
    """
    if batch == 1:
        return costs
    of_all = float(costs.curve.upto(batch)[batch])
    return replace(
        costs,
        curve=at_batch(costs.curve, batch),
        source=f"{costs.source}; of {batch} rows, taken to be alike, by the cost of as many tokens",
        step_ms=None if costs.step_ms is None else costs.step_ms * of_all,
        overhead=None if costs.overhead is None else costs.overhead * batch / of_all,
        recycling=0.0,
    )
