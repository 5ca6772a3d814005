"""The socket that the service listens on, taken before anything is loaded."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from server.command.network_options import NetworkOptions
from ssd.errors import ConfigError

BACKLOG = 2048
"""Connections that the system holds until they are accepted."""


def listen(options: NetworkOptions) -> socket.socket:
    """A listening socket, so that two servers started at once cannot both believe the place is theirs.

    Raises ConfigError.
    """
    return _listen_at_port(options.host, options.port) if options.uds is None else _listen_at_path(options.uds)


def url_of(listener: socket.socket, options: NetworkOptions) -> str:
    """Where the service is, as a client or a browser is told."""
    scheme = "http" if options.tls is None else "https"
    if options.uds is not None:
        return f"{scheme}+unix://{options.uds}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{options.root_path}"


def give_up(options: NetworkOptions) -> None:
    """Remove the path of a Unix domain socket, as the last thing."""
    if options.uds is not None:
        with contextlib.suppress(OSError):
            options.uds.unlink()


def _listen_at_port(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
        ) from error
    return listener


def _listen_at_path(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_left_behind(path)
        listener.bind(os.fspath(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}; choose another path") from error
    return listener


def _remove_left_behind(path: Path) -> None:
    """A socket that nobody listens on any more would keep its path; anything else stays, and is in the way."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1)
                try:
                    probe.connect(os.fspath(path))
                except ConnectionRefusedError:
                    path.unlink()
