"""What every program here has: arguments, ways in turn, medians with their spread, a table, one JSON line at the end.

A program names its options with their defaults, makes rows, and says what came of them:

    run = Run("overhead", __doc__, argv, OPTIONS, COLUMNS, has_model=True)
    for row in rows_of(run.args):
        run.row(row)
    return run.end(**facts, is_wrong=...)
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

import numpy as np

from benchmarks.environment import head, model_name
from benchmarks.models import add_model

T = TypeVar("T")

Columns = Sequence[tuple[str, str]]
"""Of each column its heading, behind `>` where it has numbers, and how a row is written there by `str.format_map`."""

SPREAD: Final = "{%s[0]:.2f} ({%s[1]:.2f} ... {%s[2]:.2f})"
_RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One argument beside those that all programs have. Its name and its type are its key's and its default's.

    A list takes several values, False is a switch. ``least`` : of numbers; ``kind`` : where the default is None, which
    with ``several`` takes any number of values.
    """

    default: Any
    help: str = ""
    choices: Sequence[Any] | None = None
    least: float | None = None
    kind: Callable[[str], Any] = str
    several: bool = False
    metavar: str | None = None


class Run:
    """One run of a program: ``args``, the rows so far, and how it ends."""

    def __init__(
        self,
        name: str,
        purpose: str | None,
        argv: Sequence[str] | None,
        options: Mapping[str, Any],
        columns: Columns = (),
        *,
        has_model: bool = False,
        unsaid: Sequence[str] = (),
        program: str | None = None,
    ) -> None:
        """``options`` : defaults by name, or an `Option`. ``unsaid`` : those that are no parameters of the result.
        ``program`` : its module below `benchmarks`, where that is not ``name``.

        A number that is below its least ends the program, as argparse does. Numbers are from 1 where nothing is said,
        ``seed`` from 0.
        """
        self.name = name
        self.rows: list[dict[str, Any]] = []
        self._columns = columns
        self.parser = parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{program or name}",
            description=(purpose or "").split("\n")[0],
            epilog="\n".join((purpose or "").split("\n")[2:]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if has_model:
            add_model(parser)
        known = {key: each if isinstance(each, Option) else Option(default=each) for key, each in options.items()}
        for key, option in known.items():
            _add(parser, key, option)
        parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON line to this file")
        parser.add_argument("--json", action="store_true", help="no table, the JSON line alone")
        self.args = parser.parse_args(argv)
        for key, option in known.items():
            self._check(key, option)
        self.parameters = {key: getattr(self.args, key) for key in known if key not in unsaid}
        model = f"{model_name(self.args.model)}, " if has_model else ""
        self.say(f"{name}: {model}{json.dumps(self.parameters, default=str)}")
        if columns:
            self.say(" | ".join(heading.removeprefix(">") for heading, _ in columns))

    def _check(self, key: str, option: Option) -> None:
        given = getattr(self.args, key)
        least = option.least if option.least is not None else 0 if key == "seed" else 1
        for number in given if isinstance(given, (list, tuple)) else [given]:
            is_number = isinstance(number, int) and not isinstance(number, bool)
            if (is_number or (option.least is not None and isinstance(number, float))) and number < least:
                self.parser.error(f"--{key.replace('_', '-')} takes numbers from {least:g}, got {number}")

    def say(self, text: str) -> None:
        """Print it, unless the JSON line alone is wanted."""
        if not self.args.json:
            print(text, flush=True)

    def row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row of the result and print it."""
        self.rows.append(row)
        if self._columns:
            self.say(" | ".join(cells_of(self._columns, row)))
        return row

    def end(self, *, is_wrong: bool = False, indent: int | None = None, **facts: Any) -> int:
        """Write and print the result: ``facts`` behind head and parameters. Returns the exit status."""
        result = {**head(self.name), "parameters": self.parameters, **facts}
        line = json.dumps(result, default=str)
        if self.args.out is not None:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            text = line if indent is None else json.dumps(result, indent=indent, default=str)
            self.args.out.write_text(text + "\n")
        print(line)
        return int(is_wrong)


def _add(parser: argparse.ArgumentParser, key: str, option: Option) -> None:
    flag, default, text = f"--{key.replace('_', '-')}", option.default, option.help
    if default is False:
        parser.add_argument(flag, action="store_true", help=text)
        return
    several = isinstance(default, (list, tuple))
    sample = default[0] if several and default else default
    kind = option.kind if sample is None or (several and not default) else type(sample)
    shown = "" if default is None else f" (default: {' '.join(map(str, default)) if several else default})"
    more: dict[str, Any] = {"nargs": "*" if option.several else "+"} if several or option.several else {}
    if option.metavar is not None:
        more["metavar"] = option.metavar
    parser.add_argument(
        flag,
        type=kind,
        default=default,
        choices=option.choices,
        help=f"{text}{shown}".strip().replace("%", "%%"),
        **more,
    )


def cells_of(columns: Columns, row: Mapping[str, Any]) -> list[str]:
    """What ``row`` shows in each column."""
    return [template.format_map(row) for _, template in columns]


def table(columns: Columns, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of a table in Markdown."""
    headings = " | ".join(heading.removeprefix(">") for heading, _ in columns)
    ruler = "|".join("--:" if heading.startswith(">") else "---" for heading, _ in columns)
    lines = [headings, *(" | ".join(cells_of(columns, row)) for row in rows)]
    head, *body = (re.sub(r"\|  (?=\|)", "| ", f"| {line} |") for line in lines)
    return [head, f"|{ruler}|", *body]


def in_turn(ways: Sequence[T], number: int) -> list[T]:
    """All of them, another one leading each time, so that a machine that slows down slows all."""
    first = number % len(ways)
    return [*ways[first:], *ways[:first]]


def spread(values: Sequence[float], digits: int = 3) -> list[float]:
    """The median, the least and the most."""
    return [round(float(value), digits) for value in (median(values), min(values), max(values))]


def spread_text(values: Sequence[float], digits: int = 2) -> str:
    """A `spread` as tables print it: ``1.23 (1.10 ... 1.34)``."""
    middle, least, most = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({least} ... {most})"


def bootstrap(values: Sequence[float], seed: int = 0) -> list[float]:
    """The interval that holds 95 % of the medians of samples drawn with replacement (Efron 1979)."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (_RESAMPLES, len(values)))
    return [round(float(bound), 4) for bound in np.percentile(np.median(drawn, axis=1), [2.5, 97.5])]
