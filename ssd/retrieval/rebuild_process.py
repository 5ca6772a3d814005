"""The rebuild process: ``python -m ssd.retrieval.rebuild_process [--parent PID] [--scratch DIRECTORY]``.

Merges segments away from the server's interpreter, so that neither its lock nor its memory is disturbed. One JSON
object a line: a job on standard input, its answer on standard output. The process ends when standard input does, when
its parent dies, or when it is told to; if the parent is dead it then removes ``--scratch``, the directory of a server
that keeps nothing, for a killed one cannot. A living server's directory is that server's to remove.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Self

import numpy as np

from ssd.retrieval.segment_file import read_tokens, write_segment
from ssd.retrieval.suffix_array import build_segment

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PARENT_DIED = signal.SIGUSR1  # no other process has a reason to send it
_DYING_S = 1.0  # the pipe of a parent that is killed may close before its death is told


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeJob:
    """Concatenate the texts of ``inputs``, sort, write ``output``."""

    inputs: tuple[str, ...]
    output: str
    segment_id: str
    start: int
    fingerprint: str
    namespace: str
    num_tokens: int
    """Of all inputs; says how long it may take."""
    durable: bool

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The job that ``to_json`` wrote."""
        fields = json.loads(line)
        return cls(**{**fields, "inputs": tuple(fields["inputs"])})

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    def run(self) -> None:
        """Do it in this process. Raises CacheError when an input is damaged, OSError, MemoryError."""
        texts = [read_tokens(Path(p), fingerprint=self.fingerprint, namespace=self.namespace) for p in self.inputs]
        tokens = np.concatenate(texts)
        del texts
        merged = build_segment(tokens, start=self.start, segment_id=self.segment_id)
        write_segment(
            Path(self.output), merged, fingerprint=self.fingerprint, namespace=self.namespace, durable=self.durable
        )


def _answer(line: str) -> str:
    try:
        MergeJob.from_json(line).run()
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
    return json.dumps({"error": None})


def _die_with(parent: int) -> None:
    """Be told when the parent dies: standard input alone may live on in a process it forked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _PARENT_DIED)
    if os.getppid() != parent:  # it died before the call
        raise SystemExit(0)


class _Exit:
    """Ends the process by a signal; remembers whether that said that the parent is dead."""

    def __init__(self) -> None:
        self.parent_died = False
        signal.signal(_PARENT_DIED, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C on the terminal is the server's to handle

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.parent_died |= number == _PARENT_DIED
        raise SystemExit(0)

    def is_orphan(self, parent: int, wait_s: float) -> bool:
        """Whether the parent is dead; waits so long for the news. Signals end the process no more."""
        for number in (_PARENT_DIED, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        deadline = time.monotonic() + wait_s
        while not self.parent_died and os.getppid() == parent and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.parent_died or os.getppid() != parent


def main() -> None:
    """Answer jobs until standard input ends."""
    parser = argparse.ArgumentParser(
        prog="python -m ssd.retrieval.rebuild_process", description="Merges segments of the cache."
    )
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process id to die with (default: who began)")
    parser.add_argument("--scratch", type=Path, help="directory to remove if the parent died")
    arguments = parser.parse_args()
    leaving, wait_s = _Exit(), 0.0
    try:
        _die_with(arguments.parent)
        os.nice(10)
        for line in sys.stdin:
            sys.stdout.write(_answer(line) + "\n")
            sys.stdout.flush()
        wait_s = _DYING_S
    except BrokenPipeError:
        wait_s = _DYING_S
        # Nobody reads the answers any more; keep the interpreter from complaining about it at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        if arguments.scratch is not None and leaving.is_orphan(arguments.parent, wait_s):
            shutil.rmtree(arguments.scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
