"""Splice measured figures into README.md and SECURITY.md: ``python -m benchmarks.report``.

Reads the results in ``benchmarks/results`` and rewrites what stands between the markers ``<!-- growth:begin -->`` ...
``<!-- growth:end -->`` (and so on). No figure in their tables is typed by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.report.engine import engine_section, vllm_section
from benchmarks.report.faults import faults_section
from benchmarks.report.growth import growth_section
from benchmarks.report.index import index_section, stored_tokens
from benchmarks.report.replay import curve_section, replay_section

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    """Rewrite the figures; what has no result stays as it is."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    if (growth := _result("growth")) is not None:
        text = spliced(text, "growth", growth_section(growth))
    if (decode := _result("decode")) is not None:
        text = spliced(text, "engine", engine_section(decode, _result("overhead")))
    if (vllm := _result("vllm")) is not None:
        text = spliced(text, "vllm", vllm_section(vllm))
    if (replay := _result("replay")) is not None:
        path = _result("replay-curve")
        curves = curve_section(path, _result("replay-tree")) if path is not None else ""
        text = spliced(text, "replay", "\n".join([replay_section(replay), "", curves]))
    runs = [json.loads(path.read_text()) for path in RESULTS.glob("index-*.json")]
    if runs:
        text = spliced(text, "index", index_section(sorted(runs, key=stored_tokens)))
    readme.write_text(text)
    if (faults := _result("faults")) is not None:
        security = ROOT / "SECURITY.md"
        security.write_text(spliced(security.read_text(), "faults", faults_section(faults)))


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
    main()
