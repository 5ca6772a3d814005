"""``ssd-serve``: take the port, load everything beside it, serve, and leave in order."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from server.base.settings import ServerSettings
from server.command.arguments import Options, parse_arguments
from server.command.assembly import EngineLoader, make_settings, make_tenants, watched_files
from server.command.checks import check_before_loading
from server.command.listening import BACKLOG, give_up, listen, url_of
from server.command.network_options import tls_arguments
from server.command.progress import Progress
from server.command.service_options import API_KEY_VARIABLE
from server.command.summary import summary_of
from server.endpoints.app import create_app
from server.intake.connections import protocol_within
from server.observe.logs import set_up_logging
from server.observe.spans import Spans, make_spans
from server.running.engine_thread import Drained, Worker, WorkerState
from server.tenants.registry import Tenants
from server.tenants.secret import VARIABLE as SECRET_VARIABLE
from server.tenants.watch import Watch
from ssd.errors import SSDError
from ssd.sharing.connection import URL_VARIABLE

if TYPE_CHECKING:
    from ssd.engine import Engine

log = logging.getLogger(__name__)

_CONNECTIONS_S = 3
"""Once all requests have ended or were cut, connections have this long to take what was sent."""
_OWN_FILES = 1024
"""Open files that are not for connections."""
_ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before others have their turn on the event loop."""
_CLOSE_S = 1.5
"""Time for the engine's thread to close the cache."""

_SWITCH_S = 0.0005
"""How long a thread that computes in Python may keep the interpreter from the others. The engine gives it up at every
operation of torch and waits so long to have it back: with Python's 5 ms an answer of many log-probabilities, written
on a thread of its own, kept other streams waiting for a second."""

OK, FAILED, UNUSABLE = 0, 1, 2
"""Exit statuses: told to stop; the engine ended while serving; could not be started."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""All end the server in the same order, what was learned is kept."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit status."""
    for number in _signals():
        if number is not signal.SIGINT:
            signal.signal(number, lambda *_: sys.exit(OK))
    options = parse_arguments(arguments)
    for secret in (API_KEY_VARIABLE, SECRET_VARIABLE, URL_VARIABLE):
        os.environ.pop(secret, None)  # no child needs it
    set_up_logging(options.observe.log_level, options.observe.log_format)
    num_files = _allow_open_files()
    sys.setswitchinterval(_SWITCH_S)
    try:
        listener = listen(options.network)
        check_before_loading(options)
        settings = _within_files(make_settings(options), num_files)
        tenants = make_tenants(options, settings)
        endpoint = options.observe.otlp_traces_endpoint
        spans = None if endpoint is None else make_spans(endpoint)
    except SSDError as error:
        return _refuse(error)
    try:
        return serve(options, settings, listener, tenants, spans)
    finally:
        if spans is not None:
            spans.close()


def _allow_open_files() -> int:
    """As many as the system allows: every mapped segment and every connection takes one. Returns how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return allowed if allowed != resource.RLIM_INFINITY else sys.maxsize


def _within_files(settings: ServerSettings, num_files: int) -> ServerSettings:
    """Connections must leave files to the cache, its worker and Redis."""
    most = num_files - min(_OWN_FILES, num_files // 2)
    if settings.limits.max_connections <= most:
        return settings
    log.warning("%d open files are allowed: at most %d connections are taken (ulimit -n)", num_files, most)
    return replace(settings, limits=replace(settings.limits, max_connections=most))


def serve(
    options: Options, settings: ServerSettings, listener: socket.socket, tenants: Tenants, spans: Spans | None = None
) -> int:
    """Serve on a listening socket until a signal comes; returns the exit status."""
    loader = EngineLoader(options)
    tenants.sharing = lambda: loader.log
    watch = Watch(tenants, watched_files(options))
    worker = Worker(loader)
    config = uvicorn.Config(
        create_app(worker, settings, loader.sharing_stats, tenants, spans),
        log_config=None,
        access_log=False,
        http=protocol_within(settings.limits),
        ws="none",
        backlog=_ACCEPTED_AT_ONCE,
        timeout_keep_alive=math.ceil(settings.limits.max_idle_seconds),
        timeout_graceful_shutdown=_CONNECTIONS_S,
        **tls_arguments(options.network.tls),
    )
    address = url_of(listener, options.network)
    timeout_s = options.network.shutdown_timeout_s

    def summary(engine: Engine) -> str:
        return summary_of(engine, options, settings, len(tenants.accounts()))

    server = _Server(config, worker, loader.progress, summary, address, timeout_s)
    log.info("loading %s; %s answers /live now and /health once it is ready", options.model.path, address)
    worker.start()
    if tenants.is_closed:
        watch.start()
    try:
        server.run(sockets=[listener])
    finally:
        watch.stop()
        stopped = worker.stop(_CLOSE_S)
        give_up(options.network)
    if worker.load_error is not None:
        return _refuse(worker.load_error)
    status = FAILED if worker.state is WorkerState.FAILED else OK
    if (drained := server.drained) is not None:
        log.info(
            "stopped: %d requests in flight ended, %d were cut after %.1f s; what was learned is %s",
            drained.num_ended, drained.num_cut, drained.seconds, "sealed" if stopped else "still being sealed",
        )  # fmt: skip
    if not stopped:
        # The thread is inside a long call of a library's; it cannot be interrupted, and nothing waits for it.
        log.warning("left before the engine had stopped")
        logging.shutdown()
        os._exit(status)
    return status


def _signals() -> list[signal.Signals]:
    """Those that stop this process: a hang-up only where nobody had it ignored, as ``nohup`` does."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in _STOP_SIGNALS if number is not signal.SIGHUP or not is_ignored]


class _Server(uvicorn.Server):
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
        for number in _signals():
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


def _refuse(error: BaseException) -> int:
    """One line that says what to do; the traceback only for those who ask for it."""
    logging.getLogger(__name__).debug("could not start", exc_info=error)
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError) or "allocate memory" in message or "out of memory" in message.lower():
        message = f"not enough memory: {message}; lower --max-num-seqs, --max-model-len or --cache-tokens"
    elif not isinstance(error, SSDError):
        message = f"{type(error).__name__}: {message} (--log-level debug shows where)"
    for handler in logging.getLogger().handlers:
        handler.flush()  # what was logged before comes before
    print(f"ssd-serve: error: {message}", file=sys.stderr)
    return UNUSABLE
