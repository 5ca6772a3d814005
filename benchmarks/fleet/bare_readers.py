"""Readers of a stream that do nothing with what they read, many in one process.

``python -m benchmarks.fleet.bare_readers PORT READERS PAUSE_S`` says ``ready``, reads until its standard input ends,
and prints how many entries came in all.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from typing import Any, Final

from ssd.sharing.connection import BLOCK_MS
from ssd.sharing.stream import PAGE

KEY: Final = "ssd:1:{load}"


class _Reader:
    """One connection that reads a stream, an id after the other."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port))
        self.connection.setblocking(False)
        self.due = 0.0
        self._data = b""
        self._last = b"0-0"

    def ask(self) -> None:
        words = [b"XREAD", b"COUNT", b"%d" % PAGE, b"BLOCK", b"%d" % BLOCK_MS, b"STREAMS", KEY.encode(), self._last]
        self.connection.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words))

    def take(self) -> int | None:
        """Entries of a reply, None where it has not come whole."""
        self._data += self.connection.recv(1 << 20)
        parsed = _parse(self._data, 0)
        if parsed is None:
            return None
        answer, self._data = parsed[0], b""
        if not answer:
            return 0
        entries = answer[0][1]
        self._last = entries[-1][0]
        return len(entries)


def _parse(data: bytes, at: int) -> tuple[Any, int] | None:
    end = data.find(b"\r\n", at)
    if end < 0:
        return None
    kind, number = data[at : at + 1], data[at + 1 : end]
    if kind == b"$":
        stop = end + 2 + int(number)
        return (data[end + 2 : stop], stop + 2) if len(data) >= stop + 2 else None
    found, place = [], end + 2
    for _ in range(max(0, int(number))):
        item = _parse(data, place)
        if item is None:
            return None
        found.append(item[0])
        place = item[1]
    return found, place


def _read(port: int, readers: int, pause_s: float) -> None:
    """The readers' process: says that it is ready, and at the end how many entries came in all."""
    chosen = selectors.DefaultSelector()
    waiting: list[_Reader] = []
    for _ in range(readers):
        reader = _Reader(port)
        chosen.register(reader.connection, selectors.EVENT_READ, reader)
        reader.ask()
    chosen.register(sys.stdin, selectors.EVENT_READ, None)
    print("ready", flush=True)
    delivered, goes_on = 0, True
    while goes_on:
        now = time.monotonic()
        for reader in [reader for reader in waiting if reader.due <= now]:
            waiting.remove(reader)
            reader.ask()
        for key, _ in chosen.select(0.005 if waiting else 0.1):
            if key.data is None:
                goes_on = False
            elif (count := key.data.take()) is not None:
                delivered += count
                key.data.due = now + pause_s
                if count and pause_s:
                    waiting.append(key.data)
                else:
                    key.data.ask()
    print(delivered, flush=True)


if __name__ == "__main__":
    _read(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
