"""How a benchmark of faults is asked and ends: the arguments all of them have, the sums, the result and the status."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.environment import head


class Counted(Protocol):
    """What came of a round: how often each outcome and each problem was seen."""

    counts: Counter[str]

    @property
    def num_problems(self) -> int:
        """0 where all is well."""
        ...


def parser_of(
    program: str, purpose: str, names: Sequence[str], *, rounds: str, clients: str, tokens: int, calm_s: float
) -> argparse.ArgumentParser:
    """The arguments that all have. ``names`` : of the faults; ``rounds``, ``clients`` : number and meaning, apart by a
    blank; ``tokens``, ``calm_s`` : defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{program}", description=purpose)
    num_rounds, _, of_rounds = rounds.partition(" ")
    num_clients, _, of_clients = clients.partition(" ")
    add = parser.add_argument
    add("--rounds", type=int, default=int(num_rounds), help=f"{of_rounds} (default: %(default)s)".strip())
    add("--seed", type=int, default=0)
    add("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    add("--clients", type=int, default=int(num_clients), help=f"{of_clients} (default: %(default)s)")
    add("--tokens", type=int, default=tokens, help="of each answer (default: %(default)s)")
    add("--calm", type=float, default=calm_s, help="seconds before and after a fault (default: %(default)s)")
    add("--patience", type=float, default=30.0, help="seconds within which sharing must be back (default: %(default)s)")
    add("--json", action="store_true", help="end stdout with one JSON line")
    add("--out", type=Path, metavar="FILE", help="write the result there as well")
    return parser


def begin(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Print the arguments ``names`` and return them."""
    parameters = {name: getattr(args, name) for name in names}
    print(", ".join(f"{name} {value}" for name, value in parameters.items()), flush=True)
    return parameters


def end(
    args: argparse.Namespace,
    program: str,
    parameters: Mapping[str, Any],
    played: Sequence[Counted],
    counted: Sequence[str],
    began: float,
    **more: Any,
) -> int:
    """Write and print the result of the rounds ``played`` as asked. Returns the exit status.

    ``counted`` : outcomes and problems to sum. ``began`` : by ``time.monotonic``. ``more`` : facts beside these.
    """
    result: dict[str, Any] = {
        **head(program),
        "parameters": parameters,
        **more,
        **{name: sum(row.counts[name] for row in played) for name in counted},
        "seconds": round(time.monotonic() - began, 1),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
    return int(any(row.num_problems for row in played))
