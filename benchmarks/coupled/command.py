"""What does noise that requests share bring, where they ask the same, nearly the same, more and more, or nothing twice?

``python -m benchmarks.coupled [--model DIR] [--streams S...] [--temperatures T...] [--quick] [--out FILE]``
``python -m benchmarks.coupled --windows K...``

Three engines answer the same questions one after the other: without speculation, with it and coupled noise, with it
and a seed for every request as before. Nothing twice: prompts that are all new, on empty caches. Asked again: every
prompt was answered once of every stream, then comes again with a stream that is drawn. Near-variants: the same prompts
with a word or a number changed or a sentence added. Growth: the mixed stream of ``benchmarks.growth``, its first and
its last fifth. Every timed output is compared with speculation off of the same noise. Ratios
are of tokens/s within a group of requests, prompts included: medians over groups, with the least and the most; beside
them ratios by CPU time, which other programs on the machine change less.

With ``--windows`` it asks instead how many tokens the noise should depend on: prompts and their near-variants are
answered with each window, and the answers compared with each other; pairs whose noise is their own are window 0.
Prints tables; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.coupled.contenders import COUPLED, OFF, UNCOUPLED, Comparison, Contenders, Opened, Sampling
from benchmarks.coupled.marks import marks_of
from benchmarks.coupled.windows import MEASURES, NOT_COUPLED, Pairs, measure
from benchmarks.coupled.workloads import Plan, Row, Workloads
from benchmarks.environment import head, model_facts, model_name
from benchmarks.models import add_model
from benchmarks.sources.rounds import spread_text
from ssd.config import DraftConfig, EngineConfig

_PAIR_STREAMS = 2
"""Of which every pair is asked, to have more of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differs."""
    args = _parse(argv)
    parameters = {
        name: value for name, value in vars(args).items() if name not in ("model", "quick", "out", "json", "windows")
    }
    name = "coupled-window" if args.windows else "coupled"
    print(f"{name}: {model_name(args.model)}, {json.dumps(parameters)}", flush=True)
    opened = Opened.open(
        args.model,
        max_length=args.prompt_tokens + args.max_tokens + 8,
        limit=args.num_speculative_tokens,
        dtype=args.dtype,
        device=args.device,
    )
    found, comparison = (_windows if args.windows else _workloads)(opened, args)
    result = {
        **head(name),
        **model_facts(model_name(args.model), opened.model),
        "parameters": parameters,
        "compared_tokens": comparison.num_tokens,
        "mismatches": comparison.num_mismatches,
        **found,
    }
    print(f"\n{comparison.num_tokens} tokens compared, {comparison.num_mismatches} mismatches")
    line = json.dumps(result)
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(comparison.num_mismatches > 0)


def _workloads(opened: Opened, args: argparse.Namespace) -> tuple[dict[str, Any], Comparison]:
    """All workloads: the rows and marks of the result."""
    contenders = Contenders(
        opened, num_streams=max(*args.streams, args.growth_streams), window=args.window, root=_root(args.seed)
    )
    workloads = Workloads(contenders, _plan(args))
    print(f"\n{'workload':>20} {'T':>4} {'S':>3} {'off tok/s':>10} {'coupled over off':>22} {'by CPU time':>22} "
          f"{'tokens a pass':>14} {'uncoupled over off':>22} {'tokens a pass':>14}")  # fmt: skip
    rows = []
    for row in _rows(workloads, args):
        rows.append(row.summary())
        _print(rows[-1])
    marks = marks_of(rows)
    print()
    for mark in marks:
        print(f"{mark['workload']}, temperature {mark['temperature']}, {mark['streams']} streams, {mark['asked']}: "
              f"{mark['measured']:.2f}, {'met' if mark['met'] else 'not met'}")  # fmt: skip
    return {"rows": rows, "marks": marks}, contenders.comparison


def _rows(workloads: Workloads, args: argparse.Namespace) -> Iterator[Row]:
    """New text first: what a pass costs is then measured alike by all, who later run passes of other widths."""
    samplings = [_sampling(args, temperature) for temperature in args.temperatures]
    for sampling in samplings:
        yield workloads.new(sampling, args.growth_streams)
    for sampling in samplings:
        for num_streams in args.streams:
            yield from workloads.again(sampling, num_streams)
        if args.growth_requests:
            yield from workloads.growth(sampling, args.growth_streams)


def _windows(opened: Opened, args: argparse.Namespace) -> tuple[dict[str, Any], Comparison]:
    """Near-variants with every window: the rows of the result."""
    rows, comparison = [], Comparison()
    print(f"\n{'T':>4} {'window':>6} {'same place':>18} {'common prefix':>18} {'aligned':>18} {'tokens a pass':>14}")
    for window in (NOT_COUPLED, *args.windows):
        contenders = Contenders(
            opened, num_streams=_PAIR_STREAMS, window=window or 1, root=_root(args.seed), names=(OFF, COUPLED)
        )
        pairs = Pairs(contenders, _plan(args), _PAIR_STREAMS)
        for temperature in args.temperatures:
            found = measure(contenders, pairs, _sampling(args, temperature), is_coupled=window != NOT_COUPLED)
            rows.append({"temperature": temperature, "window": window, **found})
            cells = " ".join(f"{found[name][0]:>9.3f} ± {found[name][1]:<6.3f}" for name in MEASURES)
            print(f"{temperature:>4} {window or 'none':>6} {cells} {found['tokens_per_pass']:>14.3f}", flush=True)
        comparison.num_tokens += contenders.comparison.num_tokens
        comparison.num_mismatches += contenders.comparison.num_mismatches
    return {"windows": args.windows, "pairs": len(pairs.prompts), "rows": rows}, comparison


def _root(seed: int) -> bytes:
    """What the secrets of a run are made of: the same for the same seed, so that a run can be repeated."""
    return f"benchmark {seed}".encode()


def _sampling(args: argparse.Namespace, temperature: float) -> Sampling:
    return Sampling(temperature=temperature, top_p=args.top_p, max_tokens=args.max_tokens)


def _plan(args: argparse.Namespace) -> Plan:
    return Plan(
        requests=args.requests,
        growth_requests=args.growth_requests,
        prompt_tokens=args.prompt_tokens,
        group=args.group,
        seed=args.seed,
    )


def _print(row: dict[str, Any]) -> None:
    coupled, uncoupled = row[COUPLED], row[UNCOUPLED]
    print(f"{row['workload']:>20} {row['temperature']:>4} {row['streams']:>3} {row['off_tokens_per_s'][0]:>10.1f} "
          f"{spread_text(coupled['over_off']):>22} {spread_text(coupled['over_off_by_cpu_time']):>22} "
          f"{coupled['tokens_per_pass']:>14.2f} {spread_text(uncoupled['over_off']):>22} "
          f"{uncoupled['tokens_per_pass']:>14.2f}", flush=True)  # fmt: skip


_QUICK = {"requests": 6, "growth_requests": 30, "max_tokens": 48, "streams": [4], "temperatures": [0.7], "group": 3}
"""What ``--quick`` asks, where nothing else is said."""


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coupled", description=(__doc__ or "").split("\n")[0])
    add_model(parser)
    add = parser.add_argument
    add("--streams", type=int, nargs="+", default=[1, 4, 16], metavar="S", help="of noise (default: 1 4 16)")
    add("--temperatures", type=float, nargs="+", default=[0.7, 1.0], metavar="T", help="(default: 0.7 1.0)")
    add("--top-p", type=float, default=0.9, help="(default: %(default)s)")
    add("--requests", type=int, default=25, help="prompts of a workload (default: %(default)s)")
    add("--growth-requests", type=int, default=120, help="of the growing stream, 0 for none (default: %(default)s)")
    add("--growth-streams", type=int, default=4, metavar="S", help="of noise there and on new text (default: 4)")
    add("--max-tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    add("--prompt-tokens", type=int, default=256, help="most of a prompt (default: %(default)s)")
    add("--group", type=int, default=5, help="requests timed together (default: %(default)s)")
    add("--window", type=int, default=EngineConfig().coupled_window, metavar="K", help="(default: %(default)s)")
    add("--windows", type=int, nargs="+", default=[], metavar="K", help="compare these instead")
    add("--num-speculative-tokens", type=int, default=DraftConfig().num_speculative_tokens)
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="less of everything: under a minute")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--out", type=Path, help="also write the JSON line to this file")
    add("--json", action="store_true", help="accepted for symmetry: the JSON line is always the last")
    if parser.parse_known_args(argv)[0].quick:
        parser.set_defaults(**_QUICK)
    args = parser.parse_args(argv)
    numbers = (args.requests, args.max_tokens, args.group, args.growth_streams, *args.streams, *args.windows)
    if min(numbers) < 1 or 0 < args.growth_requests < 3:
        parser.error("--requests, --max-tokens, --group, --streams and --windows take numbers from 1, and "
                     "--growth-requests 0 or from 3")  # fmt: skip
    return args
