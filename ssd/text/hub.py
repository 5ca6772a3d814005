"""Whether the Hugging Face hub can be reached: its own clients try for most of a minute, and say so line by line."""

from __future__ import annotations

import os
import socket
import sys
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_PATIENCE_S = 3.0


def is_offline() -> bool:
    """Whether the environment forbids to ask the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def go_offline_without_a_hub() -> str | None:
    """Spare everything in this process its many attempts where nothing takes a connection; why, or None."""
    if is_offline():
        return None
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    proxy = None if proxy_bypass(host) else getproxies().get(parts.scheme)
    if proxy is not None:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    failure = _failure_to_connect(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    if failure is None:
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]  # read from the environment only once
    return f"{endpoint} cannot be reached ({failure})"


def _failure_to_connect(host: str, port: int) -> str | None:
    """Why no connection could be made within ``_PATIENCE_S``; None where one could."""
    failures: list[str | None] = ["no answer"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=_PATIENCE_S).close()
            failures[0] = None
        except OSError as error:
            failures[0] = error.strerror or str(error)

    # On a thread: asking for an address may take longer, and cannot be given up.
    thread = threading.Thread(target=connect, name="hub", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return failures[0]
