"""What somebody on the path sees of an encrypted answer: how long its records are, and when they come."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

_RECORD_BYTES = 22
"""What TLS 1.3 adds to a write: header, kind and tag."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One streamed answer: bytes of each record, and seconds from the request to its arrival."""

    sizes: tuple[int, ...]
    times: tuple[float, ...]


def watch(port: int, body: dict[str, Any], key: str | None = None) -> Trace:
    """Ask for a stream of ``/v1/completions`` and look at it as an eavesdropper does.

    The server makes one write of each group of events, and a TLS connection one record of each write: what is read here
    are the writes, told apart by the chunks of HTTP, which no eavesdropper needs. Raises OSError; ValueError where the
    answer is not a stream.
    """
    content = json.dumps({**body, "stream": True}).encode()
    secret = f"authorization: Bearer {key}\r\n" if key else ""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{secret}connection: close\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
        waiting, sizes, times = b"", [], []
        in_body = False
        while piece := connection.recv(1 << 16):
            at = time.perf_counter() - began
            waiting += piece
            if not in_body:
                answer, in_body, waiting = _cut(waiting)
                if in_body and not answer.startswith(b"HTTP/1.1 200"):
                    raise ValueError(answer.partition(b"\r\n")[0].decode())
            while in_body and (cut := waiting.find(b"\r\n")) >= 0:
                size = int(waiting[:cut], 16)
                if len(waiting) < cut + 2 + size + 2:
                    break
                waiting = waiting[cut + 2 + size + 2 :]
                if size:
                    sizes.append(size + _RECORD_BYTES)
                    times.append(at)
    return Trace(tuple(sizes), tuple(times))


def _cut(waiting: bytes) -> tuple[bytes, bool, bytes]:
    """The answer's head, whether it is whole, and what follows it."""
    head, found, rest = waiting.partition(b"\r\n\r\n")
    return (head, True, rest) if found else (b"", False, waiting)


def watch_all(
    port: int, prompts: Sequence[str], fields: dict[str, Any], key: str | None = None, *, times: int, at_once: int = 1
) -> list[tuple[int, Trace]]:
    """Every prompt so many times, round by round: (its number, what was seen)."""

    def ask(number: int) -> tuple[int, Trace]:
        return number, watch(port, {**fields, "prompt": prompts[number]}, key)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, [number for _ in range(times) for number in range(len(prompts))]))
