"""The marks: what the figures must reach on a GPU, each with what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.gpu_check.scene import Found

PARTS_THAT_PASS: Final = ("tests", "exactness", "growth", "soak", "growth-real")
"""What they find is right or wrong."""


@dataclass(frozen=True, slots=True)
class Mark:
    """``value`` : None where it was not measured. ``bound`` : what it must reach, or, with ``at_most``, not exceed."""

    name: str
    value: float | None
    bound: float
    at_most: bool = False

    @property
    def is_met(self) -> bool | None:
        """None where nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def line(self) -> str:
        """For people."""
        word = {None: "not measured", True: "met", False: "NOT MET"}[self.is_met]
        value = "-" if self.value is None else f"{self.value:g}"
        return f"{word:<13} {self.name}: {value} ({'at most' if self.at_most else 'at least'} {self.bound:g})"

    def to_json(self) -> dict[str, Any]:
        """For the result."""
        return {
            "name": self.name,
            "value": self.value,
            "bound": self.bound,
            "at_most": self.at_most,
            "met": self.is_met,
        }


def marks(results: Mapping[str, Found]) -> list[Mark]:
    """All of them, from what the parts found; a part that was cut counts with what it had found."""
    return [*_right(results), *_steps(results), *_drafting(results)]


def _right(results: Mapping[str, Found]) -> Iterator[Mark]:
    for part in PARTS_THAT_PASS:
        found = results.get(part)
        value = None if found is None or "skipped" in found or "cut" in found else float(found.get("passed", False))
        yield Mark(f"{part} is right", value, 1.0)


def _steps(results: Mapping[str, Found]) -> Iterator[Mark]:
    for part, shape in (("speed-large", "large"), ("speed-small", "small")):
        rows = (results.get(part) or {}).get("steps", {}).get("rows", [])
        at = {(row["batch"], row["T"]): row for row in rows}
        plain = at.get((1, 1))
        yield Mark(f"{shape} shape, plain decoding at batch 1, share of the copy rate", _of(plain, "of_copy"), 0.85)
        for width, bound in ((16, 1.10), (64, 1.35)):
            wide = at.get((1, width))
            ratio = None if plain is None or wide is None else round(wide["step_ms_p50"] / plain["step_ms_p50"], 4)
            yield Mark(f"{shape} shape, {width} positions over a plain step", ratio, bound, at_most=True)
        share = _of(plain, "outside_pass_share")
        yield Mark(f"{shape} shape, host time outside the pass, share of a step", share, 0.05, at_most=True)


def _drafting(results: Mapping[str, Found]) -> Iterator[Mark]:
    large = results.get("speed-large") or {}
    shares = [large["propose"][traffic]["share"] for traffic in ("new", "again") if traffic in large.get("propose", {})]
    yield Mark("drafting for all rows, share of a step", max(shares, default=None), 0.03, at_most=True)
    yield Mark("repeats at batch 1 over speculation off", _of(large.get("repeats"), "speedup_second"), 10.0)
    for part, shape in (("overhead-large", "large"), ("overhead-small", "small")):
        rows = (results.get(part) or {}).get("rows", [])
        for traffic in ("cold", "adversarial"):
            ratios = [row["tokens_ratio_p50"] for row in rows if row["traffic"] == traffic]
            yield Mark(f"{shape} shape, {traffic}, slowest batch over speculation off", min(ratios, default=None), 0.98)


def _of(row: Mapping[str, Any] | None, name: str) -> float | None:
    return None if row is None or name not in row else float(row[name])


def say(found: Iterable[Mark], show: Callable[[str], None] = print) -> None:
    """A line each."""
    for mark in found:
        show(mark.line())
