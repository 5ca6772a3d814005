"""Receives KV events from several publishers over ZeroMQ, and requests missed events again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from ssd.errors import ConfigError

_MAX_BYTES: Final = 64 << 20
_MAX_MESSAGES: Final = 10_000  # that wait at a socket; further ones are dropped and asked for again
_REPLAY_TIMEOUT_MS: Final = 5000
_END_OF_REPLAY: Final = (1 << 64) - 1


class KvMessage(NamedTuple):
    """A message of a publisher. ``is_restart`` marks the first message after the publisher was restarted."""

    publisher: str
    payload: bytes
    is_restart: bool = False


@dataclass(slots=True)
class _Publisher:
    endpoint: str
    replay_endpoint: str | None
    socket: Any
    next_number: int | None = None  # the sequence number of the next message; None before the first


class EventSubscriber:
    """Subscriptions to the KV events that several engines publish over ZeroMQ. Must be used by one thread."""

    def __init__(self, endpoints: Sequence[str], *, topic: str = "", replay_port: int | None = None) -> None:
        """Connect to publishers, which may start later.

        Args:
            endpoints: ``tcp://HOST:PORT`` of each publisher, one per data-parallel rank.
            topic: The topic of the publishers; all topics by default.
            replay_port: The port of the first publisher's replay endpoint, which sends past events again. For the other
                publishers, the difference between this port and the port of events is the same. None: lost messages
                stay lost.

        Raises:
            ConfigError: An endpoint is invalid, or pyzmq or msgspec is not installed.
        """
        try:
            import msgspec  # noqa: F401
            import zmq
        except ImportError as error:
            raise ConfigError(f"KV events need more packages: pip install 'ssd-serving[follow]' ({error})") from None
        ports = list(map(_port_of, endpoints))
        self._zmq, self._context, self._poller = zmq, zmq.Context(), zmq.Poller()
        self._publishers: dict[Any, _Publisher] = {}
        self._has_asked = False  # whether past messages have been asked for
        self.num_messages = self.num_lost = self.num_replayed = self.num_malformed = 0
        distance = None if replay_port is None else replay_port - ports[0]
        try:
            for endpoint, port in zip(endpoints, ports, strict=True):
                replay = None if distance is None else f"{endpoint.rpartition(':')[0]}:{port + distance}"
                socket = self._context.socket(zmq.SUB)
                socket.set_hwm(_MAX_MESSAGES)
                socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
                socket.setsockopt(zmq.IPV6, 1)
                socket.connect(endpoint)
                socket.subscribe(topic)
                self._poller.register(socket, zmq.POLLIN)
                self._publishers[socket] = _Publisher(endpoint, replay, socket)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{endpoint} cannot be followed ({error}): give tcp://HOST:PORT") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, timeout_s: float) -> Iterator[KvMessage]:
        """Wait at most ``timeout_s`` seconds for messages, and yield those that have arrived, in order.

        The first call begins with the past messages that the publishers' replay endpoints still have.
        """
        if not self._has_asked:
            self._has_asked = True
            for publisher in self._publishers.values():
                yield from self._past_messages(publisher)
        for socket, _ in self._poller.poll(int(1000 * timeout_s)):
            frames = socket.recv_multipart()
            self.num_messages += 1
            if len(frames) != 3 or len(frames[1]) != 8:
                self.num_malformed += 1
                continue
            yield from self._in_order(self._publishers[socket], int.from_bytes(frames[1], "big"), frames[2])

    def _past_messages(self, publisher: _Publisher) -> Iterator[KvMessage]:
        if publisher.replay_endpoint is not None:
            for number, content in self._replay(publisher.replay_endpoint, 0, _END_OF_REPLAY):
                self.num_replayed += 1
                publisher.next_number = number + 1
                yield KvMessage(publisher.endpoint, content)

    def _in_order(self, publisher: _Publisher, number: int, payload: bytes) -> Iterator[KvMessage]:
        """Yield a message of a publisher, and before it the earlier messages that were missed and can be fetched again.

        Missed messages that the publisher's replay endpoint no longer has are counted as lost.
        """
        expected = publisher.next_number
        is_restart = expected is not None and number < expected
        next_number = 0 if expected is None or is_restart else expected
        if number > next_number and publisher.replay_endpoint is not None:
            for missed, content in self._replay(publisher.replay_endpoint, next_number, number):
                self.num_replayed += 1
                self.num_lost += missed - next_number if expected is not None else 0
                yield KvMessage(publisher.endpoint, content, is_restart)
                next_number, is_restart = missed + 1, False
        self.num_lost += number - next_number if expected is not None else 0
        publisher.next_number = number + 1
        yield KvMessage(publisher.endpoint, payload, is_restart)

    def _replay(self, endpoint: str, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield the messages with numbers in [first, stop) that a publisher still has."""
        socket = self._context.socket(self._zmq.DEALER)
        try:
            socket.setsockopt(self._zmq.MAXMSGSIZE, _MAX_BYTES)
            socket.setsockopt(self._zmq.IPV6, 1)
            socket.set_hwm(_MAX_MESSAGES)
            socket.connect(endpoint)
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            while first < stop and socket.poll(_REPLAY_TIMEOUT_MS):
                frames = socket.recv_multipart()
                number = int.from_bytes(frames[2], "big") if len(frames) == 4 else _END_OF_REPLAY
                if not first <= number < stop:  # the mark at the end, or messages that arrive as new ones too
                    break
                yield number, frames[3]
                first = number + 1
        finally:
            socket.close(linger=0)


def _port_of(endpoint: str) -> int:
    match = re.fullmatch(r"tcp://[^\s/]+:(\d{1,5})", endpoint)
    if match is None or not 0 < int(match[1]) < 1 << 16 or "*" in endpoint:
        raise ConfigError(f"{endpoint[:120]!r} is not the address of a publisher: give tcp://HOST:PORT")
    return int(match[1])
