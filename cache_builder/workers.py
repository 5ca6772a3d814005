"""Parallel execution of one function over many items, with a process for each CPU core."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from ssd.errors import SSDError

Progress: TypeAlias = Callable[[int, int], None]
"""A callback that receives the numbers of bytes read and of tokens produced since its last call."""

Item = TypeVar("Item")
Options = TypeVar("Options")
Result = TypeVar("Result")

_PARENT_DIES = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def map_items(
    work: Callable[[Item, Options, Progress], Result],
    items: Sequence[Item],
    options: Options,
    progress: Progress,
    *,
    jobs: int,
) -> Iterator[Result]:
    """Yield the result of ``work`` for each item, in order, computed by ``jobs`` processes.

    ``work`` must be a function at module level. ``progress`` is called when an item is finished. Worker processes never
    outlive this process. Raises the error of the first item that failed, or SSDError if a worker died.
    """
    if min(jobs, len(items)) <= 1:
        for item in items:
            yield work(item, options, progress)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(jobs, len(items)), multiprocessing.get_context("spawn"), initializer=_set_up_worker, initargs=(os.getpid(),)
    )
    try:
        for future in [pool.submit(_run_item, work, item, options) for item in items]:
            result, totals = future.result()
            progress(*totals)
            yield result
    except BrokenProcessPool:
        raise SSDError("a worker process was killed. If memory ran out, use fewer --jobs") from None
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        pool.shutdown(cancel_futures=True)


def _run_item(work: Callable[..., Any], item: Any, options: Any) -> tuple[Any, tuple[int, int]]:
    totals = [0, 0]

    def report_progress(num_bytes: int, num_tokens: int) -> None:
        totals[0] += num_bytes
        totals[1] += num_tokens

    result = work(item, options, report_progress)
    return result, (totals[0], totals[1])


def _set_up_worker(parent: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prepare_worker()


def prepare_worker() -> None:
    """Set up a worker process: turn off the tokenizers library's threads, and hide torch to start faster."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from ssd.text.load_tokenizer import hide_torch

    hide_torch()
