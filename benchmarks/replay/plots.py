"""Curves as pictures, a panel a trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.replay.settings import CONTENDER_NAMES, is_priced_by_curve

Result = dict[str, Any]

_COLOURS = dict(
    zip(
        CONTENDER_NAMES,
        ("tab:green", "tab:gray", "tab:olive", "tab:blue", "tab:purple", "tab:brown", "tab:red", "tab:orange"),
        strict=True,
    )
)
_COLUMNS = 4


def plot_curves(results: Sequence[Result], path: Path) -> None:
    """Accepted tokens a step over drafted tokens a step; a line for each drafter, crosses where a cost curve priced."""
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = _panels(results)
    figure, axes = _grid(len(panels))
    for axis, (title, some) in zip(axes, panels.items(), strict=False):
        for drafter, curve in _by(some, "drafter").items():
            points = sorted((r["drafted_per_step"], r["accepted_per_step"], is_priced_by_curve(r)) for r in curve)
            drawn = [(x, y, crossed) for x, y, crossed in points if x > 0]
            for crossed, style in (
                (False, {"marker": "o", "linewidth": 1.5}),
                (True, {"marker": "x", "linestyle": ""}),
            ):
                xy = [(x, y) for x, y, c in drawn if c == crossed]
                if xy:
                    label = None if crossed else drafter
                    axis.plot(*zip(*xy, strict=True), color=_COLOURS[drafter], markersize=4, label=label, **style)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    _finish(figure, axes, len(panels), "drafted tokens per step", "accepted tokens per step", path)


def _panels(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Results by trace; by tokenizer too where there are several."""
    known = list(results)
    several = len({result["tokenizer"] for result in known}) > 1
    return _by(known, lambda result: f"{result['trace']}, {result['tokenizer']}" if several else result["trace"])


def _by(results: Iterable[Result], key: Any) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result[key] if isinstance(key, str) else key(result), []).append(result)
    return groups


def _grid(num_panels: int) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(_COLUMNS, num_panels)
    rows = math.ceil(num_panels / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.2 * columns + 0.6, 2.7 * rows + 0.4), squeeze=False, layout="constrained"
    )
    return figure, list(axes.flat)


def _finish(figure: Any, axes: Sequence[Any], num_panels: int, x: str, y: str, path: Path) -> None:
    """Labels once, one legend above where the panels have none, nothing in panels left over; then the file."""
    from matplotlib import pyplot

    for axis in axes[num_panels:]:
        axis.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    if axes[0].get_legend() is None and handles:
        columns = max(1, min(len(labels), int(figure.get_figwidth() // 1.5)))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, fontsize=8, frameon=False)
    figure.supxlabel(x, fontsize=10)
    figure.supylabel(y, fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
