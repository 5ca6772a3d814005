"""Results as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.replay.comparison import PLACES

Result = dict[str, Any]


def head(costs: Sequence[str]) -> str:
    """The first line of the table of results."""
    columns = [
        "output",
        "tokens/step",
        "of oracle",
        "drafted/step",
        "accepted",
        *(f"x {cost}" for cost in costs),
        "ECE",
        "us p50",
    ]
    return f"{'trace':<18} {'tokenizer':<15} {'drafter':<16} {'setting':<18}" + "".join(f" {c:>12}" for c in columns)


def line(result: Result) -> str:
    """One result."""
    calibration = result["calibration"]
    cells = [
        f"{result['output_tokens']}",
        f"{result['mean_acceptance_length']:.3f}",
        "-" if result["of_oracle"] is None else f"{result['of_oracle']:.3f}",
        f"{result['drafted_per_step']:.2f}",
        f"{result['acceptance_rate']:.3f}",
        *(f"{value:.2f}" for value in result["speed_up"].values()),
        "-" if calibration is None else f"{calibration['error']:.3f}",
        f"{result['propose_us_p50']}",
    ]
    name = f"{result['trace']:<18} {result['tokenizer']:<15} {result['drafter']:<16} {result['setting']:<18}"
    return name + "".join(f" {cell:>12}" for cell in cells)


def comparison_lines(comparison: dict[str, Any]) -> list[str]:
    """Ours against each other drafter: ratios of accepted tokens a step, and where."""
    lines = []
    for drafter, found in comparison.items():
        places = "".join(f" {f'at {place:.0%}':>18}" for place in PLACES)
        lines += ["", f"accepted per step, ours / {drafter} @ drafted per step, on the overlap of both curves", ""]
        lines.append(f"{'trace':<18} {'tokenizer':<15}{places}")
        for row in found["rows"]:
            pairs = zip(row["ratios"] or (), row["drafted"] or (), strict=True)
            cells = "".join(f" {f'{ratio:.3f} @ {drafted:.2f}':>18}" for ratio, drafted in pairs)
            lines.append(f"{row['trace']:<18} {row['tokenizer']:<15}{cells or '   no overlap'}")
        means = found["geometric_means"] or ()
        if means:
            lines.append(f"{'geometric mean':<34}" + "".join(f" {f'{mean:.3f}':<7}{'':>11}" for mean in means))
    return lines
