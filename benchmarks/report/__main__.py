"""Splice measured figures into README.md, SECURITY.md and docs/: ``python -m benchmarks.report``.

Reads the results in ``benchmarks/results`` and rewrites what stands between the markers ``<!-- growth:begin -->`` ...
``<!-- growth:end -->`` (and so on). No figure in their tables is typed by hand, but for the runs that chose constants
(``benchmarks/report/choices.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.results import read_results
from benchmarks.report.api import api_section
from benchmarks.report.building import building_section
from benchmarks.report.clients import clients_section
from benchmarks.report.constants import constants_section
from benchmarks.report.coupled import coupled_section, window_section
from benchmarks.report.engine import engine_section, start_section, vllm_section
from benchmarks.report.evaluate import evaluate_section
from benchmarks.report.exact import changes_section, exact_section
from benchmarks.report.faults import faults_section, fleet_section
from benchmarks.report.fleet import latency_section, limits_section, shares_section
from benchmarks.report.gains import gains_section
from benchmarks.report.gpu import gpu_section
from benchmarks.report.growth import growth_figure, growth_section, growth_table
from benchmarks.report.host import host_section, mixed_section
from benchmarks.report.hybrid import hybrid_section
from benchmarks.report.index import index_section, stored_tokens
from benchmarks.report.joining import joining_section
from benchmarks.report.plan import plan_section
from benchmarks.report.profile import profile_section
from benchmarks.report.reference import flags_section
from benchmarks.report.replay import curve_section, others_section, replay_section
from benchmarks.report.rollouts import rollouts_section
from benchmarks.report.service import connections_section, http_section, side_channels_section, soak_section
from benchmarks.report.sources import sources_section

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
API, BENCHMARKS, CLIENTS, COUPLED, ENGINES, EXACT, GPU, JOINING, ROLLOUTS, SCALING, SERVING, TUNING = (
    f"docs/{name}.md"
    for name in (
        "api",
        "benchmarks",
        "clients",
        "coupled-sampling",
        "engines",
        "exact",
        "gpu",
        "joining",
        "rollouts",
        "scaling",
        "serving",
        "tuning",
    )
)


def main() -> None:
    """Rewrite the figures; what has no result stays as it is."""
    for name, text in pages().items():
        (ROOT / name).write_text(text)


def pages() -> dict[str, str]:
    """The text that every page with figures should have, by its path below the root."""
    texts = {
        name: (ROOT / name).read_text()
        for name in (
            "README.md",
            "SECURITY.md",
            API,
            BENCHMARKS,
            CLIENTS,
            COUPLED,
            ENGINES,
            EXACT,
            GPU,
            JOINING,
            ROLLOUTS,
            SCALING,
            SERVING,
            TUNING,
        )
    }

    def put(page: str, name: str, section: str) -> None:
        texts[page] = spliced(texts[page], name, section)

    growth, overhead, vllm, curve = (_result(name) for name in ("growth", "overhead", "vllm", "replay-curve"))
    if growth is not None:
        put(BENCHMARKS, "growth", growth_section(growth))
    coupled, others = _result("coupled"), _results("replay-others", "replay-others-tree")
    if growth and coupled and overhead and vllm and curve:
        put("README.md", "gains", gains_section(growth, coupled, overhead, vllm, curve, others))
    if (decode := _result("decode")) is not None:
        put(BENCHMARKS, "engine", engine_section(decode, overhead))
    if exact := _results("exact", "exact-gemma"):
        put(EXACT, "exact", exact_section(exact))
    if (changed := _result("vllm-changes")) is not None:
        put(EXACT, "vllm-changes", changes_section(changed))
    if (profile := _result("profile")) is not None:
        put(BENCHMARKS, "profile", profile_section(profile))
    if checked := read_results(RESULTS):
        put(GPU, "gpu", gpu_section(checked))
    if (host := _result("host")) is not None:
        put(BENCHMARKS, "host", host_section(host))
    if (mixed := _result("mixed")) is not None:
        put(BENCHMARKS, "mixed", mixed_section(mixed))
    if sources := _results("sources", "sources-gemma"):
        put(BENCHMARKS, "sources", sources_section(sources))
    for name, section in (("coupled", coupled_section), ("coupled-window", window_section)):
        if found := _results(name, f"{name}-gemma"):
            put(COUPLED, name, section(found))
    if parts := list(_real_model()):
        put(BENCHMARKS, "real-model", "\n\n".join(parts))
    if vllm is not None:
        put(ENGINES, "vllm", vllm_section(vllm))
    if (replay := _result("replay")) is not None:
        curves = curve_section(curve, _result("replay-tree")) if curve is not None else ""
        put(BENCHMARKS, "replay", "\n".join([replay_section(replay), "", curves]))
    if len(others) == 2:
        put(BENCHMARKS, "others", others_section(*others))
    if evaluated := _results("evaluate", "evaluate-gemma"):
        put(BENCHMARKS, "evaluate", evaluate_section(evaluated))
    if (hybrid := _result("hybrid")) is not None:
        put(BENCHMARKS, "hybrid", hybrid_section(hybrid))
    if (clients := _result("clients")) is not None:
        put(CLIENTS, "clients", clients_section(clients))
    runs = [json.loads(path.read_text()) for path in RESULTS.glob("index-*.json")]
    if runs:
        put(BENCHMARKS, "index", index_section(sorted(runs, key=stored_tokens)))
    if (start := _result("start")) is not None:
        put(BENCHMARKS, "start", start_section(start))
    if (faults := _result("faults")) is not None:
        put("SECURITY.md", "faults", faults_section(faults))
    if (fleet_faults := _result("fleet-faults")) is not None:
        put("SECURITY.md", "fleet-faults", fleet_section(fleet_faults))
    if (side_channels := _result("side-channels")) is not None:
        put("SECURITY.md", "side-channels", side_channels_section(side_channels))
    if (connections := _result("connections")) is not None:
        put(SERVING, "connections", connections_section(connections))
    if (http := _result("http")) is not None:
        put(BENCHMARKS, "http", http_section(http))
    if (soak := _result("soak")) is not None:
        put(BENCHMARKS, "soak", soak_section(soak))
    if (building := _result("building")) is not None:
        put(BENCHMARKS, "building", building_section(building))
    if (joining := _result("joining")) is not None:
        put(JOINING, "joining", joining_section(joining))
    if rollouts := [run for name in ("rollouts", "rollouts-fast") if (run := _result(name)) is not None]:
        put(ROLLOUTS, "rollouts", rollouts_section(rollouts))
    if (fleet := _result("fleet")) is not None:
        put(SCALING, "fleet", shares_section(fleet))
        put(SCALING, "fleet-limits", limits_section(fleet))
    if (shared := _result("sharing-latency")) is not None:
        put(SCALING, "sharing-latency", latency_section(shared))
    if (largest := _result("index-256m")) is not None:
        put(SCALING, "plan", plan_section(largest, _result("building")))
    put(SERVING, "flags", flags_section())
    put(API, "api", api_section())
    put(TUNING, "constants", constants_section(ROOT))
    return texts


def _real_model() -> Iterator[str]:
    """What was measured on the real model."""
    if (growth := _result("growth-gemma")) is not None:
        yield f"{growth_figure('growth-gemma')}\n\n{growth_table(growth)}"
    overhead = _result("overhead-gemma")
    if (decode := _result("decode-gemma")) is not None:
        yield engine_section(decode, overhead)


def _results(*names: str) -> list[dict[str, Any]]:
    """Those that there are."""
    return [found for name in names if (found := _result(name)) is not None]


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
