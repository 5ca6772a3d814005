"""The listening socket, the limit of open files, and the HTTP server with its graceful shutdown."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from server.base.settings import ServerSettings
from server.command.options import NetworkOptions
from server.observe.logs import Fields
from server.running.engine_thread import Drained, Worker, WorkerState
from ssd.errors import ConfigError

if TYPE_CHECKING:
    from ssd.engine import Engine

log = logging.getLogger(__name__)


BACKLOG = 2048


def listen(options: NetworkOptions) -> socket.socket:
    """Open the server's listening socket. Raises ConfigError if the address is in use or invalid."""
    address: Any
    if options.uds is not None:
        family, address, remedy = socket.AF_UNIX, os.fspath(options.uds), "choose another path"
        place = f"--uds {options.uds}"
    else:
        try:
            family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            raise ConfigError(f"--host {options.host} is not an address of this machine: {error.strerror}") from error
        place, remedy = f"{options.host} port {options.port}", "choose another with --port"
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if options.uds is not None:
            _remove_stale_socket(options.uds)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {place}: {error.strerror or error}; {remedy}") from error
    return listener


def url_of(listener: socket.socket, options: NetworkOptions) -> str:
    scheme = "http" if options.ssl_certfile is None else "https"
    if options.uds is not None:
        return f"{scheme}+unix://{options.uds}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{options.root_path}"


def tls_arguments(options: NetworkOptions) -> dict[str, Any]:
    """Return the TLS arguments for ``uvicorn.Config``; empty if the server uses plain HTTP."""
    if options.ssl_certfile is None:
        return {}
    return {
        "ssl_certfile": str(options.ssl_certfile),
        "ssl_keyfile": None if options.ssl_keyfile is None else str(options.ssl_keyfile),
        "ssl_ca_certs": None if options.ssl_ca_certs is None else str(options.ssl_ca_certs),
        "ssl_cert_reqs": ssl.VerifyMode(options.ssl_cert_reqs),
    }


def check_tls(options: NetworkOptions) -> None:
    """Raise ConfigError if the TLS files cannot be used, and log a warning if clients would reject the certificate."""
    if options.ssl_certfile is None:
        return
    named = {
        "--ssl-certfile": options.ssl_certfile,
        "--ssl-keyfile": options.ssl_keyfile,
        "--ssl-ca-certs": options.ssl_ca_certs,
    }
    for option, path in named.items():
        if path is not None and not path.is_file():
            raise ConfigError(f"{option} {path}: there is no such file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    reasons: list[str] = []

    def password() -> str:
        """Return an empty password, so that OpenSSL does not ask for a password on the terminal."""
        reasons.append("the key has a password")
        return ""

    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password)
        if options.ssl_ca_certs is not None:
            context.load_verify_locations(options.ssl_ca_certs)
    except (ssl.SSLError, OSError) as error:
        files = " and ".join(f"{option} {path}" for option, path in named.items() if path is not None)
        raise ConfigError(
            f"{files} cannot be used for TLS: {(*reasons, error.strerror or error)[0]}; give a certificate and its "
            "private key, in PEM form and without a password"
        ) from error
    if (fault := _fault_for_clients(context, options.ssl_certfile)) is not None:
        log.warning("--ssl-certfile %s: clients will reject the certificate, %s", options.ssl_certfile, fault)


def _fault_for_clients(context: ssl.SSLContext, certificate: Path) -> str | None:
    """Return the reason why clients would reject a TLS certificate; None if they accept it.

    A client that trusts this certificate does a handshake with the server in memory.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = trusting.wrap_bio(to_client, to_server), context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
    return None


def remove_socket_file(options: NetworkOptions) -> None:
    if options.uds is not None:
        with contextlib.suppress(OSError):
            options.uds.unlink()


def _remove_stale_socket(path: Path) -> None:
    """Remove a Unix domain socket's file if no process listens on it, because it would block the path."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1)
                try:
                    probe.connect(os.fspath(path))
                except ConnectionRefusedError:
                    path.unlink()


_OWN_FILES = 1024
"""The number of file descriptors that connections may not use, because the cache, Redis and logs need some."""


def fit_open_files(settings: ServerSettings) -> ServerSettings:
    """Raise the process's limit of open files, and reduce the maximum number of connections if it is still too low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = allowed - min(_OWN_FILES, allowed // 2)
    if allowed == resource.RLIM_INFINITY or settings.limits.max_connections <= most:
        return settings
    log.warning(
        "the limit of %d open files allows at most %d connections: raise the limit (ulimit -n) if more are needed",
        allowed,
        most,
    )
    return replace(settings, limits=replace(settings.limits, max_connections=most))


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop the server. SIGHUP is included unless ``nohup`` made the process ignore it."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


_LOADING_GC_THRESHOLD = 50_000
"""The garbage collection threshold while the server is loading, in new objects.

Importing torch and transformers creates 400,000 permanent objects. With Python's default threshold, a fifth of the
import time was spent on garbage collection.
"""


class HttpServer(uvicorn.Server):
    """A uvicorn server that finishes running requests when it is stopped, and stops if the engine fails."""

    def __init__(
        self,
        config: uvicorn.Config,
        worker: Worker,
        summary: Callable[[Engine], dict[str, object]],
        address: str,
        shutdown_timeout_s: float,
    ) -> None:
        super().__init__(config)
        self._worker, self._summary, self._address = worker, summary, address
        self._shutdown_timeout_s = shutdown_timeout_s
        self._began, self._announced = time.monotonic(), False
        self._gc_thresholds = gc.get_threshold()
        gc.set_threshold(_LOADING_GC_THRESHOLD)
        self.drained: Drained | None = None
        """The numbers of requests that ended or were cut off during the shutdown; None before the shutdown."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and then enlarge the queue of connections that are not accepted yet to ``BACKLOG``.

        Uvicorn's setting ``backlog`` is smaller, because asyncio also uses it as the number of connections that it
        accepts in one step.
        """
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start a graceful shutdown at the first signal, and cancel requests in flight at the second."""
        self.force_exit = self.should_exit
        self._worker.stop_admission()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle stop signals. Unlike uvicorn, do not raise them again at the end, so that the exit status is 0."""
        for number in stop_signals():
            signal.signal(number, self.handle_exit)
        yield

    async def on_tick(self, counter: int) -> bool:
        """Log once that the server is ready. If the engine has failed, return True, which stops the server.

        Uvicorn calls this method several times a second.
        """
        if not self._announced and self._worker.state is WorkerState.READY:
            self._announced = True
            gc.freeze()  # libraries and model stay: collections need not look at them again
            gc.set_threshold(*self._gc_thresholds)
            engine = self._worker.engine
            active, reason = engine.speculation
            drafting = "speculation is active" if active else f"no speculation yet: {reason}"
            if not (active or engine.is_speculating):
                drafting = reason
            log.info("ready after %.1f s: %s (%s)", time.monotonic() - self._began, self._address, drafting)
            log.debug(Fields("configuration", **self._summary(engine)))
        return await super().on_tick(counter) or self._worker.state is WorkerState.FAILED

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish for ``--shutdown-timeout`` while new requests get 503, then cancel the rest and close."""
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                connection.shutdown()  # closes the connection after the response
        self.drained = await self._worker.drain(self._shutdown_timeout_s, lambda: self.force_exit)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn then leaves the application waiting, and its end would be logged as an error
            await self.lifespan.shutdown()
