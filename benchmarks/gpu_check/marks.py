"""The marks: what the figures must reach on a GPU, each with what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Found = dict[str, Any]
"""What a part found: whether it "passed", and the "results" of its programs."""

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


def read_results(directory: Path) -> Found:
    """What the parts of all calls found whose results lie in ``directory``; of two of a part, the later file's by name.

    Empty where none lies there.
    """
    found: Found = {}
    for path in sorted(directory.glob("gpu_check*.json")):
        found |= json.loads(path.read_text())
    return found


def rows_of(results: Mapping[str, Found], part: str, program: str) -> list[dict[str, Any]]:
    """All rows that one program gave in one part."""
    found = (results.get(part) or {}).get("results", [])
    return [row for result in found if result["benchmark"] == program for row in result.get("rows", [])]


def _right(results: Mapping[str, Found]) -> Iterator[Mark]:
    for part in PARTS_THAT_PASS:
        found = results.get(part)
        value = None if found is None or "skipped" in found or "cut" in found else float(found["passed"])
        yield Mark(f"{part} is right", value, 1.0)


def _steps(results: Mapping[str, Found]) -> Iterator[Mark]:
    for part, shape in (("speed-large", "large"), ("speed-small", "small")):
        at = {(row["batch"], row["T"]): row for row in rows_of(results, part, "decode")}
        plain = at.get((1, 1))
        yield Mark(f"{shape} shape, plain decoding at batch 1, share of the copy rate", _of(plain, "of_copy"), 0.85)
        for width, bound in ((16, 1.10), (64, 1.35)):
            wide = at.get((1, width))
            ratio = None if plain is None or wide is None else round(wide["step_ms_p50"] / plain["step_ms_p50"], 4)
            yield Mark(f"{shape} shape, {width} positions over a plain step", ratio, bound, at_most=True)
        share = _of(plain, "outside_pass_share")
        yield Mark(f"{shape} shape, host time outside the pass, share of a step", share, 0.05, at_most=True)


def _drafting(results: Mapping[str, Found]) -> Iterator[Mark]:
    shares = [row["drafting_share"] for row in rows_of(results, "speed-large", "profile")]
    yield Mark("drafting for all rows, share of a step", max(shares, default=None), 0.03, at_most=True)
    large = (results.get("speed-large") or {}).get("results", [])
    repeats = next((each.get("repeated_requests") for each in large if each["benchmark"] == "growth"), None)
    yield Mark("repeats at batch 1 over speculation off", _of(repeats, "speedup_second"), 10.0)
    for part, shape in (("overhead-large", "large"), ("overhead-small", "small")):
        rows = rows_of(results, part, "overhead")
        for traffic in ("cold", "adversarial"):
            ratios = [row["tokens_ratio_p50"] for row in rows if row["traffic"] == traffic]
            yield Mark(f"{shape} shape, {traffic}, slowest batch over speculation off", min(ratios, default=None), 0.98)


def _of(row: Mapping[str, Any] | None, name: str) -> float | None:
    return None if row is None or name not in row else float(row[name])


def say(found: Iterable[Mark], show: Callable[[str], None] = print) -> None:
    """A line each."""
    for mark in found:
        show(mark.line())
