"""A TCP proxy that delays, damages or drops the bytes that pass it, independent of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Self

from benchmarks.servers import free_port

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFault:
    """A fault of the connections through a `FaultProxy`. By default, all bytes pass unchanged and at once.

    Attributes:
        delay_s: The delay of each chunk; chunks stay in order.
        jitter_s: The maximum of a random delay in addition.
        is_silent: Connections are accepted, but no bytes pass. Such a connection stays silent after the fault is over.
        is_broken_off: A random part of the next response passes, then nothing, even after the fault is over.
        refuses: New connections are reset.
        flips: The probability of one flipped bit in each chunk.
        answer: The bytes that replace each response.
        extra: The bytes that precede each response.
        trickle_s: The pause between two bytes of a response. The connection stays slow after the fault is over.
        sip_s: The pause between two bytes of a command. The connection stays slow after the fault is over.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    is_silent: bool = False
    is_broken_off: bool = False
    refuses: bool = False
    flips: float = 0.0
    answer: bytes | None = None
    extra: bytes | None = None
    trickle_s: float = 0.0
    sip_s: float = 0.0


NO_FAULT = LinkFault()


class FaultProxy:
    """A TCP proxy on this machine from ``port`` to the port ``target``, on its own thread. A context manager.

    ``fault`` and ``target`` may be changed from any thread. A new target applies to new connections.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self.target = target
        self.fault = NO_FAULT
        self.port = free_port()
        self._chance = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        is_started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(is_started,), name="fault-proxy", daemon=True)
        self._thread.start()
        if not is_started.wait(10.0):
            raise TimeoutError("the proxy did not start")

    def cut(self, *, reset: bool = True) -> None:
        """Close every connection: with a TCP reset, or regularly."""
        self._loop.call_soon_threadsafe(self._cut, reset)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, is_started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        is_started.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            self._cut(True)
            for pump in self._pumps:  # the tasks that wait for them end by themselves
                pump.cancel()
            self._loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self._loop), return_exceptions=True))
            self._loop.close()

    def _cut(self, reset: bool) -> None:
        for writer in list(self._writers):
            _reset(writer) if reset else writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.fault.refuses:
                raise ConnectionRefusedError
            answers, server = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            _reset(writer)
            return
        self._writers |= {writer, server}
        link = _Link()
        pumps = [
            asyncio.ensure_future(self._pump(reader, server, link, is_answer=False)),
            asyncio.ensure_future(self._pump(answers, writer, link, is_answer=True)),
        ]
        self._pumps.update(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            self._pumps.difference_update(pumps)
            self._writers -= {writer, server}
            for one in (writer, server):
                with contextlib.suppress(Exception):
                    one.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link, *, is_answer: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                fault = self.fault
                link.apply(fault)
                if link.is_silent:
                    continue
                if fault.is_broken_off and is_answer:
                    link.is_silent = True
                    data = data[: self._chance.randrange(len(data))]
                if fault.delay_s or fault.jitter_s:
                    await asyncio.sleep(fault.delay_s + self._chance.random() * fault.jitter_s)
                data = self._damaged(data, fault, is_answer)
                pause_s = link.trickle_s if is_answer else link.sip_s
                if not pause_s:
                    writer.write(data)
                for byte in data if pause_s else b"":
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(pause_s)
                await writer.drain()

    def _damaged(self, data: bytes, fault: LinkFault, is_answer: bool) -> bytes:
        if is_answer and fault.answer is not None:
            return fault.answer
        if is_answer and fault.extra is not None:
            data = fault.extra + data
        if data and self._chance.random() < fault.flips:
            place = self._chance.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ 1 << self._chance.randrange(8)]) + data[place + 1 :]
        return data


class _Link:
    """The faults that stay on one connection of a `FaultProxy` after the proxy's own fault is over."""

    is_silent = False
    trickle_s = sip_s = 0.0

    def apply(self, fault: LinkFault) -> None:
        self.is_silent |= fault.is_silent
        self.trickle_s = max(self.trickle_s, fault.trickle_s)
        self.sip_s = max(self.sip_s, fault.sip_s)


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
