"""The process that sorts merged text at low priority, and the server's side of it: start, ask, restart, stop.

Through its pipes go a number and int32 tokens, and back as many int32 of their order. It opens no file.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from ssd.errors import StoreUnavailable
from ssd.retrieval.segment import Tokens, own_pages
from ssd.retrieval.suffix_array import build_order

log = logging.getLogger(__name__)

_PACKAGE_ROOT: Final = Path(__file__).resolve().parents[2]
_ATTEMPTS: Final = 2  # a text that ends the process twice is given back, and no other is taken for a while
_FIRST_PAUSE_S: Final = 10.0  # doubles every time
_LONGEST_PAUSE_S: Final = 300.0
_PATIENCE_S: Final = 30.0  # sorting may take so long, and so much more for each token: thirty times what it does take
_PATIENCE_PER_TOKEN_S: Final = 2e-5
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)


class MergeWorker:
    """One rebuild process and the thread that talks to it. Texts are sorted one at a time, in order."""

    def __init__(self) -> None:
        """The process starts with the first text."""
        self.num_restarts = 0
        """How often it ended without an answer, or gave none in good time: 30 s and 20 us a token."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        self._pause_s = _FIRST_PAUSE_S
        self._refused_until = 0.0
        # The process dies with the thread that started it (that is what prctl watches): one thread for all its life.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ssd-merge")

    @property
    def process_id(self) -> int | None:
        """The process's id, None when none runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def submit(self, tokens: Tokens) -> Future[Tokens]:
        """The order of ``tokens``, see ``build_order``; fails with StoreUnavailable where nobody sorts them."""
        try:
            return self._thread.submit(self._sorted, tokens)
        except RuntimeError:  # it is closed
            future: Future[Tokens] = Future()
            future.set_exception(StoreUnavailable("the rebuild process is stopped"))
            return future

    def close(self) -> None:
        """Stop the process, abandoning what it sorts; what waits fails."""
        self._is_stopping = True
        if (process := self._process) is not None:
            process.kill()
        self._thread.shutdown()  # what waits sees that it stops
        self._end()

    def _sorted(self, tokens: Tokens) -> Tokens:
        for attempt in range(_ATTEMPTS):
            if self._is_stopping or time.monotonic() < self._refused_until:
                break
            with contextlib.suppress(OSError, MemoryError):
                order = self._ask(tokens)
                if order is not None:
                    self._pause_s = _FIRST_PAUSE_S
                    return order
            self._end()
            if self._is_stopping:
                break
            self.num_restarts += 1
            log.warning("rebuild process ended unexpectedly, or gave no answer in good time")
            if attempt == _ATTEMPTS - 1:
                self._refused_until = time.monotonic() + self._pause_s
                self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        raise StoreUnavailable("the rebuild process does not run; segments are merged inside the server")

    def _ask(self, tokens: Tokens) -> Tokens | None:
        """None when the process ended without an answer, or was killed for giving none."""
        if self._process is None:
            # The process must find this very package, however the parent found it.
            paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ssd.retrieval.merge_worker", str(os.getpid())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        watchdog = threading.Timer(_PATIENCE_S + _PATIENCE_PER_TOKEN_S * len(tokens), process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            if self._is_stopping:  # close() may have looked for it just before
                return None
            process.stdin.write(len(tokens).to_bytes(8, "little"))
            process.stdin.write(tokens.data)
            process.stdin.flush()
            order = own_pages(len(tokens))
            num_read = process.stdout.readinto(order.data)  # type: ignore[attr-defined]
            return order if num_read == order.nbytes else None
        finally:
            watchdog.cancel()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()


def _give_back_memory() -> None:
    """What sorting took: or glibc keeps up to 64 MB of it until the next time."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def main() -> None:
    """Sort until standard input ends, or the parent, whose process id is the one argument, dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C on the terminal is the server's to handle
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody reads the answers any more
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it died before the call
        return
    os.nice(10)
    while header := sys.stdin.buffer.read(8):
        tokens = np.frombuffer(sys.stdin.buffer.read(4 * int.from_bytes(header, "little")), np.int32)
        sys.stdout.buffer.write(build_order(tokens).data)
        sys.stdout.buffer.flush()
        del tokens
        _give_back_memory()


if __name__ == "__main__":
    main()
