"""Plots as HTML and inline SVG: they stretch with their place, their words do not, and a table says the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

Format = Callable[[float], str]

_MOST_POINTS_SHOWN = 40
"""Beyond, a line goes without a dot at every point."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. ``points`` : (x, y), x rising. ``colour`` : the name of a colour of the page's style."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = "accent"
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """``name`` : what is along it. ``write`` : a value in words. ``is_log`` : equal ratios are equally far apart."""

    name: str
    write: Format
    is_log: bool = False


def line_plot(
    key: str,
    title: str,
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    floor: float | None = 0.0,
    mark: float | None = None,
) -> str:
    """A figure of curves. ``key`` : unique on the page. ``floor`` : the least that y begins at; ``mark`` : a line at
    this y, for comparison. There must be a point."""
    xs = [point[0] for line in lines for point in line.points]
    ys = [point[1] for line in lines for point in line.points] + ([] if mark is None else [mark])
    along, up = _Scale.of(xs, is_log=x.is_log), _Scale.nice(ys, floor)
    drawn = [f'<path class="grid" d="M0 {_at(100 - up(tick))}H100"/>' for tick in up.ticks]
    if mark is not None:
        drawn.append(f'<path class="mark" d="M0 {_at(100 - up(mark))}H100"/>')
    for line in lines:
        places = [(along(a), 100 - up(b)) for a, b in line.points]
        path = "M" + "L".join(f"{_at(a)} {_at(b)}" for a, b in places)
        style = f'class="line{" dashed" if line.is_dashed else ""}" style="--colour: var(--{escape(line.colour)})"'
        if len(places) > 1:
            drawn.append(f'<path {style} d="{path}"/>')
        if len(places) <= _MOST_POINTS_SHOWN:
            drawn += [
                f'<path {style.replace("line", "dot", 1)} d="M{_at(a)} {_at(b)}h0"><title>'
                f"{escape(line.name)}: {escape(x.write(value))}, {escape(y.write(height))}</title></path>"
                for (a, b), (value, height) in zip(places, line.points, strict=True)
            ]
    return _figure(key, title, lines, x, y, along, up, drawn)


def bar_plot(key: str, title: str, line: Line, x: Axis, y: Axis) -> str:
    """A figure of bars, one a point, side by side in their order."""
    up = _Scale.nice([height for _, height in line.points], 0.0)
    along = _Scale(0.0, float(len(line.points)), False, ())
    width = 100 / len(line.points)
    gap = min(0.3 * width, 1.5)
    drawn = [f'<path class="grid" d="M0 {_at(100 - up(tick))}H100"/>' for tick in up.ticks]
    drawn += [
        f'<rect style="--colour: var(--{escape(line.colour)})" x="{_at(number * width + gap / 2)}" '
        f'y="{_at(100 - up(height))}" width="{_at(width - gap)}" height="{_at(up(height))}"><title>'
        f"{escape(x.name)} {escape(x.write(value))}: {escape(y.write(height))}</title></rect>"
        for number, (value, height) in enumerate(line.points)
    ]
    stride = max(1, math.ceil(len(line.points) / 8))
    below = [
        ((number + 0.5) * width, x.write(value))
        for number, (value, _) in enumerate(line.points)
        if number % stride == 0
    ]
    return _figure(key, title, [line], x, y, along, up, drawn, below)


def bar_list(bars: Sequence[tuple[str, float, str]], mark: float | None = None) -> str:
    """Bars one below the other: what each is, how long, and that in words. ``mark`` : a length that is drawn grey."""
    longest = max([1e-12, mark or 0.0, *(length for _, length, _ in bars)])
    items = []
    for name, length, words in bars:
        known = "" if mark is None else f'<u style="--one: {_at(100 * max(0.0, min(mark, length)) / longest)}%"></u>'
        items.append(
            f'<li><span>{escape(name)}</span><em>{escape(words)}</em><div class="bar" aria-hidden="true">'
            f'<i style="--share: {_at(100 * max(0.0, length) / longest)}%"></i>{known}</div></li>'
        )
    return f'<ul class="bars">{"".join(items)}</ul>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text that anybody may have written; the first column names the row."""
    lines = ["<table><thead><tr>", *(f'<th scope="col">{escape(name)}</th>' for name in head), "</tr></thead><tbody>"]
    for first, *others in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return "".join([*lines, "</tbody></table>"])


def behind(rows: str) -> str:
    """What a plot shows, as a table that opens."""
    return f'<details><summary>The same as a table</summary><div class="scroll">{rows}</div></details>'


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where values lie between ``low`` and ``high``, in per cent."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log(max(number, 1e-12)) for number in (value, low, high))
        return 50.0 if high <= low else 100.0 * min(1.0, max(0.0, (value - low) / (high - low)))

    @classmethod
    def of(cls, values: Sequence[float], *, is_log: bool) -> _Scale:
        """From the least to the greatest, with marks at a few of the values."""
        known = sorted(set(values))
        is_log = is_log and known[0] > 0
        scale = cls(known[0], known[-1], is_log, ())
        kept = [known[0]]
        for value in known[1:-1]:
            if scale(value) - scale(kept[-1]) >= 22 and scale(known[-1]) - scale(value) >= 22:
                kept.append(value)
        return cls(known[0], known[-1], is_log, tuple(dict.fromkeys([*kept, known[-1]])))

    @classmethod
    def nice(cls, values: Sequence[float], floor: float | None) -> _Scale:
        """Round numbers around the values, with marks at each."""
        low = min(values) if floor is None else min(floor, *values)
        high = max(*values, low)
        if high <= low:
            high = low + max(1.0, abs(low))
        rough = (high - low) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return cls(first * step, last * step, False, tuple(number * step for number in range(first, last + 1)))


def _figure(
    key: str,
    title: str,
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    along: _Scale,
    up: _Scale,
    drawn: Sequence[str],
    below: Sequence[tuple[float, str]] | None = None,
) -> str:
    if below is None:
        below = [(along(tick), x.write(tick)) for tick in along.ticks]
    said = "; ".join(
        f"{line.name} from {y.write(line.points[0][1])} at {x.write(line.points[0][0])} "
        f"to {y.write(line.points[-1][1])} at {x.write(line.points[-1][0])}"
        for line in lines
    )
    left = "".join(f'<span style="bottom: {_at(up(tick))}%">{escape(y.write(tick))}</span>' for tick in up.ticks)
    under = "".join(f'<span style="left: {_at(place)}%">{escape(text)}</span>' for place, text in below)
    legend = "".join(
        f'<li class="{"dashed" if line.is_dashed else ""}" style="--colour: var(--{escape(line.colour)})">'
        f"{escape(line.name)}</li>"
        for line in lines
    )
    legend = f'<ul class="legend">{legend}</ul>' if len(lines) > 1 else ""
    return (
        f'<figure><figcaption>{escape(y.name)}</figcaption>{legend}<div class="plot">'
        f'<div class="ys" aria-hidden="true">{left}</div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-labelledby="{key}-title {key}-desc">'
        f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-desc">{escape(said)}</desc>'
        f"{''.join(drawn)}</svg>"
        f'<div class="xs" aria-hidden="true">{under}</div></div><p class="along">{escape(x.name)}</p></figure>'
    )


def _at(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
