"""Shares over the number of replicas, a panel for each routing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleet.traffic import ROUTINGS

_ISOLATED = "each its own cache"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accepted tokens a step as a share of one cache's; a line for each lag, one for caches that share nothing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, axes = pyplot.subplots(1, len(ROUTINGS), figsize=(9, 3.8), sharey=True, layout="constrained")
    replicas = sorted({row["replicas"] for row in rows if row["kind"] != "one"})
    for axis, routing in zip(axes, ROUTINGS, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if row["kind"] == "one" or row["routing"] != routing or row["judges"] != "together":
                continue
            name = _ISOLATED if row["kind"] == "isolated" else f"log, {row['lag_s']:g} s"
            lines.setdefault(name, []).append((row["replicas"], 100 * row["share"]))
        for name, points in lines.items():  # in the order of the lags
            style = {"color": "black", "linestyle": "--"} if name == _ISOLATED else {}
            axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks(replicas, [str(count) for count in replicas])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(f"{routing} routing", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, frameon=False)
    figure.supxlabel("replicas", fontsize=10)
    figure.supylabel("% of one cache's accepted tokens per step", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
