"""Options of the network: where the service listens, with which certificate, behind which proxy, for which pages."""

from __future__ import annotations

import argparse
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.base.settings import Cors
from server.command.checked_numbers import require_seconds
from ssd.errors import ConfigError

_MOST_SHUTDOWN_TIMEOUT_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Files of a TLS server."""

    certificate: Path
    key: Path | None
    """None: in the file of the certificate."""
    authorities: Path | None
    """Who signs the clients' certificates."""
    client_certificates: ssl.VerifyMode

    def check(self) -> None:
        """Raise ConfigError where the files do not make a TLS server."""
        names = [
            ("--ssl-certfile", self.certificate),
            ("--ssl-keyfile", self.key),
            ("--ssl-ca-certs", self.authorities),
        ]
        for option, path in names:
            if path is not None and not path.is_file():
                raise ConfigError(f"{option} {path}: there is no such file")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
            if self.authorities is not None:
                context.load_verify_locations(self.authorities)
        except (ssl.SSLError, OSError) as error:
            files = " and ".join(f"{option} {path}" for option, path in names if path is not None)
            raise ConfigError(
                f"{files} cannot be used for TLS: {error.strerror or error}; give a certificate and the key it was "
                "made with, in PEM form and without a password"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Checked."""

    host: str
    port: int
    uds: Path | None
    root_path: str
    tls: TlsOptions | None
    cors: Cors
    shutdown_timeout_s: float


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """The group "network"."""
    add = parser.add_argument_group("network").add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default: %(default)s)")
    add("--port", type=_port, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)")
    add("--uds", type=Path, metavar="PATH", help="listen on a Unix domain socket at this path instead")
    add(
        "--root-path", type=_root_path, default="", metavar="PATH",
        help="path that a proxy serves this server under, /llm for instance; requests are answered with and without it",
    )  # fmt: skip
    add("--ssl-certfile", type=Path, metavar="FILE", help="certificate in PEM form: answer https alone")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="its key, where it is not in the same file")
    add("--ssl-ca-certs", type=Path, metavar="FILE", help="authorities that clients' certificates must be signed by")
    add(
        "--ssl-cert-reqs", type=int, choices=(0, 1, 2), default=0,
        help="clients' certificates: 0 not asked for, 1 checked where sent, 2 required (default: %(default)s)",
    )  # fmt: skip
    add(
        "--allowed-origins", type=_names, default=(), metavar="LIST",
        help="sites whose pages may call from a browser, as a JSON list or with commas; * for all (default: none)",
    )  # fmt: skip
    add("--allowed-methods", type=_names, default=("*",), metavar="LIST", help="methods they may use (default: all)")
    add("--allowed-headers", type=_names, default=("*",), metavar="LIST", help="headers they may send (default: all)")
    add(
        "--allow-credentials", action="store_true",
        help="they may send cookies, which no part of this server reads; not with origins *",
    )  # fmt: skip

    add(
        "--shutdown-timeout", type=float, default=30.0, metavar="SECONDS",
        help="after SIGTERM requests in flight have this long to end, while new ones are answered 503; a second signal "
        "ends them at once (default: %(default)s)",
    )  # fmt: skip


def network_options_of(found: argparse.Namespace) -> NetworkOptions:
    """What was asked for; raises ConfigError."""
    cors = Cors(
        origins=found.allowed_origins,
        methods=found.allowed_methods,
        headers=found.allowed_headers,
        credentials=found.allow_credentials,
    )
    if cors.credentials and "*" in cors.origins:
        raise ConfigError("--allow-credentials with --allowed-origins *: any page could act as its visitor; name them")
    require_seconds("--shutdown-timeout", found.shutdown_timeout, _MOST_SHUTDOWN_TIMEOUT_S)
    return NetworkOptions(
        host=found.host,
        port=found.port,
        uds=found.uds,
        root_path=found.root_path,
        tls=_tls(found),
        cors=cors,
        shutdown_timeout_s=found.shutdown_timeout,
    )


def tls_arguments(tls: TlsOptions | None) -> dict[str, Any]:
    """Keyword arguments of ``uvicorn.Config``."""
    if tls is None:
        return {}
    return {
        "ssl_certfile": str(tls.certificate),
        "ssl_keyfile": None if tls.key is None else str(tls.key),
        "ssl_ca_certs": None if tls.authorities is None else str(tls.authorities),
        "ssl_cert_reqs": tls.client_certificates,
    }


def _tls(found: argparse.Namespace) -> TlsOptions | None:
    if found.ssl_certfile is None:
        alone = [name for name in ("ssl_keyfile", "ssl_ca_certs") if getattr(found, name) is not None]
        if alone or found.ssl_cert_reqs:
            option = f"--{(alone or ['ssl_cert_reqs'])[0].replace('_', '-')}"
            raise ConfigError(f"{option} needs --ssl-certfile, the server's own certificate")
        return None
    if found.ssl_cert_reqs and found.ssl_ca_certs is None:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs: who signs the clients' certificates")
    tls = TlsOptions(
        certificate=found.ssl_certfile,
        key=found.ssl_keyfile,
        authorities=found.ssl_ca_certs,
        client_certificates=ssl.VerifyMode(found.ssl_cert_reqs),
    )
    tls.check()
    return tls


def _no_password() -> str:
    """Instead of OpenSSL's question on the terminal, which would hold up a start that nobody watches."""
    return ""


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"a port is a number within 0..65535, got {text!r}")
    return int(text)


def _root_path(text: str) -> str:
    path = text.rstrip("/")
    if path and (not path.startswith("/") or "//" in path or any(character in path for character in "?#% ")):
        raise argparse.ArgumentTypeError(f"a path begins with / and is written as the proxy gets it, got {text!r}")
    return path


def _names(text: str) -> tuple[str, ...]:
    """A JSON list of texts, as for ``vllm serve``, or texts between commas."""
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"not a JSON list: {error}") from error
    else:
        found = text.split(",")
    if not all(isinstance(name, str) for name in found):
        raise argparse.ArgumentTypeError(f"expected texts, got {text[:80]!r}")
    return tuple(name.strip() for name in found if name.strip())
