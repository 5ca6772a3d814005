"""Certificates that a URL names, looked at before the first connection."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from ssd.errors import ConfigError


def check_tls(options: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the option's name, where a file of a connection's TLS cannot be used.

    ``options`` : ssl_ca_certs, ssl_ca_path, ssl_certfile, ssl_keyfile and ssl_password are read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca_certs, ca_path = options.get("ssl_ca_certs"), options.get("ssl_ca_path")
    certificate, key = options.get("ssl_certfile"), options.get("ssl_keyfile")
    if ca_certs is not None or ca_path is not None:
        try:
            context.load_verify_locations(ca_certs, ca_path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"ssl_ca_certs={ca_certs or ca_path} cannot be used: {_reason(error)}") from None
    if key is not None and certificate is None:
        raise ConfigError(f"ssl_keyfile={key} is of no use without ssl_certfile")
    if certificate is not None:
        try:
            # A function, as a password that is not given would be asked for at the terminal.
            context.load_cert_chain(certificate, key, lambda: options.get("ssl_password") or "")
        except (OSError, ValueError) as error:
            files = f"ssl_certfile={certificate}" + (f" with ssl_keyfile={key}" if key is not None else "")
            raise ConfigError(f"{files} cannot be used: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"{error.reason or 'not in PEM form'}, are these PEM files, of one pair, and is ssl_password right?"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
