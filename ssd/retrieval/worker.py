"""The rebuild process: ``python -m ssd.retrieval.worker [--parent PID] [--scratch DIRECTORY]``.

Merges segments away from the server's interpreter, so that neither its lock nor its memory is disturbed. One JSON
object a line: a job on standard input, its answer on standard output. The process ends when standard input does, or
when its parent dies; it then removes ``--scratch``, the directory of a server that keeps nothing, even if that server
was killed.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from ssd.errors import CacheError
from ssd.retrieval.segment_file import open_segment, write_segment
from ssd.retrieval.snapshot import concatenate
from ssd.retrieval.suffix_array import build_segment

_PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeJob:
    """Concatenate the texts of ``inputs``, sort, write ``output``."""

    inputs: tuple[str, ...]
    output: str
    segment_id: str
    start: int
    fingerprint: str
    namespace: str
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
        inputs = [open_segment(Path(path), fingerprint=self.fingerprint) for path in self.inputs]
        merged = build_segment(concatenate(inputs), start=self.start, segment_id=self.segment_id)
        write_segment(
            Path(self.output), merged, fingerprint=self.fingerprint, namespace=self.namespace, durable=self.durable
        )


def _answer(line: str) -> str:
    try:
        MergeJob.from_json(line).run()
    except (CacheError, OSError, MemoryError, ValueError, TypeError, KeyError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
    return json.dumps({"error": None})


def _die_with(parent: int) -> None:
    """End by SIGTERM when the parent does: its standard input alone may live on in a process it forked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the call
        raise SystemExit(0)


def _exit(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> None:
    """Answer jobs until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m ssd.retrieval.worker", description="Merges segments of the cache.")
    parser.add_argument("--parent", type=int, help="process id to die with")
    parser.add_argument("--scratch", type=Path, help="directory to remove at the end")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C on the terminal is the server's to handle
    try:
        if arguments.parent is not None:
            _die_with(arguments.parent)
        os.nice(10)
        for line in sys.stdin:
            sys.stdout.write(_answer(line) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads the answers any more; keep the interpreter from complaining about it at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        if arguments.scratch is not None:
            shutil.rmtree(arguments.scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
