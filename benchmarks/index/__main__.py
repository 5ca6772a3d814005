"""How large, how fast, how fresh is the retrieval index, and what does its upkeep cost?

``python -m benchmarks.index --tokens N [--data made|traces|zipf|repeat] [--static M] [--peers [NAME ...]] [--json]``

A real cache (its thread, its rebuild process, files in a temporary directory) is filled with N tokens in completions
of 200 to 2,000, and measured as ingest leaves it: segments of all sizes, the tail not empty. Half the contexts asked
for are present in full; of the other half only the last 1 to 10 tokens occur. The last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from benchmarks.environment import head
from benchmarks.index.data import DEFAULT_VOCABULARY, KINDS, LONGEST, completions
from benchmarks.index.live import TOKENS_PER_S
from benchmarks.index.phases import compare_peers, measure_index, sort_worst_cases
from benchmarks.index.table import table
from benchmarks.peers.names import PEER_NAMES
from ssd.errors import ConfigError

_LEAST_TOKENS = 50_000
_LARGEST_VOCABULARY = 1 << 30
_MOST_PEER_TOKENS = 4_000_000


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, default=1_000_000, metavar="N", help="size of the ring, filled (default 1,000,000)")
    add("--data", choices=KINDS, default="made", help="what text (default: made by the benchmark itself)")
    add("--vocab", type=int, metavar="V", help="token ids are below this")
    add("--static", type=int, default=0, metavar="M", help="tokens in static segments beside the ring")
    add("--seconds", type=float, default=20.0, metavar="S", help="how long it is watched under traffic, and without")
    add("--peers", nargs="*", choices=PEER_NAMES, metavar="NAME", help=f"compare with {', '.join(PEER_NAMES)}")
    add("--peer-tokens", type=int, metavar="N", help="size of that comparison (default: --tokens, at most 4,000,000)")
    add("--worst-cases", action="store_true", help="also sort text that sorters may dislike, and wide alphabets")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print the JSON line alone")
    options = parser.parse_args(arguments)
    if options.vocab is None:
        options.vocab = DEFAULT_VOCABULARY[options.data]
    if options.peer_tokens is None:
        options.peer_tokens = min(options.tokens, _MOST_PEER_TOKENS)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError."""
    for name, least, most in (
        ("tokens", _LEAST_TOKENS, 1 << 32),
        ("peer_tokens", _LEAST_TOKENS, 1 << 32),
        ("vocab", 16, _LARGEST_VOCABULARY),
        ("static", 0, 1 << 40),
        ("seed", 0, 1 << 62),
        # At least one completion must arrive.
        ("seconds", LONGEST / TOKENS_PER_S, 1e6),
    ):
        value = getattr(options, name)
        if not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} must be within {least:,}..{most:,}, got {value}")
    next(completions(options.data, options.vocab, options.seed))  # is there text?


class _Report:
    """Prints what is going on, unless only the JSON is wanted."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        if not self._quiet:
            print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    try:
        options = _parse(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    say = _Report(options.json)
    result: dict[str, Any] = {**head("index"), "tokens": options.tokens, "parameters": vars(options)}
    say(f"index: {json.dumps(result['parameters'])}")
    say(f"machine: {json.dumps(result['environment'])}")
    result |= measure_index(options, say)
    result |= {"peers": {}} if options.peers is None else compare_peers(options, say)
    if options.worst_cases:
        result["worst_cases"] = sort_worst_cases(options, say)
    if not options.json:
        print(table(result))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
