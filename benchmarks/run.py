"""What every program here has: arguments, ways in turn, medians with their spread, a table, one JSON line at the end.

A program names its options with their defaults, makes rows, and says what came of them:

    run = Run("overhead", __doc__, argv, OPTIONS, COLUMNS, has_model=True)
    codec, model = run.load()
    for row in rows_of(model, run.args):
        run.row(row)
    return run.end(is_wrong=...)

Its COLUMNS, and a NOTE of what was measured on what, are what `benchmarks.report` writes into the pages.
With ``--out`` the result is written after every row: what a run that is cut had found stands.
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
"""Of each column its heading, behind `>` where it has numbers, and how a row is written there by `str.format_map`."""

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
"""What lies under most figures: they may be others once it has changed."""
SPREAD: Final = "{%s[0]:.2f} ({%s[1]:.2f} ... {%s[2]:.2f})"
GAIN: Final = SPREAD.replace(" ", "x ", 1)
"""The same of a ratio that is better above 1."""
_RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One argument beside those that all programs have. Its name and its type are its key's and its default's.

    A list takes several values, False is a switch. ``least`` : of numbers; ``kind`` : where the default is None, which
    with ``several`` takes any number of values. ``positional`` : a list of words behind all options.
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
        has_shapes: bool = False,
        unsaid: Sequence[str] = (),
        program: str | None = None,
        under: Sequence[str] = ENGINE,
    ) -> None:
        """``options`` : defaults by name, or an `Option`. ``unsaid`` : those that are no parameters of the result.
        ``program`` : its module below `benchmarks`, where that is not ``name``, and the arguments that choose it.
        ``has_model`` : it takes a model, its
        type of numbers and a device, all but those that ``options`` have; ``has_shapes`` : or random weights.

        ``under`` : paths of the checkout whose changes make the figures old, as the program's own do: see
        `benchmarks.report`.

        A number that is below its least ends the program, as argparse does. Numbers are from 1 where nothing is said,
        ``seed`` from 0.
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
        parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON line to this file")
        parser.add_argument("--json", action="store_true", help="no table, the JSON line alone")
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
        """What was asked for, on as many threads as the product would use, and it stands in the result.

        ``speaks`` : see `models.random_model`.
        """
        codec, model = load(self.args, speaks=speaks)
        settle(model)
        self.ran_on(model)
        return codec, model

    def ran_on(self, model: Target | PreTrainedModel) -> None:
        """The result says what ran and on what device."""
        import torch

        self.facts = {
            "model": model_name(self.args),
            "device": device_name(model.device),
            "dtype": str(model.dtype),
            "threads": torch.get_num_threads(),
        }

    def say(self, text: str) -> None:
        """Print it, unless the JSON line alone is wanted."""
        if not self.args.json:
            print(text, flush=True)

    def row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row of the result and print it."""
        self.rows.append(row)
        if self._columns:
            self.say(" | ".join(cells_of(self._columns, {**self.facts, **row})))
        self._write(json.dumps({**self._head(), "rows": self.rows, "is_cut": True}, default=str))
        return row

    def end(self, *, is_wrong: bool = False, **facts: Any) -> int:
        """Write and print the result: ``facts`` behind head and parameters, then the rows. Returns the exit status.

        ``is_wrong`` stands in the result: `benchmarks.report` shows none that was wrong, nor one that was cut.
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
    """What ``row`` shows in each column, "-" where it has no such value."""

    def cell(template: str) -> str:
        try:
            return template.format_map(row)
        except (KeyError, TypeError):  # a number that was not taken is None, or not there
            return "-"

    return [cell(template) for _, template in columns]


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


def bootstrap(values: Sequence[float], seed: int = 0) -> list[float]:
    """The interval that holds 95 % of the medians of samples drawn with replacement (Efron 1979)."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (_RESAMPLES, len(values)))
    return [round(float(bound), 4) for bound in np.percentile(np.median(drawn, axis=1), [2.5, 97.5])]


def head(benchmark: str, under: Sequence[str] = ()) -> dict[str, Any]:
    """The first keys of every result: what was run, when and where."""
    return {"benchmark": benchmark, "date": datetime.date.today().isoformat(), "environment": describe(under)}


def describe(under: Sequence[str] = ()) -> dict[str, Any]:
    """Machine, versions and commit, with a + where files ``under`` which figures stand are not as it has them; no host
    name."""
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
    """What it says of this checkout, without its last newline; None where there is none, or it refuses."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout.rstrip("\n")
