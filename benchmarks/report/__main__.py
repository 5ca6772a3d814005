"""Splice measured figures into README.md, SECURITY.md and docs/: ``python -m benchmarks.report``.

Reads the results in ``benchmarks/results`` and rewrites what stands between the markers ``<!-- growth:begin -->`` ...
``<!-- growth:end -->`` (and so on). No figure in their tables is typed by hand, but for the runs that chose constants
(``benchmarks/report/choices.py``). Figures under which code has changed since their commit are named; with ``--strict``
nothing is written while there is one, and the status is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_check.__main__ import read_results
from benchmarks.report import engine, replay, service
from benchmarks.report.code import api_section, constants_section, flags_section
from benchmarks.report.figures import old_figures

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"

_SECTIONS: Final[Mapping[str, Mapping[str, tuple[Callable[..., str], str]]]] = {
    "README.md": {"gains": (replay.gains_section, "growth coupled overhead vllm replay-curve *others")},
    "SECURITY.md": {
        "faults": (service.faults_section, "faults"),
        "fleet-faults": (service.fleet_faults_section, "fleet-faults"),
    },
    "docs/benchmarks.md": {
        "growth": (engine.growth_section, "growth"),
        "engine": (engine.engine_section, "decode overhead?"),
        "sources": (engine.sources_section, "*sources"),
        "replay": (replay.curve_section, "replay-curve replay-tree?"),
        "others": (replay.others_section, "replay-others replay-others-tree"),
        "evaluate": (engine.evaluate_section, "*evaluate"),
        "http": (service.http_section, "http"),
        "soak": (service.soak_section, "soak"),
        "index": (service.index_section, "*index"),
        "real-model": (engine.real_model_section, "growth-gemma decode-gemma? overhead-gemma?"),
    },
    "docs/clients.md": {"clients": (service.clients_section, "clients")},
    "docs/coupled-sampling.md": {
        "coupled": (engine.coupled_section, "*coupled"),
    },
    "docs/engines.md": {
        "vllm": (engine.vllm_section, "vllm"),
        "vllm-runners": (engine.vllm_runners_section, "vllm-runners"),
    },
    "docs/exact.md": {
        "exact": (engine.exact_section, "*exact"),
        "vllm-changes": (engine.changes_section, "vllm-changes"),
    },
}
"""By page and marker: what writes the section, and the results it is given. ``name?`` may be missing, ``*name`` is a
list, of several models or sizes."""

_SEVERAL: Final = {
    "others": ("replay-others", "replay-others-tree"),
    "index": ("index-1m", "index-16m", "index-256m"),
    **{name: (name, f"{name}-gemma") for name in ("sources", "evaluate", "coupled", "exact")},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the figures; what has no result stays as it is. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--strict", action="store_true", help="refuse figures that are older than the code under them")
    strict = parser.parse_args(argv).strict
    old = list(old_figures(RESULTS, published()))
    print(*old, sep="\n", file=sys.stderr)
    if strict and old:
        return 1
    for name, text in pages().items():
        (ROOT / name).write_text(text)
    return 0


def published() -> list[str]:
    """Names of the results that pages show."""
    words = [word for sections in _SECTIONS.values() for _, names in sections.values() for word in names.split()]
    given = [_SEVERAL[word[1:]] if word.startswith("*") else (word.removesuffix("?"),) for word in words]
    return list(dict.fromkeys(name for names in given for name in names))


def pages() -> dict[str, str]:
    """The text that every page with figures should have, by its path below the root."""
    of_code = {
        ("docs/serving.md", "flags"): flags_section(),
        ("docs/api.md", "api"): api_section(),
        ("docs/tuning.md", "constants"): constants_section(),
    }
    if checked := read_results(RESULTS):
        of_code["docs/gpu.md", "gpu"] = engine.gpu_section(checked)
    texts = {page: (ROOT / page).read_text() for page in (*_SECTIONS, *(page for page, _ in of_code))}
    for page, sections in _SECTIONS.items():
        for marker, (section, names) in sections.items():
            if (given := _given(names)) is not None:
                texts[page] = spliced(texts[page], marker, section(*given))
    for (page, marker), text in of_code.items():
        texts[page] = spliced(texts[page], marker, text)
    return texts


def _given(names: str) -> list[Any] | None:
    """The results that a section is given, None where one that it needs is missing."""
    given: list[Any] = []
    for name in names.split():
        if name.startswith("*"):
            given.append([found for each in _SEVERAL[name[1:]] if (found := _result(each)) is not None])
        else:
            given.append(_result(name.removesuffix("?")))
        if not given[-1] and not name.endswith("?"):
            return None
    return given


def _result(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def spliced(text: str, name: str, section: str) -> str:
    """``text`` with the part between the markers of ``name`` replaced."""
    pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"there are no markers for {name!r}")
    return pattern.sub(lambda match: f"{match[1]}{section.strip()}\n{match[2]}", text)


if __name__ == "__main__":
    sys.exit(main())
