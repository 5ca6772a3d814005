"""Several runs over one log at a time, each in a process: what runs come to does not depend on how many."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_int64
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, TypeVar

from cache_builder.evaluation.log import Log
from cache_builder.evaluation.runs import Outcome, Run, execute
from ssd.errors import CacheError

K = TypeVar("K", bound=Hashable)

_LOOK_S: Final = 0.2
_log: Log
_done: Any
"""Of a worker: the log, and how many tokens all have decoded; less than 0: to stop."""


class _Stopped(Exception):
    """Nobody waits for what this process does."""


def execute_all(
    runs: Mapping[K, Run], log: Log, num_jobs: int, progress: Callable[[int], None] = lambda num_tokens: None
) -> dict[K, Outcome]:
    """`execute` for all of ``runs``, the longest first. ``progress`` : told how many output tokens were decoded.

    Raises what `execute` raises, and CacheError where a process was killed.
    """
    ordered = sorted(runs, key=lambda key: -runs[key].num_decoded(log))
    num_jobs = min(num_jobs, len(runs))
    if num_jobs <= 1:
        return {key: execute(runs[key], log, progress) for key in ordered}
    context = get_context("spawn")  # threads and kernels do not survive a fork
    done = context.Value(c_int64, 0)
    with tempfile.TemporaryDirectory(prefix="ssd-evaluate-") as directory:
        log.save(Path(directory))
        with ProcessPoolExecutor(num_jobs, context, _begin, (directory, done)) as pool:
            try:
                futures = {pool.submit(_execute, runs[key]): key for key in ordered}
                _watch(set(futures), done, progress)
                return {key: future.result() for future, key in futures.items()}
            except BrokenProcessPool as error:
                raise CacheError(
                    "a process that decodes was killed, perhaps for want of memory: give --jobs 1, or fewer logs"
                ) from error
            except BaseException:
                done.value = -(1 << 62)
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _watch(waiting: set[Future[Outcome]], done: Any, progress: Callable[[int], None]) -> None:
    """Until all have ended or one has failed."""
    told = 0
    while waiting:
        ended, waiting = wait(waiting, _LOOK_S, FIRST_COMPLETED)
        for future in ended:
            future.result()
        progress(done.value - told)
        told = done.value


def _begin(directory: str, done: Any) -> None:
    global _log, _done
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and says so
    _log, _done = Log.load(Path(directory)), done


def _execute(run: Run) -> Outcome:
    return execute(run, _log, _tell)


def _tell(num_tokens: int) -> None:
    with _done.get_lock():
        if _done.value < 0:
            raise _Stopped
        _done.value += num_tokens
