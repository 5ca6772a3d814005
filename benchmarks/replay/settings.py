"""The drafters that can be replayed, and each one's settings from frugal to generous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cache_builder.replay.cost import CostCurve
from cache_builder.replay.drafters import Setting
from ssd.drafting import DRAFTER_NAMES

OURS = "ssd"
MEASURED_PATH = Path(__file__).parents[1] / "results" / "verify-cost.json"
"""The cost curve that `benchmarks.replay.measure_cost` measured."""
PEERS = {"arctic": "arctic", "vllm-ngram": "vllm-ngram", "prompt-lookup-hf": "prompt-lookup"}
"""What other people's drafters are called here, and in `benchmarks.peers`."""

CONTENDER_NAMES = (*DRAFTER_NAMES, *PEERS)

PRICED_BY = "priced by "

_PRICES = (0.85, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01)
_LENGTHS = (2, 4, 8, 16)
_FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
_LEAST_PROBABILITIES = (0.1, 0.01)


@dataclass(frozen=True, slots=True)
class PeerSetting(Setting):
    """One way to run somebody else's drafter."""

    knobs: dict[str, float] = field(default_factory=dict)
    """Its own, as `benchmarks.peers` takes them."""


def settings_of(
    drafter: str, max_draft: int, *, curve: bool, tree: bool, priced_by: Sequence[CostCurve] = ()
) -> list[Setting]:
    """The settings to run a drafter with: all of its curve, or its default. ``priced_by`` adds to ours."""
    if drafter == OURS:
        plain: list[Setting] = (
            [Setting(drafter, f"price {price:g}", max_draft, price=price) for price in _PRICES]
            if curve
            else [Setting(drafter, "default", max_draft)]
        )
        return plain + [Setting(drafter, PRICED_BY + each.name, max_draft, curve=each) for each in priced_by]
    if drafter == "arctic":
        pairs = [(factor, least) for least in _LEAST_PROBABILITIES for factor in _FACTORS] if curve else [(1.0, 0.1)]
        return [
            PeerSetting(
                drafter,
                f"factor {factor:g}, p {least:g}",
                max_draft,
                knobs={"max_spec_factor": factor, "min_token_prob": least, "use_tree_spec": tree},
            )
            for factor, least in pairs
        ]
    if drafter == "none":
        return [Setting(drafter, "default", 0)]
    lengths = sorted({length for length in _LENGTHS if length < max_draft} | {max_draft}) if curve else [max_draft]
    return [Setting(drafter, f"draft {length}", length) for length in lengths]


def is_priced_by_curve(result: dict[str, Any]) -> bool:
    """Whether a cost curve set the prices: such a result is no point of a drafter's own curve."""
    return str(result["setting"]).startswith(PRICED_BY)
