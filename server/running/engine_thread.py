"""The engine's thread, and the bridge between it and the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from server.base.errors import EngineFailed, ServerNotReady
from ssd.errors import EngineStopped

if TYPE_CHECKING:  # the engine brings torch, which is loaded by the thread, after the port has been taken
    from ssd.engine import Engine, Request, RequestOutput

log = logging.getLogger(__name__)

_COMPILING_S = 5.0
"""How long a start waits for the kernels that draft, before it answers without them."""
_IDLE_WAIT_S = 0.25
"""How long an idle engine thread sleeps before it looks whether it shall stop."""
_DRAIN_LOOK_S = 0.02
_SHUTTING_DOWN = "the server is shutting down"


class WorkerState(Enum):
    """Only READY takes requests; STOPPING ends those it has taken."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Drained:
    """How the requests ended that were under way when the service was told to stop."""

    num_ended: int
    num_cut: int
    seconds: float


class Inbox:
    """Where the outputs of some requests arrive, in order, on one event loop."""

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
        """The next that arrived, None after ``wait_s``. A queue and a timeout of asyncio's take twice as long."""
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

    def take_all(self) -> list[RequestOutput | Exception]:
        """What has arrived and was not looked at."""
        arrived = [delivery for _, delivery in self._arrived]
        self._arrived.clear()
        return arrived


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class Worker:
    """Loads an engine on a thread of its own and steps it there until told to stop. Safe from any thread."""

    def __init__(self, load: Callable[[ExitStack], Engine]) -> None:
        """``load`` : returns the engine, not yet warmed up; gives the stack what must be closed after it."""
        self._load = load
        self.loaded_engine: Engine | None = None
        """In whatever state, for reading counters."""
        self._inboxes: dict[str, Inbox] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._num_inside = 0
        self.hurries = False
        """What is under way has no time left to wait for anything."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.state = WorkerState.LOADING
        self.load_error: BaseException | None = None
        """Why the engine could not be loaded; a failure later is logged."""

    @property
    def engine(self) -> Engine:
        """The engine for requests that were let in; raises ServerNotReady or EngineFailed else."""
        if self.state is WorkerState.LOADING:
            raise ServerNotReady("the model is being loaded: try again in a moment")
        if self.hurries or (self.state is WorkerState.STOPPING and self.loaded_engine is None):
            raise ServerNotReady(_SHUTTING_DOWN)
        if self.state is WorkerState.FAILED or self.loaded_engine is None:
            raise EngineFailed("the engine has failed; the server must be restarted, its log says why")
        return self.loaded_engine

    @property
    def num_requests(self) -> int:
        return len(self._inboxes)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, inbox: Inbox) -> None:
        """Hand a request over; its outputs come to ``inbox``. Where it raises nothing will come."""
        with self._lock:
            self._inboxes[request.request_id] = inbox
        try:
            # Looked for only now: whoever ends all requests may have been through the inboxes already.
            self.engine.submit(request)
        except BaseException:
            self._forget(request.request_id)
            raise

    def cancel(self, request_id: str) -> None:
        """End a request; nothing more comes for it. Unknown and finished requests are ignored."""
        if self._forget(request_id) and self.loaded_engine is not None:
            self.loaded_engine.cancel(request_id)

    def let_in(self) -> None:
        """Count a request until `let_out`, on the event loop; raises ServerNotReady once nobody new is taken."""
        if self.state is WorkerState.STOPPING:
            raise ServerNotReady(_SHUTTING_DOWN)
        self._num_inside += 1

    def let_out(self) -> None:
        """A request that was let in has its answer."""
        self._num_inside -= 1

    def take_no_more(self) -> None:
        """From now on nobody is let in; who is inside goes on. May be called by a signal's handler."""
        if self.state is not WorkerState.FAILED:
            self.state = WorkerState.STOPPING

    async def drain(self, grace_s: float, hurries: Callable[[], bool] = lambda: False) -> Drained:
        """Take no more requests, let those inside finish for a while, unless it ``hurries``, then end the rest."""
        self.take_no_more()
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
        """End the thread, which closes the engine; False when it is still busy after the timeout."""
        self.take_no_more()
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
            except BaseException as error:  # whatever it is, this thread ends here
                self.state = WorkerState.FAILED
                log.critical("the engine failed with %d requests in flight", self.num_requests, exc_info=error)
                failure = EngineFailed("the engine failed while it worked on this request; the server's log says why")
                self._deliver([(request_id, failure) for request_id in list(self._inboxes)])

    def _deliver(self, deliveries: list[tuple[str, RequestOutput | Exception]]) -> None:
        """Wake each event loop once, however many requests got something."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Inbox, str, RequestOutput | Exception]]] = {}
        for request_id, delivery in deliveries:
            inbox = self._inboxes.get(request_id)
            if inbox is not None:  # else the client has gone
                by_loop.setdefault(inbox.loop, []).append((inbox, request_id, delivery))
                if isinstance(delivery, Exception) or delivery.finish_reason is not None:
                    self._forget(request_id)
        for loop, batch in by_loop.items():
            with suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
                loop.call_soon_threadsafe(_fill, batch)

    def _forget(self, request_id: str) -> bool:
        with self._lock:
            return self._inboxes.pop(request_id, None) is not None


def _fill(batch: list[tuple[Inbox, str, RequestOutput | Exception]]) -> None:
    for inbox, request_id, delivery in batch:
        inbox.put(request_id, delivery)
