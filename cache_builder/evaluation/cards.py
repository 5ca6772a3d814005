"""The cards of an evaluation's page: a plot each, with its table. What an evaluation lacks gives none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from cache_builder.evaluation.plots import Axis, Line, bar_list, bar_plot, behind, line_plot, table
from cache_builder.evaluation.values import (
    TIMES,
    Row,
    axis_times,
    cell,
    count,
    number,
    numbers_of,
    percent,
    rows_of,
    short,
    size,
    times,
)

_USES = {
    "none": "the request's own text",
    "frozen": "and the warm directories",
    "growing": "and all requests before it",
}
_SOURCES = {
    "own": "the request's own text",
    "tail": "the newest requests",
    "segment": "requests before",
    "warm": "warm directories",
    "guess": "guesses behind a wrong token",
}
_SPEED = Axis("speed-up over plain decoding", axis_times)


def cards(evaluation: Row) -> list[str]:
    """All of them, in the order in which they are read."""
    parts = (_growth, _positions, _uses, _sources, _capacity, _limits, _sharing, _cost, _needs)
    return [card for part in parts for card in part(evaluation)]


def section(title: str, about: str, body: str, *, is_wide: bool = False) -> str:
    said = f'<p class="about">{escape(about)}</p>' if about else ""
    return f"<section{' class=wide' if is_wide else ''}><h2>{escape(title)}</h2>{said}{body}</section>"


def _growth(evaluation: Row) -> Iterator[str]:
    rows = rows_of(evaluation, "growth", ("requests", "speedup"))
    if len(rows) < 2:
        return
    rows = sorted(rows, key=lambda row: float(row["requests"]))
    points = [(float(row["requests"]), float(row["speedup"])) for row in rows]
    head = ("after requests", "speed-up", "tokens a step")
    cells = [
        (count(at), times(speed), cell(row, "tokens_per_step")) for (at, speed), row in zip(points, rows, strict=True)
    ]
    yield section(
        "It grows with use",
        "Speed-up of each part of the log, in its order: what was answered before is drafted from afterwards.",
        line_plot(
            "growth",
            "Speed-up along the log",
            [Line("speed-up", points)],
            Axis("requests served", count),
            _SPEED,
            mark=1.0,
        )
        + behind(table(head, cells)),
    )


def _positions(evaluation: Row) -> Iterator[str]:
    rows = [
        row
        for row in rows_of(evaluation, "acceptance_by_position", ("position", "drafted", "accepted"))
        if row["drafted"]
    ]
    if not rows:
        return
    points = [(float(row["position"]), min(1.0, row["accepted"] / row["drafted"])) for row in rows]
    cells = [
        (count(row["position"]), count(row["drafted"]), count(row["accepted"]), percent(share))
        for row, (_, share) in zip(rows, points, strict=True)
    ]
    parameters = evaluation.get("parameters")
    is_tree = isinstance(parameters, Mapping) and parameters.get("shape") == "tree"
    yield section(
        "How far drafts hold",
        "Of the tokens drafted at each place of a draft, the share that the model agreed with."
        + (" Drafts branch: of several candidates for a place one at most can be right." if is_tree else ""),
        bar_plot(
            "positions",
            "Acceptance by position",
            Line("accepted", points),
            Axis("place in the draft", count),
            Axis("accepted", percent),
        )
        + behind(table(("place", "drafted", "accepted", "share"), cells)),
    )


def _uses(evaluation: Row) -> Iterator[str]:
    rows = [row for row in rows_of(evaluation, "by_cache", ("speedup",)) if row.get("cache") in _USES]
    if len(rows) < 2:
        return
    bars = [(_USES[row["cache"]], float(row["speedup"])) for row in rows]
    yield section(
        "What the cache adds",
        "A request's own prompt and output are drafted from in any case; the rest is what others said before it.",
        bar_list([(name, speed, times(speed)) for name, speed in bars], mark=1.0),
    )


def _sources(evaluation: Row) -> Iterator[str]:
    found = rows_of(evaluation, "by_source", ("drafted", "accepted"))
    rows = [row for row in found if row["drafted"] > 0 and isinstance(row.get("source"), str)]
    total = sum(row["accepted"] for row in rows)
    if total <= 0:
        return
    rows = sorted(rows, key=lambda row: -float(row["accepted"]))
    bars = [(_SOURCES.get(str(row["source"]), str(row["source"])), row["accepted"] / total) for row in rows]
    yield section(
        "Where drafts come from",
        "Of the drafted tokens that the model agreed with, the share of each source.",
        bar_list([(name, share, percent(share)) for name, share in bars])
        + behind(
            table(
                ("source", "drafted", "accepted"),
                [
                    (name, count(row["drafted"]), count(row["accepted"]))
                    for (name, _), row in zip(bars, rows, strict=True)
                ],
            )
        ),
    )


def _speed_plot(name: str, title: str, points: list[tuple[float, float]], axis: Axis) -> str:
    return line_plot(name, title, [Line("speed-up", points)], axis, _SPEED, mark=1.0)


def _capacity(evaluation: Row) -> Iterator[str]:
    rows = rows_of(evaluation, "by_capacity", ("capacity_tokens", "speedup"))
    if not rows:
        return
    rows = sorted(rows, key=lambda row: float(row["capacity_tokens"]))
    points = [(float(row["capacity_tokens"]), float(row["speedup"])) for row in rows]
    cells = [
        (
            count(row["capacity_tokens"]),
            times(row["speedup"]),
            cell(row, "tokens_per_step"),
            cell(row, "bytes", size),
        )
        for row in rows
    ]
    yield section(
        "How large the cache should be",
        "Speed-up by the tokens that it may hold; the oldest text goes first.",
        _speed_plot("capacity", "Speed-up by capacity", points, Axis("tokens held", count, is_log=True))
        + behind(table(("tokens", "speed-up", "tokens a step", "memory"), cells)),
    )


def _limits(evaluation: Row) -> Iterator[str]:
    rows = rows_of(evaluation, "by_draft_limit", ("limit", "speedup"))
    if not rows:
        return
    rows = sorted(rows, key=lambda row: float(row["limit"]))
    points = [(float(row["limit"]), float(row["speedup"])) for row in rows]
    cells = [
        (count(row["limit"]), times(row["speedup"]), cell(row, "tokens_per_step"), cell(row, "drafted_per_step"))
        for row in rows
    ]
    yield section(
        "How long drafts may be",
        "Speed-up by the most tokens of a draft; below the limit drafts are as long as pays.",
        _speed_plot("limits", "Speed-up by draft limit", points, Axis("most tokens of a draft", count, is_log=True))
        + behind(table(("limit", "speed-up", "tokens a step", "drafted a step"), cells)),
    )


def _sharing(evaluation: Row) -> Iterator[str]:
    rows = rows_of(evaluation, "sharing", ("replicas", "speedup"))
    if not rows:
        return
    lines = []
    for is_shared, name, colour in (
        (True, "one shared cache", "accent"),
        (False, "a cache for each replica", "second"),
    ):
        points = sorted(
            (float(row["replicas"]), float(row["speedup"])) for row in rows if bool(row.get("is_shared")) == is_shared
        )
        if points:
            lines.append(Line(name, points, colour, is_dashed=not is_shared))
    cells = [
        (
            count(row["replicas"]),
            "shared" if row.get("is_shared") else "each its own",
            times(row["speedup"]),
            cell(row, "tokens_per_step"),
        )
        for row in rows
    ]
    yield section(
        "What sharing brings",
        "The same requests dealt to several replicas at random. Apart, each has seen only what came to it.",
        line_plot("sharing", "Speed-up by replicas", lines, Axis("replicas", count, is_log=True), _SPEED, mark=1.0)
        + behind(table(("replicas", "caches", "speed-up", "tokens a step"), cells)),
    )


def _cost(evaluation: Row) -> Iterator[str]:
    cost = evaluation.get("cost")
    if not isinstance(cost, Mapping):
        return
    widths, costs = (numbers_of(cost.get(key)) for key in ("widths", "costs"))
    if len(widths) < 2 or len(widths) != len(costs):
        return
    about = [f"{cost['source'][:1].upper()}{cost['source'][1:]}." if isinstance(cost.get("source"), str) else ""]
    if (step_ms := number(cost, "step_ms")) is not None:
        about.append(f"A plain step takes {step_ms:.3g} ms.")
    if (overhead := number(cost, "overhead")) is not None:
        about.append(f"A step that may draft takes {overhead:.1%} of that more, beside its pass.")
    if (recycling := number(cost, "recycling")) is not None and recycling > 0:
        about.append(f"The model's own candidates, measured, add {recycling:.2f}{TIMES} to every speed-up here.")
    points = list(zip(widths, costs, strict=True))
    cells = [(f"{width:g}", f"{value:.3f}") for width, value in points]
    yield section(
        "What a pass costs",
        " ".join(filter(None, about)),
        line_plot(
            "cost",
            "Cost of a pass by its tokens",
            [Line("cost", points, "third")],
            Axis("tokens of the pass", short),
            Axis("in passes of one token", short),
        )
        + behind(table(("tokens", "cost"), cells)),
    )


def _needs(evaluation: Row) -> Iterator[str]:
    needs = evaluation.get("needs")
    if not isinstance(needs, Mapping):
        return
    known = [
        ("Memory, for each replica", "memory_bytes", size),
        ("Disk, where the cache is kept", "disk_bytes", size),
        ("Redis, where replicas share", "redis_bytes", size),
        ("sent for each request", "redis_bytes_per_request", size),
        ("Looking up a draft", "propose_us", lambda value: f"{value:,.0f} µs"),
    ]
    found = [(name, write(value)) for name, key, write in known if (value := number(needs, key)) is not None]
    if found:
        cells = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in found)
        yield section("What it needs", "To hold these logs.", f'<dl class="needs">{cells}</dl>')
