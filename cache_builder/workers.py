"""The same function over many items, on the cores of this machine."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeAlias, TypeVar

from ssd.errors import SSDError

Progress: TypeAlias = Callable[[int, int], None]
"""Is told how many bytes more were read, and how many tokens more were made or decoded."""

Item = TypeVar("Item", contravariant=True)
Options = TypeVar("Options", contravariant=True)
Result = TypeVar("Result", covariant=True)

_TELL_S = 0.2
_PARENT_DIES = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


class Work(Protocol[Item, Options, Result]):
    """A function of a module, so that it can be named to another process."""

    def __call__(self, item: Item, options: Options, progress: Progress, /) -> Result: ...


def run(
    work: Work[Item, Options, Result], items: Sequence[Item], options: Options, progress: Progress, *, jobs: int
) -> Iterator[Result]:
    """What ``work`` makes of each item, as they are finished.

    Raises what it raises of the item that fails first in the order of ``items``, and SSDError for a worker's end.

    ``jobs`` : processes; 1 works in this one. They end with this process, however it ends, and when the iterator does.
    """
    if min(jobs, len(items)) <= 1:
        for item in items:
            yield work(item, options, progress)
        return
    context = multiprocessing.get_context("spawn")
    waiting = deque(enumerate(items))
    workers: dict[Connection, Any] = {}
    under_way: dict[Connection, int] = {}
    failures: dict[int, Exception] = {}

    def hand_out(to: Connection) -> None:
        under_way[to], item = waiting.popleft()
        to.send((item,))

    try:
        for _ in range(min(jobs, len(items))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, work, options, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            workers[ours] = process
            hand_out(ours)
        # What comes before the first failure may fail too, and is what one would find first when reading in order.
        while under_way and min(under_way.values()) < min(failures, default=len(items)):
            for ready in wait(list(under_way)):
                assert isinstance(ready, Connection)
                kind, content = _received(ready, workers[ready])
                if kind == "progress":
                    progress(*content)
                    continue
                number = under_way.pop(ready)
                if kind == "error":
                    failures[number] = content
                    waiting.clear()
                    continue
                if waiting:
                    hand_out(ready)
                yield content
        if failures:
            raise failures[min(failures)]
    finally:
        for ours, process in workers.items():
            ours.close()
            process.kill()
        for process in workers.values():
            process.join()


def _received(connection: Connection, process: Any) -> tuple[str, Any]:
    try:
        kind, content = connection.recv()
    except (EOFError, OSError):
        process.join(10)
        raise SSDError(
            f"a worker was ended (status {process.exitcode}). If it was for memory, give fewer --jobs"
        ) from None
    return kind, content


def _serve(connection: Connection, work: Callable[..., Any], options: Any, parent: int) -> None:
    """A worker: items come and results go through ``connection``."""
    _end_with(parent)
    prepare()
    told = time.monotonic()
    bytes_read = tokens_made = 0

    def tell(num_bytes: int, num_tokens: int) -> None:
        nonlocal told, bytes_read, tokens_made
        bytes_read, tokens_made = bytes_read + num_bytes, tokens_made + num_tokens
        if time.monotonic() - told > _TELL_S:
            connection.send(("progress", (bytes_read, tokens_made)))
            told, bytes_read, tokens_made = time.monotonic(), 0, 0

    with suppress(EOFError, OSError):  # nobody is there any more
        while True:
            (item,) = connection.recv()
            try:
                result = work(item, options, tell)
            except Exception as error:
                connection.send(("error", error))
                return
            connection.send(("progress", (bytes_read, tokens_made)))
            bytes_read = tokens_made = 0
            connection.send(("done", result))


def _end_with(parent: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def prepare() -> None:
    """A process that is one of several workers: a core each, so libraries start no threads of their own; no torch."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from ssd.text.load_tokenizer import hide_torch

    hide_torch()
