"""The process that merges segment files at low priority, and the server's side of it: start, ask, restart, stop."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Self

import numpy as np

from ssd.errors import CacheError, StoreUnavailable
from ssd.retrieval.segment_file import read_tokens, write_segment
from ssd.retrieval.suffix_array import build_segment

log = logging.getLogger(__name__)

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_ATTEMPTS = 2  # a job that kills the process twice is given back
_MAX_CRASHES = 5  # in a row; then jobs are refused for a while, and one is tried after it
_FIRST_BACK_OFF_S = 0.1  # doubles with every crash in a row
_FIRST_PAUSE_S = 10.0  # doubles too
_LONGEST_PAUSE_S = 300.0
_PATIENCE_S = 30.0  # a job may take so long, and so much more for each token: some thirty times what it does take
_PATIENCE_PER_TOKEN_S = 2e-5

_PR_SET_PDEATHSIG = 1  # prctl(2)
_DYING_S = 1.0  # the pipe of a parent that is killed may close before it is gone


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


def _give_back_memory() -> None:
    """What a merge took: or glibc keeps up to 64 MB of it until the next one."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _answer(line: str) -> str:
    try:
        MergeJob.from_json(line).run()
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
    return json.dumps({"error": None})


def _end_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _is_orphan(parent: int, wait_s: float) -> bool:
    """Whether the parent is dead; waits so long for that."""
    deadline = time.monotonic() + wait_s
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getppid() != parent


def main() -> None:
    """Answer jobs until standard input ends, or the parent dies: standard input may live on in what that forked."""
    parser = argparse.ArgumentParser(
        prog="python -m ssd.retrieval.merge_worker", description="Merges segments of the cache."
    )
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process id to die with (default: who began)")
    parser.add_argument("--scratch", type=Path, help="directory to remove if the parent died")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C on the terminal is the server's to handle
    signal.signal(signal.SIGTERM, _end_on_signal)
    wait_s = 0.0
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != arguments.parent:  # it died before the call
            return
        os.nice(10)
        for line in sys.stdin:
            sys.stdout.write(_answer(line) + "\n")
            sys.stdout.flush()
            _give_back_memory()
        wait_s = _DYING_S
    except BrokenPipeError:
        wait_s = _DYING_S
        # Nobody reads the answers any more; keep the interpreter from complaining about it at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if arguments.scratch is not None and _is_orphan(arguments.parent, wait_s):
            shutil.rmtree(arguments.scratch, ignore_errors=True)


class MergeWorker:
    """One rebuild process and the thread that talks to it. Jobs run one at a time, in order."""

    def __init__(self, scratch: Path | None = None) -> None:
        """``scratch`` : a directory the process removes if this one dies. The process starts with the first job."""
        self.num_restarts = 0
        self._scratch = scratch
        self._jobs: queue.SimpleQueue[tuple[MergeJob | None, Future[None]] | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self._crashes = 0
        self._refused_until = 0.0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def process_id(self) -> int | None:
        """The process's id, None when none runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> Future[None]:
        """Start the process without a job, so that it watches over the scratch directory."""
        return self._enqueue(None)

    def submit(self, job: MergeJob) -> Future[None]:
        """Run ``job``. The future fails with CacheError: the job failed, or the process cannot be kept running.

        A process that gives no answer in good time, 30 s and 20 us a token, is killed and replaced.
        """
        return self._enqueue(job)

    def close(self) -> None:
        """Stop the process, abandoning the job it has; waiting jobs fail."""
        with self._lock:
            self._stopping.set()
            thread = self._thread
        self._kill()
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _enqueue(self, job: MergeJob | None) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if self._stopping.is_set():
                future.set_exception(StoreUnavailable("the rebuild process is stopped"))
                return future
            if self._thread is None:
                # The process dies with the thread that started it (that is what prctl watches): one thread for all its
                # life.
                self._thread = threading.Thread(target=self._run, name="ssd-merge", daemon=True)
                self._thread.start()
            self._jobs.put((job, future))
        return future

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                self._do(job)
            except CacheError as error:
                future.set_exception(error)
            except Exception as error:  # the thread must outlive whatever one job does
                log.exception("rebuild process failed")
                future.set_exception(StoreUnavailable(f"the rebuild process failed: {error}"))
            else:
                future.set_result(None)
        self._reap()

    def _do(self, job: MergeJob | None) -> None:
        for _ in range(_ATTEMPTS):
            if self._stopping.is_set() or time.monotonic() < self._refused_until:
                break
            try:
                process = self._running_process()
                if job is None:
                    return
                answer = self._ask(process, job)
            except OSError as error:
                log.warning("rebuild process: %s", error)
                answer = None
            if answer is not None:
                self._crashes = 0
                if answer["error"] is not None:
                    raise CacheError(f"a merge failed: {answer['error']}")
                return
            self._crashed()
            _remove_temporary(job)
        if job is not None:
            with contextlib.suppress(OSError):
                Path(job.output).unlink()  # the answer alone may be missing
        raise StoreUnavailable("the rebuild process does not run; segments are merged inside the server")

    def _running_process(self) -> subprocess.Popen[str]:
        if self._process is None:
            command = [sys.executable, "-m", "ssd.retrieval.merge_worker", "--parent", str(os.getpid())]
            if self._scratch is not None:
                command += ["--scratch", str(self._scratch)]
            # The process must find this very package, however the parent found it.
            paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
            if self._stopping.is_set():  # close() may have looked for it just before
                self._process.kill()
        return self._process

    def _ask(self, process: subprocess.Popen[str], job: MergeJob) -> dict[str, str | None] | None:
        """The answer, or None when the process ended without one or does not answer."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(job.to_json() + "\n")
            process.stdin.flush()
            patience_s = _PATIENCE_S + _PATIENCE_PER_TOKEN_S * job.num_tokens
            if not select.select([process.stdout], [], [], patience_s)[0]:
                log.warning("rebuild process: no answer within %.0f s, it is killed", patience_s)
                return None
            line = process.stdout.readline()  # written at once: it is short
            answer: dict[str, str | None] = json.loads(line)
        except (BrokenPipeError, ValueError):
            return None
        return answer

    def _crashed(self) -> None:
        self._reap()
        if self._stopping.is_set():
            return
        self._crashes += 1
        self.num_restarts += 1
        if self._crashes < _MAX_CRASHES:
            log.warning("rebuild process ended unexpectedly crashes=%d", self._crashes)
            self._stopping.wait(_FIRST_BACK_OFF_S * 2 ** (self._crashes - 1))
            return
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._crashes - _MAX_CRASHES, 16))
        self._refused_until = time.monotonic() + pause_s
        log.warning(
            "rebuild process ended unexpectedly crashes=%d; segments are merged inside the server for %.0f s, then it "
            "is tried again",
            self._crashes, pause_s,
        )  # fmt: skip

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _reap(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()


def _remove_temporary(job: MergeJob | None) -> None:
    """Remove what a process that is gone had written of its output."""
    if job is not None:
        output = Path(job.output)
        with contextlib.suppress(OSError):
            for path in output.parent.glob(f"{output.name}.*.tmp"):
                path.unlink()


if __name__ == "__main__":
    main()
