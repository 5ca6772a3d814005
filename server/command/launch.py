"""``ssd-serve``: take the port, load everything beside it, serve, and leave in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence

import uvicorn

from server.base.settings import ServerSettings
from server.command.arguments import API_KEY_VARIABLE, Options, parse_arguments
from server.command.assembly import EngineLoader, make_settings, make_tenants, watched_files
from server.endpoints.app import create_app
from server.running.engine_thread import Worker, WorkerState
from server.tenants.registry import Tenants
from server.tenants.secret import VARIABLE as SECRET_VARIABLE
from server.tenants.watch import Watch
from ssd.errors import ConfigError, SSDError
from ssd.sharing.connection import URL_VARIABLE

log = logging.getLogger(__name__)

DRAIN_S = 2.0
"""After SIGTERM, running requests may go on for this long."""
_CONNECTIONS_S = 3
"""Then connections have until here, counted from the signal too, to take what was sent."""
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
    logging.basicConfig(
        level=options.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("uvicorn", "httpx", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
    _allow_open_files()
    sys.setswitchinterval(_SWITCH_S)
    try:
        listener = listen(options.host, options.port)
        settings = make_settings(options)
        tenants = make_tenants(options, settings)
    except SSDError as error:
        return _refuse(error)
    return serve(options, settings, listener, tenants)


def _allow_open_files() -> None:
    """As many as the system allows: every mapped segment and every connection takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(options: Options, settings: ServerSettings, listener: socket.socket, tenants: Tenants) -> int:
    """Serve on a listening socket until a signal comes; returns the exit status."""
    loader = EngineLoader(options)
    tenants.sharing = lambda: loader.log
    watch = Watch(tenants, watched_files(options))
    worker = Worker(loader)
    config = uvicorn.Config(
        create_app(worker, settings, loader.sharing_stats, tenants),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_CONNECTIONS_S,
    )
    address = "http://{}:{}".format(*listener.getsockname())
    server = _Server(config, worker, f"{settings.model_name} on {address}")
    log.info("loading %s; %s answers /live now and /health once it is ready", options.model, address)
    worker.start()
    if tenants.is_closed:
        watch.start()
    try:
        server.run(sockets=[listener])
    finally:
        watch.stop()
        stopped = worker.stop(_CLOSE_S)
    if worker.load_error is not None:
        return _refuse(worker.load_error)
    status = FAILED if worker.state is WorkerState.FAILED else OK
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


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that two servers started at once cannot both believe the port is theirs."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
        ) from error
    return listener


class _Server(uvicorn.Server):
    """Ends running requests when it is told to stop, and ends itself when there is no engine, or none any more."""

    def __init__(self, config: uvicorn.Config, worker: Worker, name: str) -> None:
        super().__init__(config)
        self._worker = worker
        self._name = name
        self._announced = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals, but do not raise them again at the end: having been told to stop is no failure."""
        for number in _signals():
            signal.signal(number, self.handle_exit)
        yield

    async def on_tick(self, counter: int) -> bool:
        """Several times a second: say once that the server is ready, or stop when there is no engine."""
        if not self._announced and self._worker.state is WorkerState.READY:
            self._announced = True
            gc.freeze()  # libraries and model stay: collections need not look at them again
            log.info("ready: %s", self._name)
        return await super().on_tick(counter) or self._worker.state is WorkerState.FAILED

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish for a while and end the others, while connections close."""
        drain = asyncio.create_task(self._worker.drain(DRAIN_S))
        await super().shutdown(sockets)
        await drain


def _refuse(error: BaseException) -> int:
    """One line that says what to do; the traceback only for those who ask for it."""
    logging.getLogger(__name__).debug("could not start", exc_info=error)
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError) or "allocate memory" in message or "out of memory" in message.lower():
        message = f"not enough memory: {message}; lower --max-num-seqs, --max-model-len or --cache-tokens"
    elif not isinstance(error, SSDError):
        message = f"{type(error).__name__}: {message} (--log-level debug shows where)"
    print(f"ssd-serve: error: {message}", file=sys.stderr)
    return UNUSABLE
