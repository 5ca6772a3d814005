"""The common parts of all benchmark programs: options, alternation, statistics, a table, and one JSON line at the end.

A program names its options with their defaults, makes rows, and returns the exit status:

    run = Run("overhead", __doc__, argv, OPTIONS, COLUMNS, has_model=True)
    codec, model = run.load()
    for row in rows_of(model, run.args):
        run.row(row)
    return run.end(is_wrong=...)

`benchmarks.report` writes the table (COLUMNS) and the explanation below it (NOTE) into the documentation. With
``--out``, the result is written after every row, so that the rows of an interrupted run are not lost.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from benchmarks.child import ROOT
from benchmarks.models import add_model, device_name, load, model_name, settle

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ssd.model.target import Target
    from ssd.text.codec import TextCodec

T = TypeVar("T")

Columns = Sequence[tuple[str, str]]
"""The columns of a table: for each its heading (with the prefix ``>`` if it contains numbers) and a format string for
`str.format_map` that makes the cell from a row."""

ENGINE: Final = (
    "benchmarks/traces.py",
    "benchmarks/ways.py",
    "benchmarks/workloads.py",
    "ssd/jit",
    "ssd/config.py",
    "ssd/drafting",
    "ssd/engine",
    "ssd/model",
    "ssd/cost_model",
    "ssd/retrieval",
)
"""The paths that the figures of most benchmarks depend on. A figure may be stale if this code has changed."""
SPREAD: Final = "{%s[0]:.2f} ({%s[1]:.2f} ... {%s[2]:.2f})"
GAIN: Final = SPREAD.replace(" ", "x ", 1)
"""The table format of a speed-up: median (minimum ... maximum), with "x" after the median."""
_RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A command-line option of one program. Its name is the key in the program's ``OPTIONS``.

    Its type is that of the default. A list as default takes several values; False makes a flag without a value.

    Attributes:
        least: The smallest allowed number.
        kind: The type if ``default`` is None.
        several: Whether an option whose default is None takes any number of values.
        positional: Whether this is a list of positional arguments.
    """

    default: Any
    help: str = ""
    choices: Sequence[Any] | None = None
    least: float | None = None
    kind: Callable[[str], Any] = str
    several: bool = False
    positional: bool = False
    metavar: str | None = None


class Run:
    """One run of a benchmark program: its arguments ``args``, its rows so far, and further fields of the result."""

    def __init__(
        self,
        name: str,
        purpose: str | None,
        argv: Sequence[str] | None,
        options: Mapping[str, Any],
        columns: Columns = (),
        *,
        has_model: bool = False,
        has_shapes: bool = False,
        unsaid: Sequence[str] = (),
        program: str | None = None,
        under: Sequence[str] = ENGINE,
    ) -> None:
        """Parse the command line and print the headings of the table.

        Numbers below their minimum end the program with a usage error. The minimum is 1 by default, 0 for ``seed``.

        Args:
            name: The name of the result.
            purpose: The docstring of the program, shown by ``--help``.
            options: The options by name, each an `Option` or only its default.
            has_model: Whether to add the options for a model, its dtype and its device, unless ``options`` contains
                them.
            has_shapes: Whether to add ``--shape`` too, for models with random weights.
            unsaid: The options that the result does not list among its parameters.
            program: The module below `benchmarks`, if it differs from ``name``, and the arguments that select this
                benchmark.
            under: The paths that the figures depend on in addition to the program, see `benchmarks.report.staleness`.
        """
        module = f"benchmarks/{(program or name).split()[0].replace('.', '/')}"
        self.name, self.under = name, [module if (ROOT / module).is_dir() else f"{module}.py", *under]
        self.rows: list[dict[str, Any]] = []
        self._columns = columns
        self.parser = parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{program or name}",
            description=(purpose or "").split("\n")[0],
            epilog="\n".join((purpose or "").split("\n")[2:]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if has_model:
            add_model(parser, options if has_shapes else {"shape", *options})
        self.facts: dict[str, Any] = {}
        known = {key: each if isinstance(each, Option) else Option(default=each) for key, each in options.items()}
        for key, option in known.items():
            _add(parser, key, option)
        parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON result to this file")
        parser.add_argument("--json", action="store_true", help="print only the JSON result, no table")
        self.args = parser.parse_args(argv)
        for key, option in known.items():
            self._check(key, option)
        given = {key: getattr(self.args, key) for key in known if key not in unsaid}
        self.parameters = {key: value for key, value in given.items() if value is not None}
        model = f"{model_name(self.args)}, " if has_model else ""
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

    def load(self, *, speaks: bool = False) -> tuple[TextCodec, PreTrainedModel]:
        """Load the tokenizer and the model that the arguments name, and set the number of threads as the product does.

        The result records the model and the number of threads. ``speaks`` is passed to `models.random_model`.
        """
        codec, model = load(self.args, speaks=speaks)
        settle(model)
        self.ran_on(model)
        return codec, model

    def ran_on(self, model: Target | PreTrainedModel) -> None:
        """Record the model, its device, its dtype and the number of threads in the result."""
        import torch

        self.facts = {
            "model": model_name(self.args),
            "device": device_name(model.device),
            "dtype": str(model.dtype),
            "threads": torch.get_num_threads(),
        }

    def say(self, text: str) -> None:
        """Print a line, unless ``--json`` was given."""
        if not self.args.json:
            print(text, flush=True)

    def row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add a row to the result, print it, and write the result so far to the ``--out`` file."""
        self.rows.append(row)
        if self._columns:
            self.say(" | ".join(cells_of(self._columns, {**self.facts, **row})))
        self._write(json.dumps({**self._head(), "rows": self.rows, "is_cut": True}, default=str))
        return row

    def end(self, *, is_wrong: bool = False, **facts: Any) -> int:
        """Write and print the final result with ``facts`` as further fields; return the exit status, 1 if ``is_wrong``.

        `benchmarks.report` does not publish a result that is marked as wrong or as cut.
        """
        result = {**self._head(), "is_wrong": is_wrong, **facts, **({"rows": self.rows} if self.rows else {})}
        line = json.dumps(result, default=str)
        self._write(line)
        print(line)
        return int(is_wrong)

    def _head(self) -> dict[str, Any]:
        return {**head(self.name, self.under), "under": self.under, "parameters": self.parameters, **self.facts}

    def _write(self, text: str) -> None:
        if (out := self.args.out) is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            scratch = out.with_name(f"{out.name}.new")
            scratch.write_text(text + "\n")
            scratch.replace(out)


def _add(parser: argparse.ArgumentParser, key: str, option: Option) -> None:
    flag, default, text = f"--{key.replace('_', '-')}", option.default, option.help
    if default is False:
        parser.add_argument(flag, action="store_true", help=text)
        return
    if option.positional:
        parser.add_argument(key, nargs="*", metavar=key.upper().removesuffix("S"), help=text)
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
    """Return the text of each cell of a row; "-" if the row does not have the value."""

    def cell(template: str) -> str:
        try:
            return template.format_map(row)
        except (KeyError, TypeError):  # a number that was not taken is None, or not there
            return "-"

    return [cell(template) for _, template in columns]


def table(columns: Columns, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    headings = " | ".join(heading.removeprefix(">") for heading, _ in columns)
    ruler = "|".join("--:" if heading.startswith(">") else "---" for heading, _ in columns)
    lines = [headings, *(" | ".join(cells_of(columns, row)) for row in rows)]
    head, *body = (re.sub(r"\|  (?=\|)", "| ", f"| {line} |") for line in lines)
    return [head, f"|{ruler}|", *body]


def in_turn(ways: Sequence[T], number: int) -> list[T]:
    """Rotate the variants by ``number``: another variant is first each time, so that a slow phase affects all alike."""
    first = number % len(ways)
    return [*ways[first:], *ways[:first]]


def spread(values: Sequence[float], digits: int = 3) -> list[float]:
    """Return the median, the minimum and the maximum, rounded."""
    return [round(float(value), digits) for value in (median(values), min(values), max(values))]


def bootstrap(values: Sequence[float], seed: int = 0) -> list[float]:
    """Return the 95 % confidence interval of the median, by bootstrap resampling (Efron 1979)."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (_RESAMPLES, len(values)))
    return [round(float(bound), 4) for bound in np.percentile(np.median(drawn, axis=1), [2.5, 97.5])]


def head(benchmark: str, under: Sequence[str] = ()) -> dict[str, Any]:
    """Return the first fields of every result: the benchmark's name, the date and the environment."""
    return {"benchmark": benchmark, "date": datetime.date.today().isoformat(), "environment": describe(under)}


def describe(under: Sequence[str] = ()) -> dict[str, Any]:
    """Describe the machine, the package versions and the commit; "+" marks uncommitted changes below ``under``."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "numba", "numpy")},
        "commit": _commit(under),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _commit(under: Sequence[str]) -> str:
    said = git("rev-parse", "--short", "HEAD")
    return "unknown" if said is None else said + ("+" if git("status", "--porcelain", "--", *under) else "")


def git(*arguments: str) -> str | None:
    """Return the output of a git command in this checkout; None if git is missing or the command fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout.rstrip("\n")
