"""What steps with drafts take beside plain ones: the pass, what surrounds it, and what the target's own ideas bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_builder.replay.cost import CostCurve


@dataclass(frozen=True, slots=True)
class StepCosts:
    """All costs in plain steps: steps of an engine that decodes one token at a time, without any drafting.

    ``curve`` : of the passes. ``source`` : where it comes from, one sentence. ``step_ms`` : milliseconds of a plain
    step, where known. ``overhead`` : what a step that may draft takes more than its pass and what surrounds a plain
    one: looking up, verifying, learning; None where it was not measured. ``recycling`` : tokens that the target's own
    candidates, which a replay cannot know, add in the time of a plain step, >= 0. They add about as many beside a cache
    that knows much as beside one that knows little.
    """

    curve: CostCurve
    source: str
    step_ms: float | None = None
    overhead: float | None = None
    recycling: float = 0.0

    def speed_up(
        self, num_output_tokens: int, steps_by_drafted: npt.NDArray[np.int64], propose_s: float = 0.0
    ) -> float:
        """Plain decoding's time over that of these steps; 1 without steps. O(longest draft).

        ``steps_by_drafted`` : int64[k + 1], how many steps drafted 0, 1, ... k tokens. ``propose_s`` : what their
        proposals took together, charged where ``step_ms`` is known and the overhead, which holds them, is not.
        """
        passes = self.curve.upto(len(steps_by_drafted))[1:]
        times = steps_by_drafted * (passes + (self.overhead or 0.0))
        time = float(times.sum())
        if self.overhead is None and self.step_ms:
            time += propose_s * 1e3 / self.step_ms
        return num_output_tokens / time + self.recycling if time else 1.0

    def as_json(self) -> dict[str, Any]:
        """Its part of a report."""
        return {
            "name": self.curve.name,
            "source": self.source,
            "widths": [round(float(width), 3) for width in self.curve.widths],
            "costs": [round(float(cost), 4) for cost in self.curve.costs],
            "step_ms": None if self.step_ms is None else round(self.step_ms, 4),
            "overhead": None if self.overhead is None else round(self.overhead, 4),
            "recycling": round(self.recycling, 4),
        }
