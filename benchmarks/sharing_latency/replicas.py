"""Replicas as processes, started, told what to do and ended together."""

from __future__ import annotations

import json
import sys
from subprocess import PIPE, Popen
from typing import Any, Self

from benchmarks.faults.processes import ROOT


class Replicas:
    """``count`` of them, which say ``tokens_per_s`` in all. A context: those that were not ended are killed."""

    def __init__(self, url: str, count: int, tokens_per_s: float, *, look_up: bool) -> None:
        each = [str(count if look_up else 0), str(tokens_per_s / count)]
        command = [sys.executable, "-m", "benchmarks.sharing_latency.replica", url]
        self._processes = [
            Popen([*command, str(number), *each], cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True)
            for number in range(count)
        ]
        for process in self._processes:
            if _line(process) != "ready":
                raise RuntimeError("a replica did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def say(self, namespace: str) -> None:
        """From now on texts go to ``namespace``; ``-``: nobody says anything."""
        for process in self._processes:
            _tell(process, f"say {namespace}")

    def end(self) -> list[dict[str, Any]]:
        """What each has seen."""
        for process in self._processes:
            _tell(process, "end")
        counts = [int(_line(process)) for process in self._processes]
        for process in self._processes:
            _tell(process, json.dumps(counts))
        return [json.loads(_line(process)) for process in self._processes]


def _tell(process: Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _line(process: Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
