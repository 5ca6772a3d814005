"""Run one test of reliability: ``python -m benchmarks.reliability --question faults|crash|soak|engine``.

``--question NAME --help`` shows what a test does and its options. Each test prints its parameters, checks all outputs,
and ends with one JSON line, and with exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

QUESTIONS = ("faults", "crash", "soak", "engine")


def main(argv: Sequence[str] | None = None) -> int:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability", description=summary, epilog=details, add_help=False
    )
    parser.add_argument("--question", choices=QUESTIONS, required=True)
    given = sys.argv[1:] if argv is None else argv
    if {*given} <= {"-h", "--help"}:
        parser.print_help()
        return 0
    args, rest = parser.parse_known_args(given)
    status: int = import_module(f"benchmarks.reliability.{args.question}").main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
