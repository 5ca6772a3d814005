"""The HTTP server: ready once the engine is, and leaving in order."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from server.command.listening import BACKLOG
from server.command.progress import Progress
from server.running.engine_thread import Drained, Worker, WorkerState

if TYPE_CHECKING:
    from ssd.engine import Engine

log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""All end the server in the same order, what was learned is kept."""


def stop_signals() -> list[signal.Signals]:
    """Those that stop this process: a hang-up only where nobody had it ignored, as ``nohup`` does."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in _STOP_SIGNALS if number is not signal.SIGHUP or not is_ignored]


class HttpServer(uvicorn.Server):
    """Ends running requests when it is told to stop, and ends itself when there is no engine, or none any more."""

    def __init__(
        self,
        config: uvicorn.Config,
        worker: Worker,
        progress: Progress,
        summary: Callable[[Engine], str],
        address: str,
        shutdown_timeout_s: float,
    ) -> None:
        super().__init__(config)
        self._worker = worker
        self._progress = progress
        self._summary = summary
        self._address = address
        self._shutdown_timeout_s = shutdown_timeout_s
        self._announced = False
        self.drained: Drained | None = None
        """How requests ended, once they have."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; the event loop sets how many connections wait to how many it accepts at once, which is too few."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A first signal lets requests in flight end; a second one ends them."""
        self.force_exit = self.should_exit
        self._worker.take_no_more()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals, but do not raise them again at the end: having been told to stop is no failure."""
        for number in stop_signals():
            signal.signal(number, self.handle_exit)
        yield

    async def on_tick(self, counter: int) -> bool:
        """Several times a second: say once that the server is ready, or stop when there is no engine."""
        if self._worker.state is WorkerState.LOADING:
            self._progress.log_now_and_then()
        elif not self._announced and self._worker.state is WorkerState.READY:
            self._announced = True
            gc.freeze()  # libraries and model stay: collections need not look at them again
            facts = self._summary(self._worker.engine)
            log.info("ready after %.1f s: %s %s", self._progress.seconds, self._address, facts)
        return await super().on_tick(counter) or self._worker.state is WorkerState.FAILED

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish for a while and end the others; new ones are answered 503 meanwhile, then nobody is."""
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                connection.shutdown()  # once it is answered
        self.drained = await self._worker.drain(self._shutdown_timeout_s, lambda: self.force_exit)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn then leaves the application waiting, and its end would be logged as an error
            await self.lifespan.shutdown()
