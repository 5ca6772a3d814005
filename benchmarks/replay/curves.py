"""Curves of accepted over drafted tokens: compared where two have points, drawn; and whether estimates come true."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
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


_COLUMNS = 4


def plot_curves(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Accepted tokens a step over drafted tokens a step, a panel a trace and tokenizer; crosses: priced by a curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = list(dict.fromkeys((result["trace"], result["tokenizer"]) for result in results))
    colours = {drafter: f"C{n}" for n, drafter in enumerate(dict.fromkeys(result["drafter"] for result in results))}
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (3.2 * columns + 0.6, 2.7 * rows + 0.4)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        for drafter, colour in colours.items():
            some = [r for r in results if (r["trace"], r["tokenizer"]) == panel and r["drafter"] == drafter]
            points = sorted((r["drafted_per_step"], r["accepted_per_step"], is_priced_by_curve(r)) for r in some)
            for crossed, style in ((False, "o-"), (True, "x")):
                xy = [(x, y) for x, y, is_crossed in points if x > 0 and is_crossed == crossed]
                if xy:
                    label = None if crossed else drafter
                    axis.plot(*zip(*xy, strict=True), style, color=colour, markersize=4, label=label)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_ylim(bottom=0)
        axis.set_title(", ".join(panel), fontsize=10)
        axis.grid(alpha=0.3)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=max(1, len(labels)), fontsize=8, frameon=False)
    figure.supxlabel("drafted tokens per step", fontsize=10)
    figure.supylabel("accepted tokens per step", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
