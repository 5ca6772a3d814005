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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.environment import head
from benchmarks.peers import PeerError
from benchmarks.replay import table
from benchmarks.replay.comparison import compare_results
from benchmarks.replay.job import Plan, run_all
from benchmarks.replay.plots import plot_curves, plot_reliability
from benchmarks.replay.settings import CONTENDER_NAMES, MEASURED_PATH, OURS
from benchmarks.traces import all_traces, find_tokenizer, find_trace, trace_name
from cache_builder.evaluation.costs import CostCurve, flat, read_curve
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
    add("--shuffle", type=int, metavar="SEED", help="the sessions in another order")
    add("--warm", type=float, default=0.0, metavar="FRACTION", help="learn the first sessions without scoring them")
    add("--shift", metavar="TRACE", help="learn this trace first, without scoring it")
    add("--adversarial", action="store_true", help="learn the trace; score earlier outputs that come back changed")
    add("--seed", type=int, default=0, help="of --adversarial")
    add("--jobs", type=int, default=1, metavar="N", help="processes, each with one trace and tokenizer at a time")
    add("--plot", type=Path, metavar="PNG", help="draw the curves, and the reliability of estimates beside them as "
        "PNG's name with -reliability")  # fmt: skip
    add("--json", action="store_true", help="print the JSON line alone, no table")
    return parser.parse_args(arguments)


def _plan(options: argparse.Namespace) -> Plan:
    """Raises ConfigError."""
    for name, least, most in (
        ("max_draft", 1, 128),
        ("arctic_depth", 2, 1 << 16),
        ("max_output_tokens", 1, 1 << 62),
        ("shuffle", 0, 1 << 62),
        ("warm", 0.0, 1.0),
        ("seed", 0, 1 << 62),
        ("jobs", 1, 1 << 10),
    ):
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} must be within {least:,}..{most:,}, got {value}")
    curves: dict[str, CostCurve] = {"flat": flat(_FLAT_WIDTH), "measured": read_curve(MEASURED_PATH)}
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
        shuffle=options.shuffle,
        warm=options.warm,
        shift=None if options.shift is None else find_trace(options.shift),
        adversarial=options.adversarial,
        seed=options.seed,
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
        **{
            name: getattr(plan, name)
            for name in ("curve", "tree", "arctic_depth", "max_output_tokens", "shuffle", "warm", "adversarial", "seed")
        },
        "shift": None if plan.shift is None else trace_name(plan.shift),
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
            plot_reliability(result["results"], options.plot.with_stem(f"{options.plot.stem}-reliability"))
    except (ConfigError, PeerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


def _run(
    plan: Plan, traces: Sequence[Path], tokenizers: Sequence[Path], num_jobs: int, *, quiet: bool
) -> dict[str, Any]:
    parameters = _parameters(plan, traces, tokenizers)
    if not quiet:
        print(f"replay: {json.dumps(parameters)}")
        print(table.head([cost.name for cost in plan.costs]), flush=True)
    results = []
    for some in run_all(plan, traces, tokenizers, num_jobs):
        results += some
        if not quiet:
            print(*map(table.line, some), sep="\n", flush=True)
    comparison = compare_results(results, OURS) if plan.curve else None
    if comparison and not quiet:
        print(*table.comparison_lines(comparison), sep="\n")
    return {
        **head("replay"),
        "parameters": parameters,
        "results": results,
        "comparison": comparison,
    }
