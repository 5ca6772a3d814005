"""Do thousands of idle connections harm who works? Memory of each, and a client's latency beside them.

``python -m benchmarks.connections [--connections N] [--requests N] [--out FILE] [--json]``

A real server of the bundled model; a client that asks one short completion after the other, on a connection each. First
alone, then beside idle connections of which every second has had an answer before, then beside connections that have
sent half a head, then again alone. Ends with a table and, with --json, one JSON line.
"""

from __future__ import annotations

import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import Server
from benchmarks.run import Run

_OWN_FILES = 512
_SERVER = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "2", "--max-model-len", "256")
_SERVER_WAITS = ("--max-idle-seconds", "600", "--max-head-seconds", "600")
_LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
_HALF = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


COLUMNS = (("beside", "{beside}"), (">p50, ms", "{p50_ms}"), (">p99, ms", "{p99_ms}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print. Returns the exit status, 0."""
    run = Run("connections", __doc__, argv, {"connections": 10_000, "requests": 200}, COLUMNS)
    return run.end(**measure(run.args.connections, run.args.requests, run.row), indent=1)


def measure(num_connections: int, num_requests: int, say: Callable[[dict[str, Any]], Any] = dict) -> dict[str, Any]:
    """Latencies in milliseconds and memory in kB, for as many connections as this process may open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    number = min(num_connections, most - _OWN_FILES)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="connections-") as home, ExitStack() as stack:
        server = Server(Path(home) / "server.log", *_SERVER, *_SERVER_WAITS)
        stack.callback(server.kill)
        server.start()
        _latencies(server, num_requests)  # warm
        rows.append(say(_row("none", server, num_requests)))
        before = server.memory_mib()
        for kind in ("idle", "half a head"):
            with ExitStack() as opened:
                began = time.perf_counter()
                for index in range(number):
                    opened.enter_context(_connection(server.port, kind, index))
                opening_s = time.perf_counter() - began
                kib = (server.memory_mib() - before) * 1024 / number
                row = _row(kind, server, num_requests)
                rows.append(say({**row, "opening_s": round(opening_s, 2), "kib_each": round(kib, 1)}))
        time.sleep(1)  # while they are closed
        rows.append(say(_row("none again", server, num_requests)))
    return {"connections": number, "requests": num_requests, "rows": rows}


def _connection(port: int, kind: str, index: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    if kind == "half a head":
        connection.sendall(_HALF)
    elif index % 2:
        connection.sendall(_LIVE)
        if not connection.recv(4096).startswith(b"HTTP/1.1 200"):
            raise ConnectionError("an idle connection was not answered")
    return connection


def _row(name: str, server: Server, num_requests: int) -> dict[str, Any]:
    p50, p99 = np.percentile(_latencies(server, num_requests), (50, 99))
    return {"beside": name, "p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2)}


def _latencies(server: Server, num_requests: int) -> list[float]:
    """Milliseconds of short completions, one after the other."""
    found = []
    for number in range(num_requests):
        began = time.perf_counter()
        server.post({"prompt": f"x = {number}\n", "max_tokens": 1, "temperature": 0})
        found.append((time.perf_counter() - began) * 1000)
    return found


if __name__ == "__main__":
    sys.exit(main())
