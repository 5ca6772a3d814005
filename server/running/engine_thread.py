"""The thread that runs the engine, and its connection to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from server.base.errors import EngineFailed, ServerNotReady
from ssd.errors import EngineStopped

if TYPE_CHECKING:  # importing the engine imports torch, which the thread does after the port is open
    from ssd.engine import Engine, Request, RequestOutput

log = logging.getLogger(__name__)

_COMPILING_S = 5.0
"""The maximum time in seconds for which the start of the server waits for the drafting kernels to be compiled. After
this time it serves without drafts until they are compiled.
"""
_IDLE_WAIT_S = 0.25
"""The interval in seconds at which the engine's thread, while it is idle, checks whether it has to stop."""
_DRAIN_LOOK_S = 0.02
_SHUTTING_DOWN = "the server is shutting down"


class WorkerState(Enum):
    """The state of the engine's thread.

    In READY, requests are accepted. In STOPPING, running requests finish and new requests are rejected.
    """

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Drained:
    """The result of a shutdown: how many HTTP requests ended in time, how many were cut off, and how long it took."""

    num_ended: int
    num_cut: int
    seconds: float


class Inbox:
    """A queue for the outputs of some requests, from the engine's thread to one event loop. The order is kept."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[str, RequestOutput | Exception]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._arrived)

    def put(self, request_id: str, delivery: RequestOutput | Exception) -> None:
        self._arrived.append((request_id, delivery))
        _wake(self._waiter)

    async def get(self, wait_s: float | None = None) -> tuple[str, RequestOutput | Exception] | None:
        """Return the next output with its request id, or None after ``wait_s`` seconds."""
        if not self._arrived:
            self._waiter = self.loop.create_future()
            timer = None if wait_s is None else self.loop.call_later(wait_s, _wake, self._waiter)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        return self._arrived.popleft() if self._arrived else None

    def pop_all(self) -> list[RequestOutput | Exception]:
        arrived = [delivery for _, delivery in self._arrived]
        self._arrived.clear()
        return arrived


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class Worker:
    """Runs the engine on a thread of its own, and passes requests and outputs to and from event loops. Thread-safe.

    The thread calls ``load(stack)``, which must return the loaded engine. Callbacks that ``load`` adds to ``stack`` run
    at the end, after the engine was closed.
    """

    def __init__(self, load: Callable[[ExitStack], Engine]) -> None:
        self._load = load
        self.loaded_engine: Engine | None = None
        """The loaded engine, even while it is stopping or after it failed, so that its counters can be read."""
        self._inboxes: dict[str, Inbox] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._num_inside = 0
        self.hurries = False
        """Whether the grace period of the shutdown is over, so that waiting tasks must return immediately."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.state = WorkerState.LOADING
        self.load_error: BaseException | None = None
        """The exception because of which the engine could not be loaded."""

    @property
    def engine(self) -> Engine:
        """The engine, to which a request can be submitted.

        Raises ServerNotReady while the model is being loaded or the server shuts down, and EngineFailed if the engine
        failed.
        """
        if self.state is WorkerState.LOADING:
            raise ServerNotReady("the model is being loaded: try again in a moment")
        if self.hurries or (self.state is WorkerState.STOPPING and self.loaded_engine is None):
            raise ServerNotReady(_SHUTTING_DOWN)
        if self.state is WorkerState.FAILED or self.loaded_engine is None:
            raise EngineFailed("the engine has failed: see the server's log, and restart the server")
        return self.loaded_engine

    @property
    def num_requests(self) -> int:
        return len(self._inboxes)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, inbox: Inbox) -> None:
        with self._lock:
            self._inboxes[request.request_id] = inbox
        try:
            # The engine is looked up after adding the inbox, because a shutdown may have emptied the inboxes meanwhile.
            self.engine.submit(request)
        except BaseException:
            self._forget(request.request_id)
            raise

    def cancel(self, request_id: str) -> None:
        """Cancel an engine request, so that it produces no further output. Unknown and ended requests are ignored."""
        if self._forget(request_id) and self.loaded_engine is not None:
            self.loaded_engine.cancel(request_id)

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Return a context in which an HTTP request is handled, so that `drain` waits for the request.

        Raises ServerNotReady while the server shuts down.
        """
        if self.state is WorkerState.STOPPING:
            raise ServerNotReady(_SHUTTING_DOWN)
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1

    def stop_admission(self) -> None:
        """Reject new requests while requests in flight continue. Can be called from a signal handler."""
        if self.state is not WorkerState.FAILED:
            self.state = WorkerState.STOPPING

    async def drain(self, grace_s: float, hurries: Callable[[], bool] = lambda: False) -> Drained:
        """Reject new requests, let running requests finish for ``grace_s`` seconds, then cancel the remaining ones.

        ``hurries`` is polled and returns whether to end the grace period early.
        """
        self.stop_admission()
        began = time.monotonic()
        num_inside = self._num_inside
        while (self._num_inside or self._inboxes) and time.monotonic() - began < grace_s and not hurries():
            await asyncio.sleep(_DRAIN_LOOK_S)
        num_cut = self._num_inside
        self.hurries = True
        for request_id in list(self._inboxes):
            self._deliver([(request_id, EngineStopped(_SHUTTING_DOWN))])
            if self.loaded_engine is not None:
                self.loaded_engine.cancel(request_id)
        return Drained(num_inside - num_cut, num_cut, time.monotonic() - began)

    def stop(self, timeout_s: float) -> bool:
        """End the thread, which closes the engine. Returns False if it is still busy after ``timeout_s`` seconds."""
        self.stop_admission()
        self.hurries = True
        self._stop.set()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        with ExitStack() as resources:
            try:
                engine = self._load(resources)
                resources.callback(engine.close)
                engine.warm_up(_COMPILING_S)
            except BaseException as error:
                self.load_error = error
                self.state = WorkerState.FAILED
                return
            self.loaded_engine = engine
            if self.state is WorkerState.LOADING:
                self.state = WorkerState.READY
            try:
                while not self._stop.is_set():
                    if engine.wait_for_work(_IDLE_WAIT_S):
                        self._deliver([(output.request_id, output) for output in engine.step()])
                    else:
                        engine.calibrate()
            except BaseException as error:  # any error ends this thread
                self.state = WorkerState.FAILED
                log.critical("the engine failed with %d requests in flight", self.num_requests, exc_info=error)
                failure = EngineFailed("the engine failed during this request: see the server's log")
                self._deliver([(request_id, failure) for request_id in list(self._inboxes)])

    def _deliver(self, deliveries: list[tuple[str, RequestOutput | Exception]]) -> None:
        """Put outputs into the inboxes of their requests, with one thread-safe call per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Inbox, str, RequestOutput | Exception]]] = {}
        for request_id, delivery in deliveries:
            inbox = self._inboxes.get(request_id)
            if inbox is not None:  # else the client has disconnected
                by_loop.setdefault(inbox.loop, []).append((inbox, request_id, delivery))
                if isinstance(delivery, Exception) or delivery.finish_reason is not None:
                    self._forget(request_id)
        for loop, batch in by_loop.items():
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_fill, batch)

    def _forget(self, request_id: str) -> bool:
        with self._lock:
            return self._inboxes.pop(request_id, None) is not None


def _fill(batch: list[tuple[Inbox, str, RequestOutput | Exception]]) -> None:
    for inbox, request_id, delivery in batch:
        inbox.put(request_id, delivery)
