"""How near does one switch come to knowing beforehand? Retrieval and another drafter, replayed on recorded requests.

``python -m benchmarks.hybrid FILE... [--other eagle] [--max-draft K] [--max-requests N] [--json]``

The files say of every position how many tokens a step of the other drafter emits there, see `recordings`; passes and
its drafts take what `costs` says. Speed-ups over plain decoding: the other alone, with drafts of 5 tokens; ours alone,
as trees and as chains (a path); ours with it, by the arbiter that serves; and an oracle that knows of every step which
of ours alone and the other alone emits more, where ours are chains ("oracle") and where they are trees ("oracle_tree").
Every request is in our index once it has ended. The same every time. Prints a table; the last line of stdout is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import head
from benchmarks.hybrid.decoders import decoders
from benchmarks.hybrid.recordings import read_recordings
from benchmarks.hybrid.replaying import replay
from ssd.errors import ConfigError

_MOST_DRAFT = 128
_COLUMNS = {
    "other_alone": "other",
    "ours_alone_path": "ours, path",
    "ours_alone": "ours, tree",
    "both": "both",
    "oracle": "oracle, path",
    "oracle_tree": "oracle, tree",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hybrid", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="recordings: .jsonl or .jsonl.gz")
    add("--other", default="eagle", metavar="NAME", help="the other drafter, as the files name it (default: eagle)")
    add("--max-draft", type=int, default=48, metavar="K", help="most nodes of a draft, the other's among them")
    add("--max-requests", type=int, metavar="N", help="of each file (default: all)")
    add("--out", type=Path, metavar="PATH", help="also write the JSON here")
    add("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args(argv)
    try:
        result = _run(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    line = json.dumps(result)
    if options.out is not None:
        options.out.write_text(line + "\n")
    print(line)
    return 0


def _run(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError."""
    for name, value, most in (("draft", options.max_draft, _MOST_DRAFT), ("requests", options.max_requests, 1 << 30)):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"--max-{name} must be within 1..{most:,}, got {value}")
    if options.out is not None and not options.out.parent.is_dir():
        raise ConfigError(f"--out {options.out}: there is no such directory; make it first")
    recordings = {path: read_recordings(path, options.other, options.max_requests) for path in options.files}
    if not options.json:
        print(f"{'file':24}{'requests':>9}" + "".join(f"{name:>14}" for name in _COLUMNS.values()) + "  asked  /oracle")
    results = []
    for path, found in recordings.items():
        ways = {name: make() for name, make in decoders(options.max_draft).items()}
        results.append({"file": path.name, **replay(found, ways)})
        if not options.json:
            print(_line(results[-1]), flush=True)
    parameters = {"other": options.other, "max_draft": options.max_draft, "max_requests": options.max_requests}
    return {**head("hybrid"), "parameters": parameters, "results": results}


def _line(result: dict[str, Any]) -> str:
    figures = "".join(f"{result[name]:14.3f}" for name in _COLUMNS)
    share = result["both"] / result["oracle"]
    return f"{result['file']:24}{result['requests']:9}{figures}{result['other_asked_share']:7.0%}{share:9.3f}"
