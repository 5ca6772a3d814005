"""A TCP proxy that spoils what passes: it understands nothing but bytes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Self

from benchmarks.processes import free_port

_CHUNK = 1 << 16
_START_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What happens to bytes on their way. All of it off: they pass at once as they are."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Each chunk waits for ``delay_s`` and a random part of this; order is kept."""
    is_silent: bool = False
    """Connections are accepted, nothing passes. A connection that met it stays silent for the rest of its life."""
    is_broken_off: bool = False
    """A random part of the next answer passes, then the connection is silent for the rest of its life."""
    refuses: bool = False
    """New connections are reset."""
    flips: float = 0.0
    """Chance of one flipped bit in each chunk, both ways."""
    answer: bytes | None = None
    """Comes instead of each answer."""
    extra: bytes | None = None
    """Comes before each answer."""
    trickle_s: float = 0.0
    """Answers come one byte at a time, with this between two; to a connection that met it for the rest of its life."""
    sip_s: float = 0.0
    """Commands are passed on so."""


CLEAR = Weather()


class FaultProxy:
    """Listens on ``port`` of this machine and connects to ``target`` there, on a thread of its own.

    ``weather`` and ``target`` may be changed from any thread; a target holds for connections that come later.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self.target = target
        self.weather = CLEAR
        self.port = free_port()
        self._chance = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()
        if not self._is_started.wait(_START_S):
            raise TimeoutError("the proxy did not start")

    def cut(self, *, reset: bool = True) -> None:
        """End every connection, by RST or by FIN."""
        self._loop.call_soon_threadsafe(self._cut, reset)

    def close(self) -> None:
        """End all. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self._is_started.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            self._cut(True)
            tasks = asyncio.all_tasks(self._loop)
            for task in self._pumps:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    def _cut(self, reset: bool) -> None:
        for writer in list(self._writers):
            if reset:
                _reset(writer)
            else:
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.weather.refuses:
            _reset(writer)
            return
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            _reset(writer)
            return
        self._writers |= {writer, server}
        wire = _Wire()
        pumps = [
            asyncio.ensure_future(self._pump(reader, server, wire, is_answer=False)),
            asyncio.ensure_future(self._pump(answers, writer, wire, is_answer=True)),
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
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: _Wire, *, is_answer: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                weather = self.weather
                wire.meet(weather)
                if wire.is_silent:
                    continue
                if weather.is_broken_off and is_answer:
                    wire.is_silent = True
                    data = data[: self._chance.randrange(len(data))]
                if weather.delay_s or weather.jitter_s:
                    await asyncio.sleep(weather.delay_s + self._chance.random() * weather.jitter_s)
                data = self._spoiled(data, weather, is_answer)
                pause_s = wire.trickle_s if is_answer else wire.sip_s
                if not pause_s:
                    writer.write(data)
                for byte in data if pause_s else b"":
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(pause_s)
                await writer.drain()

    def _spoiled(self, data: bytes, weather: Weather, is_answer: bool) -> bytes:
        if is_answer and weather.answer is not None:
            return weather.answer
        if is_answer and weather.extra is not None:
            data = weather.extra + data
        if data and self._chance.random() < weather.flips:
            place = self._chance.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ 1 << self._chance.randrange(8)]) + data[place + 1 :]
        return data


class _Wire:
    """What one connection has met, which stays with it."""

    def __init__(self) -> None:
        self.is_silent = False
        self.trickle_s = self.sip_s = 0.0

    def meet(self, weather: Weather) -> None:
        self.is_silent |= weather.is_silent
        self.trickle_s = max(self.trickle_s, weather.trickle_s)
        self.sip_s = max(self.sip_s, weather.sip_s)


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
