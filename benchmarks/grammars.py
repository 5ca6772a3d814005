"""Who waits for costly grammars? A stream without one, and a structured request, beside some out of all proportion.

``python -m benchmarks.grammars [--beside N ...] [--rounds N] [--out FILE] [--json]``

A real server of the bundled model with 24 slots. Costly requests have a grammar of their own each: every second has 250
branches whose masks take 0.1 to 0.5 s each, every other one compiles for as long. They are sent at once, and a second
later a stream of 300 tokens, and a request under a regular expression of at most 60 tokens that nobody asked before.
Rows say how long the longest gap between two events of the stream was, how long the structured request took in all, and
how long the costly ones; medians of the rounds, of the clock or of the server's processor time, whichever is less: what
other programs make all wait for is not the server's. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import Server, headers_of
from benchmarks.run import Option, Run

_SERVER = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "24", "--max-model-len", "512")
_TIMEOUT_S = 300.0
_HEAD_START_S = 1.0
_numbers = count(1000)

OPTIONS = {
    "beside": Option(default=[0, 1, 6, 16], least=0, help="costly requests at once"),
    "rounds": 3,
    "costly_tokens": Option(default=12, help="most tokens of a costly answer"),
}
COLUMNS = (
    (">costly", "{beside}"),
    (">longest gap, ms", "{gap_ms:.0f}"),
    (">structured, s", "{structured_s:.2f}"),
    (">costly ended after, s", "{costly_s:.1f}"),
    (">memory, MiB", "{memory_mib:.0f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print. Returns the exit status, 0."""
    run = Run("grammars", __doc__, argv, OPTIONS, COLUMNS)
    with tempfile.TemporaryDirectory(prefix="grammars-") as home, ExitStack() as stack:
        server = Server(Path(home) / "server.log", *_SERVER)
        stack.callback(server.kill)
        server.start()
        _round(server, 0, 1)  # warm
        for beside in run.args.beside:
            found = [_round(server, beside, run.args.costly_tokens) for _ in range(run.args.rounds)]
            run.row({"beside": beside, **{name: round(median(one[name] for one in found), 3) for name in found[0]}})
    return run.end(rows=run.rows)


class _Clock:
    """Seconds since the last look: of the clock, or of the processors for the server, whichever is less."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._last = time.perf_counter(), server.processor_s()

    def look(self) -> float:
        now, last = (time.perf_counter(), self._server.processor_s()), self._last
        self._last = now
        return min(now[0] - last[0], now[1] - last[1])


def _round(server: Server, num_costly: int, costly_tokens: int) -> dict[str, float]:
    with ThreadPoolExecutor(num_costly + 2) as clients:
        clock = _Clock(server)
        costly = [clients.submit(_structured, server, _costly(), costly_tokens) for _ in range(num_costly)]
        if num_costly:
            time.sleep(_HEAD_START_S)
        honest = {"guided_regex": f"[a-z]{{3,20}} ([0-9]{{2}},){{1,9}}{next(_numbers)}"}
        gap = clients.submit(_longest_gap_s, server)
        structured_s = clients.submit(_structured, server, honest, 60).result()
        found = {"gap_ms": 1000 * gap.result(), "structured_s": structured_s}
        for each in costly:
            each.result()
        return {**found, "costly_s": clock.look(), "memory_mib": server.memory_mib()}


def _costly() -> dict[str, Any]:
    number = next(_numbers)
    if number % 2:
        return {"guided_regex": f"(a{{900}}){{{number}}}"}
    return {"guided_json": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}] * 250 + [{"const": str(number)}]}}


def _structured(server: Server, grammar: dict[str, Any], max_tokens: int) -> float:
    """Seconds of one request under a grammar, its end included; a costly one may be refused."""
    clock = _Clock(server)
    body = {"prompt": "x = ", "max_tokens": max_tokens, "temperature": 0, **grammar}
    status, content = server.ask("POST", "/v1/completions", json.dumps(body).encode(), _TIMEOUT_S)
    if status not in (200, 400):
        raise http.client.HTTPException(f"{status}: {content[:200]!r}")
    return clock.look()


def _longest_gap_s(server: Server) -> float:
    """Of a stream that drafts nothing; the first event is not looked at."""
    body = {"prompt": "x = 1\n", "max_tokens": 300, "ignore_eos": True, "stream": True, "temperature": 1, "seed": 1,
            "num_speculative_tokens": 0}  # fmt: skip
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=_TIMEOUT_S)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), headers_of(None))
        response = connection.getresponse()
        clock, gaps = _Clock(server), []
        while line := response.readline():
            if line.startswith(b"data: {"):
                gaps.append(clock.look())
    return max(gaps[1:])


if __name__ == "__main__":
    sys.exit(main())
