"""What a verify pass of T tokens costs, in passes of one token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ssd.errors import ConfigError

Floats = npt.NDArray[np.float64]

_MOST_POINTS = 10_000
_HOW = "run `python -m benchmarks.replay.measure_cost`, or `ssd-cache evaluate --measure MODEL --save-cost FILE`"


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Points of a curve, straight between them; beyond the last one it goes on as between the last two.

    ``widths`` : float64[n], tokens of a pass, rising from 1. ``costs`` : float64[n], the first is 1.
    """

    name: str
    widths: Floats
    costs: Floats

    def upto(self, width: int) -> Floats:
        """float64[width + 1], cost of a pass of 0 (free), 1, ... ``width`` tokens."""
        asked = np.arange(width + 1, dtype=np.float64)
        slope = (self.costs[-1] - self.costs[-2]) / (self.widths[-1] - self.widths[-2])
        beyond = np.maximum(0.0, asked - self.widths[-1])
        costs: Floats = np.interp(asked, self.widths, self.costs) + slope * beyond
        costs[0] = 0.0
        return costs


def flat(width: int) -> CostCurve:
    """Free up to ``width`` tokens, then proportional to them: a device that waits for memory until it computes."""
    return CostCurve(f"flat {width}", np.array([1.0, width, 2.0 * width]), np.array([1.0, 1.0, 2.0]))


def at_batch(curve: CostCurve, batch: int, most: int = 129) -> CostCurve:
    """What a pass of ``batch`` rows costs by the tokens of each, all rows alike: in passes of one token a row."""
    if batch == 1:
        return curve
    widths = np.arange(1.0, most + 1.0)
    costs = curve.upto(most * batch)[batch::batch]
    return CostCurve(f"{curve.name}, {batch} rows", widths, costs / costs[0])


def read_curve(path: Path) -> CostCurve:
    """The curve that a measurement wrote. Raises ConfigError where it is not usable."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"no cost curve in {path.name} ({error}); {_HOW}") from error
    return curve_of(result, path.name)


def curve_of(result: object, name: str) -> CostCurve:
    """The curve in a measurement's JSON, which may be anything. ``name`` : of its file. Raises ConfigError."""
    try:
        widths, costs = (np.array(result[key], np.float64) for key in ("widths", "costs"))  # type: ignore[index]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise ConfigError(f"no cost curve in {name} ({error}); {_HOW}") from error
    is_curve = widths.ndim == 1 and 2 <= len(widths) <= _MOST_POINTS and widths.shape == costs.shape
    rising = is_curve and bool(widths[0] == 1 and (np.diff(widths) > 0).all() and np.isfinite(widths).all())
    if not rising or costs[0] != 1 or not np.isfinite(costs).all() or (costs <= 0).any():
        raise ConfigError(
            f"{name} must hold two lists of one length, widths rising from 1 and positive costs starting with 1; {_HOW}"
        )
    return CostCurve("measured", widths, costs)


def speed_up(num_output_tokens: int, steps_by_drafted: npt.NDArray[np.int64], curve: CostCurve) -> float:
    """Plain decoding's cost over that of verify steps, the time of proposals left out.

    ``steps_by_drafted`` : int64[k + 1], how many steps drafted 0, 1, ... k tokens.
    """
    cost = float((steps_by_drafted * curve.upto(len(steps_by_drafted))[1:]).sum())
    return num_output_tokens / cost if cost else 1.0
