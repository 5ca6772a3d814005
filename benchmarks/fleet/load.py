"""What a log asks of a real Redis server: its CPU time for entries written, replies sent and entries in them.

Readers are bare connections in a process of their own, each in a blocking ``XREAD`` as ``LogReader`` is; the server's
CPU time is its own count. Runs of different numbers of readers, rates and pauses between reads give the cost of each.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Final

import numpy as np

from benchmarks.fleet.bare_readers import KEY
from benchmarks.processes import ROOT, Redis
from ssd.sharing.append import FIELD
from ssd.sharing.connection import BLOCK_MS, connect

_TICK_S: Final = 0.02
RUNS: Final = ((1, 500, 0.0), (16, 100, 0.0), (64, 50, 0.0), (64, 200, 0.05), (64, 400, 0.05), (128, 200, 0.05))
"""(readers, entries a second, seconds a reader pauses after a reply)"""


def measure(entry: bytes, seconds: float) -> dict[str, Any]:
    """Microseconds of the server's CPU for each entry written, reply sent, and entry in a reply."""
    rows, seen = [], []
    with tempfile.TemporaryDirectory() as directory, Redis(Path(directory)) as server:
        for readers, rate, pause_s in RUNS:
            run = _run(server, entry, readers, rate, pause_s, seconds)
            rows.append([run["written"], run["replies"], run["delivered"]])
            seen.append(run)
    counts, cpu_us = np.array(rows, float), np.array([run["cpu_s"] * 1e6 for run in seen])
    costs = _non_negative(counts, cpu_us)
    error = float(np.median(np.abs(counts @ costs / cpu_us - 1)))
    names = ("write_us", "reply_us", "delivered_us")
    return {**dict(zip(names, costs.round(2).tolist(), strict=True)), "fit_error": round(error, 3), "runs": seen}


def _run(server: Redis, entry: bytes, readers: int, rate: int, pause_s: float, seconds: float) -> dict[str, Any]:
    client = connect(server.url)
    client.flushall()
    command = [sys.executable, "-m", "benchmarks.fleet.bare_readers", str(server.port), str(readers), str(pause_s)]
    with Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()  # all are connected
        before, began = _cpu_s(client), time.monotonic()
        calls = _calls(client)
        written = 0
        while (passed := time.monotonic() - began) < seconds:
            due = int(passed * rate) - written
            for _ in range(due):
                client.xadd(KEY, {FIELD: entry})
            written += due
            time.sleep(_TICK_S / 10 if rate * _TICK_S > 1 else _TICK_S)
        time.sleep(2 * BLOCK_MS / 1000)
        cpu_s, calls = _cpu_s(client) - before, _calls(client) - calls
        process.stdin.close()
        delivered = int(process.stdout.readline())
    client.close()
    if delivered != written * readers:
        raise AssertionError(f"{readers} readers were to read {written} entries each, and read {delivered} in all")
    return {
        "readers": readers,
        "entries_per_s": rate,
        "pause_s": pause_s,
        "written": written,
        "replies": calls,
        "delivered": delivered,
        "cpu_s": round(cpu_s, 4),
    }


def _cpu_s(client: Any) -> float:
    info = client.info("cpu")
    return float(info["used_cpu_sys"] + info["used_cpu_user"])


def _calls(client: Any) -> int:
    return int(client.info("commandstats").get("cmdstat_xread", {}).get("calls", 0))


def _non_negative(counts: Any, cpu_us: Any) -> Any:
    """Least squares of relative errors over the columns that do not come out below zero."""
    used = list(range(counts.shape[1]))
    scaled = counts / cpu_us[:, None]
    while True:
        found, *_ = np.linalg.lstsq(scaled[:, used], np.ones(len(cpu_us)), rcond=None)
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    costs = np.zeros(counts.shape[1])
    costs[used] = found
    return costs
