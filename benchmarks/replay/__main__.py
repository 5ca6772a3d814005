"""How many tokens does a verify step emit? Drafters replayed on recorded outputs, no model needed.

``python -m benchmarks.replay [TRACE...] --tokenizer DIR [--drafter NAME]... [--curve] [--tree] [--plot PNG]``

The recorded output is what the target says. Drafting starts at the end of the prompt; a step emits the accepted part
of the draft and one token more. After a row its tokens enter the index, which does its upkeep at once, so nothing is
seen ahead and the counts are the same every time. Other people's drafters run in the environment that ``make
bench-peers`` makes. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.child import ChildError
from benchmarks.replay.comparison import PLACES, compare_results
from benchmarks.replay.job import Plan, Result, run_all
from benchmarks.replay.plots import plot_curves
from benchmarks.replay.settings import CONTENDER_NAMES, MEASURED_PATH, OURS
from benchmarks.run import Columns, cells_of, head
from benchmarks.traces import all_traces, find_tokenizer, find_trace, trace_name
from cache_builder.evaluation.costs import CostCurve, flat, read_step_costs
from ssd.config import DraftConfig, IndexConfig
from ssd.errors import ConfigError

_FLAT_WIDTH = 32


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("traces", nargs="*", metavar="TRACE", help="a .jsonl.gz file, or a name in $SSD_TRACES (default: all in it)")
    add("--tokenizer", action="append", required=True, help="directory with tokenizer.json, or a name in "
        "$SSD_TOKENIZERS; may be repeated")  # fmt: skip
    add("--drafter", action="append", choices=CONTENDER_NAMES, help="may be repeated; default: ssd")
    add("--max-draft", type=int, default=16, metavar="K", help="draft limit in tokens; with --tree, in nodes")
    add("--tree", action="store_true", help="let drafters give trees")
    add("--curve", action="store_true", help="each drafter from its frugal settings to its generous ones")
    add("--price-by", action="append", choices=("flat", "measured"), default=[], help="also run ours with prices "
        "from this cost curve; may be repeated")  # fmt: skip
    add("--arctic-depth", type=int, default=64, metavar="D", help="depth of arctic's trees (default 64, vLLM has 24)")
    add("--max-output-tokens", type=int, metavar="N", help="of each trace; stop before the row that would exceed it")
    add("--cache-tokens", type=int, metavar="N", help="capacity of the index")
    add("--jobs", type=int, default=1, metavar="N", help="processes, each with one trace and tokenizer at a time")
    add("--plot", type=Path, metavar="PNG", help="draw the curves")
    add("--json", action="store_true", help="print the JSON line alone, no table")
    return parser.parse_args(arguments)


def _plan(options: argparse.Namespace) -> Plan:
    """Raises ConfigError."""
    for name, least, most in (
        ("max_draft", 1, 128),
        ("arctic_depth", 2, 1 << 16),
        ("max_output_tokens", 1, 1 << 62),
        ("jobs", 1, 1 << 10),
    ):
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} must be within {least:,}..{most:,}, got {value}")
    curves: dict[str, CostCurve] = {"flat": flat(_FLAT_WIDTH), "measured": read_step_costs(MEASURED_PATH).curve}
    return Plan(
        drafters=list(dict.fromkeys(options.drafter or [OURS])),
        draft=DraftConfig(num_speculative_tokens=options.max_draft),
        index=IndexConfig() if options.cache_tokens is None else IndexConfig(capacity_tokens=options.cache_tokens),
        costs=list(curves.values()),
        priced_by=[curves[name] for name in dict.fromkeys(options.price_by)],
        curve=options.curve,
        tree=options.tree,
        arctic_depth=options.arctic_depth,
        max_output_tokens=options.max_output_tokens,
    )


def _parameters(plan: Plan, traces: Sequence[Path], tokenizers: Sequence[Path]) -> dict[str, Any]:
    """The plan as it stands in the JSON; names in place of paths."""
    return {
        "traces": [trace_name(path) for path in traces],
        "tokenizers": [path.parent.name for path in tokenizers],
        "drafters": list(plan.drafters),
        "draft": asdict(plan.draft),
        "index": asdict(plan.index),
        "priced_by": [curve.name for curve in plan.priced_by],
        **{name: getattr(plan, name) for name in ("curve", "tree", "arctic_depth", "max_output_tokens")},
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = _parse(arguments)
    try:
        plan = _plan(options)
        if "sglang" in plan.drafters and not plan.tree:
            raise ConfigError("--drafter sglang drafts trees and nothing else; add --tree")
        traces = [find_trace(name) for name in options.traces or all_traces()]
        tokenizers = [find_tokenizer(name) for name in options.tokenizer]
        if options.plot is not None and not options.plot.parent.is_dir():
            raise ConfigError(f"--plot {options.plot}: there is no such directory; make it first")
        result = _run(plan, traces, tokenizers, options.jobs, quiet=options.json)
        if options.plot is not None:
            plot_curves(result["results"], options.plot)
    except (ConfigError, ChildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


def _run(
    plan: Plan, traces: Sequence[Path], tokenizers: Sequence[Path], num_jobs: int, *, quiet: bool
) -> dict[str, Any]:
    parameters = _parameters(plan, traces, tokenizers)
    columns = _columns(plan.costs)
    if not quiet:
        print(f"replay: {json.dumps(parameters)}")
        print(" | ".join(heading for heading, _ in columns), flush=True)
    results = []
    for some in run_all(plan, traces, tokenizers, num_jobs):
        results += some
        if not quiet:
            print(*(_line(columns, result) for result in some), sep="\n", flush=True)
    comparison = compare_results(results, OURS) if plan.curve else None
    if comparison and not quiet:
        print(*_comparison_lines(comparison), sep="\n")
    return {
        **head("replay"),
        "parameters": parameters,
        "results": results,
        "comparison": comparison,
    }


def _columns(costs: Sequence[CostCurve]) -> Columns:
    """Of the table of results."""
    return (
        *((name, f"{{{name}}}") for name in ("trace", "tokenizer", "drafter", "setting")),
        ("output", "{output_tokens}"),
        ("tokens/step", "{mean_acceptance_length:.3f}"),
        ("of oracle", "{shown_of_oracle}"),
        ("drafted/step", "{drafted_per_step:.2f}"),
        ("accepted", "{acceptance_rate:.3f}"),
        *((f"x {cost.name}", f"{{speed_up[{cost.name}]:.2f}}") for cost in costs),
        ("ECE", "{shown_error}"),
        ("us p50", "{propose_us_p50}"),
    )


def _line(columns: Columns, result: Result) -> str:
    error = (result["calibration"] or {}).get("error")
    shown = {f"shown_{name}": "-" if value is None else f"{value:.3f}"
             for name, value in (("of_oracle", result["of_oracle"]), ("error", error))}  # fmt: skip
    return " | ".join(cells_of(columns, {**result, **shown}))


def _comparison_lines(comparison: dict[str, Any]) -> Iterator[str]:
    """Ours against each other drafter: ratios of accepted tokens a step, and where."""
    for drafter, found in comparison.items():
        places = ", ".join(f"{place:.0%}" for place in PLACES)
        yield f"\naccepted per step, ours / {drafter} @ drafted per step, at {places} of the overlap of both curves"
        for row in found["rows"]:
            pairs = zip(row["ratios"] or (), row["drafted"] or (), strict=True)
            cells = [f"{ratio:.3f} @ {drafted:.2f}" for ratio, drafted in pairs] or ["no overlap"]
            yield " | ".join([row["trace"], row["tokenizer"], *cells])
        if means := found["geometric_means"]:
            yield " | ".join(["geometric mean", *(f"{mean:.3f}" for mean in means)])


if __name__ == "__main__":
    sys.exit(main())
