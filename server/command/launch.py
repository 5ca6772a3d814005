"""``ssd-serve``: take the port, load everything beside it, serve, and leave in order."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvicorn

from server.base.settings import ServerSettings
from server.command.arguments import Options, parse_arguments
from server.command.assembly import EngineLoader, make_settings, make_tenants, read_secret, watched_files
from server.command.checks import check_before_loading
from server.command.http_server import HttpServer, stop_signals
from server.command.listening import give_up, listen, url_of
from server.command.network_options import tls_arguments
from server.command.open_files import allow_open_files, within_files
from server.command.service_options import API_KEY_VARIABLE
from server.command.summary import summary_of
from server.endpoints.app import create_app
from server.intake.connections import protocol_within
from server.observe.logs import set_up_logging
from server.observe.spans import Spans, make_spans
from server.running.engine_thread import Worker, WorkerState
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit status."""
    for number in stop_signals():
        if number is not signal.SIGINT:
            signal.signal(number, lambda *_: sys.exit(OK))
    options = parse_arguments(arguments)
    for variable in (API_KEY_VARIABLE, SECRET_VARIABLE, URL_VARIABLE):
        os.environ.pop(variable, None)  # no child needs it
    set_up_logging(options.observe.log_level, options.observe.log_format)
    num_files = allow_open_files()
    sys.setswitchinterval(_SWITCH_S)
    try:
        listener = listen(options.network)
        check_before_loading(options)
        settings = within_files(make_settings(options), num_files)
        secret = read_secret(options)
        tenants = make_tenants(options, settings, secret)
        endpoint = options.observe.otlp_traces_endpoint
        spans = None if endpoint is None else make_spans(endpoint)
    except SSDError as error:
        return _refuse(error)
    try:
        return serve(options, settings, listener, tenants, secret, spans)
    finally:
        if spans is not None:
            spans.close()


def serve(
    options: Options,
    settings: ServerSettings,
    listener: socket.socket,
    tenants: Tenants,
    secret: bytes | None = None,
    spans: Spans | None = None,
) -> int:
    """Serve on a listening socket until a signal comes; returns the exit status. ``secret`` : that was given."""
    loader = EngineLoader(options, secret)
    tenants.sharing = lambda: loader.log
    watch = Watch(tenants, watched_files(options))
    worker = Worker(loader)
    config = uvicorn.Config(
        create_app(worker, settings, loader.sharing_stats, tenants, spans),
        log_config=None,
        access_log=False,
        http=protocol_within(settings.limits),
        ws="none",
        loop="asyncio",  # uvloop keeps the interpreter from the engine while it writes: 3 % fewer tokens/s
        backlog=_ACCEPTED_AT_ONCE,
        timeout_keep_alive=math.ceil(settings.limits.max_idle_seconds),
        timeout_graceful_shutdown=_CONNECTIONS_S,
        **tls_arguments(options.network.tls),
    )
    address = url_of(listener, options.network)
    timeout_s = options.network.shutdown_timeout_s

    def summary(engine: Engine) -> str:
        return summary_of(engine, options, settings, len(tenants.accounts()), loader.noise.root)

    server = HttpServer(config, worker, loader.progress, summary, address, timeout_s)
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
