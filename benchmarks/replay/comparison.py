"""Two drafters' curves compared where both have points."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.replay.settings import is_priced_by_curve

Point = tuple[float, float]
"""Drafted tokens a step, accepted tokens a step."""

PLACES = (0.05, 0.5, 0.95)
"""Where on the overlap, on a log scale of drafted tokens."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """``drafted`` : where, tokens a step; ``ratios`` : accepted tokens a step there, the first drafter's over the
    second's."""

    drafted: list[float]
    ratios: list[float]


def envelope(points: Iterable[Point]) -> npt.NDArray[np.float64]:
    """float64[n, 2], the points that none with fewer drafted tokens reaches, by drafted; none at zero drafted."""
    best: list[Point] = []
    for drafted, accepted in sorted(points, key=lambda point: (point[0], -point[1])):
        if drafted > 0 and accepted > 0 and (not best or accepted > best[-1][1]):
            best.append((drafted, accepted))
    return np.array(best, np.float64).reshape(-1, 2)


def compare(ours: Iterable[Point], theirs: Iterable[Point], places: Sequence[float] = PLACES) -> Comparison | None:
    """Compare upper envelopes, straight in (log drafted, accepted); None where they do not overlap.

    Nothing is extrapolated: ``places`` are shares of the range of drafted tokens that both envelopes cover.
    """
    first, second = envelope(ours), envelope(theirs)
    if not len(first) or not len(second):
        return None
    low = np.log(max(first[0, 0], second[0, 0]))
    high = np.log(min(first[-1, 0], second[-1, 0]))
    if high <= low:
        return None
    at = low + np.array(places) * (high - low)
    one, other = (np.interp(at, np.log(curve[:, 0]), curve[:, 1]) for curve in (first, second))
    return Comparison(np.exp(at).tolist(), (one / other).tolist())


def geometric_means(comparisons: Sequence[Comparison]) -> list[float]:
    """At each place the geometric mean of the ratios; empty without any."""
    if not comparisons:
        return []
    logs = np.log([each.ratios for each in comparisons])
    means: list[float] = np.exp(logs.mean(axis=0)).tolist()
    return means


def compare_results(results: Sequence[dict[str, Any]], ours: str) -> dict[str, Any]:
    """Ours against every other drafter that has a curve, for each trace and tokenizer, as it stands in the JSON.

    Settings that a cost curve prices are not points of a curve.
    """
    points: dict[str, dict[tuple[str, str], list[Point]]] = {}
    for result in results:
        if not is_priced_by_curve(result):
            key = result["trace"], result["tokenizer"]
            point = result["drafted_per_step"], result["accepted_per_step"]
            points.setdefault(result["drafter"], {}).setdefault(key, []).append(point)
    found: dict[str, Any] = {}
    for drafter, curves in points.items():
        if drafter == ours or ours not in points or max(map(len, curves.values())) < 2:
            continue
        compared = {key: compare(points[ours][key], curve) for key, curve in curves.items()}
        found[drafter] = {
            "places": list(PLACES),
            "rows": [
                {
                    "trace": trace,
                    "tokenizer": tokenizer,
                    "drafted": None if each is None else each.drafted,
                    "ratios": None if each is None else each.ratios,
                }
                for (trace, tokenizer), each in compared.items()
            ],
            "geometric_means": geometric_means([each for each in compared.values() if each is not None]),
        }
    return found
