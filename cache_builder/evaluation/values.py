"""Numbers of an evaluation, read with care, and in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Row = Mapping[str, Any]

_MOST = 1e18
TIMES = "\N{MULTIPLICATION SIGN}"


def rows_of(evaluation: Row, key: str, numbers: tuple[str, ...]) -> list[Row]:
    """Entries of a list that have all of ``numbers``."""
    found = evaluation.get(key)
    rows = [row for row in found if isinstance(row, Mapping)] if isinstance(found, list | tuple) else []
    return [row for row in rows if all(number(row, name) is not None for name in numbers)]


def number(row: Row, key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:
        return None
    return value


def numbers_of(values: Any) -> list[float]:
    found = values if isinstance(values, list | tuple) else []
    return [float(value) for value in found if isinstance(value, int | float) and 0 <= value < _MOST]


def plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def count(value: float) -> str:
    for size, name in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            divisor = 1e3 if name == "k" else size
            return f"{value / divisor:.3g}{name}" if value < 999.5 * divisor else f"{value / divisor:,.0f}{name}"
    return f"{value:,.0f}"


def size(value: float) -> str:
    for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB")):
        if value < 1000 * 1024**power or name == "TiB":
            return f"{value / 1024**power:.3g} {name}"
    raise AssertionError


def two(value: float) -> str:
    return f"{value:.2f}"


def short(value: float) -> str:
    return f"{value:.3g}"


def times(value: float) -> str:
    return f"{value:.2f}{TIMES}"


def axis_times(value: float) -> str:
    return f"{value:g}{TIMES}"


def percent(value: float) -> str:
    return f"{value:.0%}"


def cell(row: Row, key: str, write: Callable[[float], str] = two) -> str:
    value = number(row, key)
    return "" if value is None else write(value)
