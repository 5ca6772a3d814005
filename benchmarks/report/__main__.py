"""Write the measured figures into the documentation: ``python -m benchmarks.report``.

Reads the results in ``benchmarks/results`` and replaces the text between markers such as ``<!-- growth:begin -->`` and
``<!-- growth:end -->`` with a table of the program's columns and with its note. No figure in these tables is typed by
hand, except in ``benchmarks/report/choices.py``, which quotes the runs that chose defaults.

Figures are stale if they depend on code whose behaviour has changed since the measurement
(``benchmarks/report/staleness.py``). They are listed on stderr. With ``--strict``, a stale figure prevents writing, and
the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

from benchmarks import gpu_check
from benchmarks.child import ROOT
from benchmarks.report import replay
from benchmarks.report.code import api_section, constants_section, flags_section
from benchmarks.report.staleness import stale_figures
from benchmarks.run import cells_of, table

RESULTS = ROOT / "benchmarks" / "results"

Result = Mapping[str, Any]

SECTIONS: Final = {
    "docs/operations/security.md": {
        "faults": ("reliability.faults", "faults"),
        "fleet-faults": ("reliability.faults", "fleet-faults"),
    },
    "docs/benchmarks.md": {
        "learning": ("learning", "learning"),
        "growth": ("growth", "growth growth-gemma"),
        "engine": ("decode", "decode decode-gemma"),
        "engines": ("engines", "engines-gemma"),
        "limits": ("limits", "limits limits-gemma"),
        "overhead": ("contenders", "overhead overhead-gemma"),
        "sources": ("contenders", "sources sources-gemma"),
        "mechanisms": ("contenders", "mechanisms"),
        "evaluate": ("evaluate", "evaluate evaluate-gemma"),
        "http": ("http", "http"),
        "soak": ("reliability.soak", "soak"),
        "index": ("index", "index-1m index-16m index-256m"),
    },
    "docs/guides/clients.md": {"clients": ("clients", "clients")},
    "docs/concepts/coupled-sampling.md": {"coupled": ("coupled", "coupled coupled-gemma")},
    "docs/guides/vllm.md": {
        "vllm-memory": ("vllm.memory", "vllm-memory"),
        "vllm-memory-v2": ("vllm.memory", "vllm-memory-v2"),
        "vllm": ("vllm", "vllm"),
        "vllm-runners": ("vllm", "vllm-runners"),
    },
    "docs/concepts/bit-identical.md": {
        "exact": ("exact", "exact exact-gemma"),
        "vllm-changes": ("vllm.changes", "vllm-changes"),
    },
}
"""The tables by page and marker: the program whose columns are shown, and the names of its results. Missing results are
left out."""

_REPLAYS: Final[Mapping[tuple[str, str], tuple[Callable[..., str], str]]] = {
    ("docs/benchmarks.md", "replay"): (replay.curve_section, "replay-curve replay-tree"),
    ("docs/benchmarks.md", "others"): (replay.others_section, "replay-others replay-others-tree"),
    ("docs/benchmarks.md", "gpu"): (gpu_check.section, "gpu_check"),
}
"""The tables that are computed from many rows: the function that writes the section, and the results that it needs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite all pages, and return the exit status. A section without a result stays as it is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--strict", action="store_true", help="write nothing if a figure is stale")
    strict = parser.parse_args(argv).strict
    words = [names for sections in SECTIONS.values() for _, names in sections.values()]
    words += [names for _, names in _REPLAYS.values()]
    stale = list(stale_figures(RESULTS, dict.fromkeys(" ".join(words).split())))
    print(*stale, sep="\n", file=sys.stderr)
    if strict and stale:
        return 1
    for name, text in pages().items():
        (ROOT / name).write_text(text)
    return 0


def pages() -> dict[str, str]:
    """Return the new text of every page with figures, by the path of the page."""
    found = {
        ("docs/reference/options.md", "flags"): flags_section(),
        ("docs/reference/api.md", "api"): api_section(),
        ("docs/reference/defaults.md", "constants"): constants_section(),
    }
    for page, sections in SECTIONS.items():
        for marker, (program, names) in sections.items():
            if given := list(_results(names)):
                found |= _written((page, marker), names, partial(section, import_module(_module(program)), given))
    for place, (write, names) in _REPLAYS.items():
        if len(results := list(_results(names))) == len(names.split()):
            found |= _written(place, names, partial(write, *results))
    texts = {page: (ROOT / page).read_text() for page, _ in found}
    for (page, marker), text in found.items():
        texts[page] = spliced(texts[page], marker, text)
    return texts


def _written(place: tuple[str, str], names: str, write: Callable[[], str]) -> dict[tuple[str, str], str]:
    """Return the text of one section; empty if the result lacks a field, which leaves the section as it is."""
    try:
        return {place: write()}
    except (KeyError, TypeError) as error:
        print(f"{place[0]} {place[1]}: one of {names} lacks {error}: measure it again", file=sys.stderr)
        return {}


def _module(program: str) -> str:
    name = f"benchmarks.{program}"
    return f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name


def _results(names: str) -> Iterator[dict[str, Any]]:
    for name in names.split():
        path = RESULTS / f"{name}.json"
        if path.exists():
            # A GPU's parts may lie in several files.
            result = gpu_check.read_results(RESULTS) if name == "gpu_check" else json.loads(path.read_text())
            if why := " and ".join(word for word in ("is_cut", "is_wrong") if result.get(word)):
                raise SystemExit(f"{name} {why}: no figure comes of that; run it again, or bring back what was before")
            yield result


def section(program: Any, results: Sequence[Result]) -> str:
    """Return a table of the rows of all results with the columns of their program, and the program's note.

    A program may declare ``is_shown``, a filter of rows; ``shown_rows``, a function that returns the rows of a result;
    ``WORDS``, the texts to show instead of stored values; ``EACH``, a sentence for each result; and ``RUN``, a remark
    after the date. A result without rows counts as one row.
    """
    is_shown = getattr(program, "is_shown", lambda row: True)
    shown_rows = getattr(program, "shown_rows", lambda result: result.get("rows", [result]))
    words: Mapping[str, Mapping[Any, str]] = getattr(program, "WORDS", {})
    rows = [
        {
            "model": result.get("model", "bundled model"),
            **row,
            **{field: names.get(row[field], row[field]) for field, names in words.items() if field in row},
        }
        for result in results
        for row in shown_rows(result)
        if is_shown(row)
    ]
    # Not what all rows have alike, unless it is that nothing went wrong, nor a figure that none has.
    said = {each: {cells_of([each], row)[0] for row in rows} for each in program.COLUMNS}
    columns = [each for each, cells in said.items() if len(cells) > 1 or cells == {"0"}]
    measured = _measured(results, getattr(program, "RUN", ""))
    each = " ".join(getattr(program, "EACH", "").format_map(result) for result in results).strip()
    note = " ".join(filter(None, (each, program.NOTE.format_map({**results[0], "measured": measured}))))
    return "\n".join([*table(columns, rows), "", note]) if columns else note


def _measured(results: Sequence[Result], run: str) -> str:
    """Describe as text on which machines and dates the results were measured, with models and settings."""
    on: dict[str, dict[str, None]] = {}
    for each in results:
        said = " ".join(filter(None, (each.get("model"), f"on {each['date']}", run and f"({run.format_map(each)})")))
        colon = ":" if "model" in each else ""
        on.setdefault(f"{each['environment']['cpu']} with {each['environment']['cores']} cores{colon}", {})[said] = None
    return "; ".join(f"{machine} {', '.join(those)}" for machine, those in on.items())


def spliced(text: str, name: str, section: str) -> str:
    """Return ``text`` with the part between the markers of ``name`` replaced."""
    pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"there are no markers for {name!r}")
    return pattern.sub(lambda match: f"{match[1]}{section.strip()}\n{match[2]}", text)


if __name__ == "__main__":
    sys.exit(main())
