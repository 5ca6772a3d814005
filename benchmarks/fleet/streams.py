"""Redis streams in this process, on a virtual clock: what the log's writer and reader ask of a server, and no more.

Commands come and replies go as the bytes of Redis' protocol, so that redis-py, our parser of replies and the counts of
bytes are the real ones. A reader's connection may lag: it is shown the streams as they were so many seconds ago.
``MAXLEN ~`` trims exactly, where Redis leaves some entries more. tests/test_benchmark_fleet.py gives the same commands
to a real server.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from errno import EWOULDBLOCK
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import redis

_Id = tuple[int, int]
_LARGEST = (1 << 64) - 1
_OK = b"+OK\r\n"
_NOTHING = b"*-1\r\n"


class ReplyError(Exception):
    """What a server answers with ``-``."""


class _Stream:
    """Entries in order: ``ids``, ``fields`` and ``times``, when each was added."""

    def __init__(self) -> None:
        self.ids: list[_Id] = []
        self.fields: list[list[bytes]] = []
        self.times: list[float] = []
        self.last_id: _Id = (0, 0)

    def drop(self, count: int) -> int:
        """Without its oldest entries."""
        del self.ids[:count], self.fields[:count], self.times[:count]
        return count


class Streams:
    """The server. ``now`` : seconds of the virtual clock, set by its owner."""

    def __init__(self) -> None:
        self.now = 0.0
        self._streams: dict[bytes, _Stream] = {}
        self._versions: Counter[bytes] = Counter()

    def client(self, *, lag_s: float = 0.0) -> tuple[redis.Redis, Traffic]:
        """A client with a connection of its own, and what it counts; it is shown what is older than ``lag_s``."""
        import redis
        from redis.backoff import NoBackoff
        from redis.connection import Connection
        from redis.retry import Retry

        from ssd.sharing.bounded_parser import BoundedParser

        traffic = Traffic()

        class InProcess(Connection):
            def _connect(connection) -> Any:  # noqa: N805 - the outer self is the server
                return _Socket(_Session(self, lag_s, traffic), traffic)

        pool = redis.ConnectionPool(
            connection_class=InProcess, parser_class=BoundedParser, protocol=2, retry=Retry(NoBackoff(), 0)
        )
        return redis.Redis.from_pool(pool), traffic

    def execute(self, command: list[bytes], lag_s: float) -> bytes:
        """One command but for those of transactions. Raises ReplyError."""
        name, *rest = command
        handler: Callable[[list[bytes], float], bytes] | None = {
            b"XADD": self._add,
            b"XREAD": self._read,
            b"XRANGE": self._range,
            b"XREVRANGE": self._range_backwards,
            b"XTRIM": self._trim,
            b"XLEN": self._length,
            b"DEL": self._delete,
            b"PING": lambda *_: b"+PONG\r\n",
            b"CLIENT": lambda *_: _OK,
        }.get(name.upper())
        if handler is None:
            raise ReplyError(f"ERR unknown command '{name.decode(errors='replace')}'")
        return handler(rest, lag_s)

    def version(self, key: bytes) -> int:
        """Another number after each change of ``key``."""
        return self._versions[key]

    def _add(self, words: list[bytes], lag_s: float) -> bytes:
        key, options = words[0], words[1:]
        makes, most = True, None
        while options[0].upper() in (b"NOMKSTREAM", b"MAXLEN"):
            if options.pop(0).upper() == b"NOMKSTREAM":
                makes = False
                continue
            if options[0] in (b"~", b"="):
                options.pop(0)
            most = int(options.pop(0))
        asked, fields = options[0], options[1:]
        parsed = None if asked == b"*" else _id_of(asked, 0)
        if parsed == (0, 0):
            raise ReplyError("ERR The ID specified in XADD must be greater than 0-0")
        stream = self._streams.get(key)
        if stream is None:
            if not makes:
                return b"$-1\r\n"
            stream = _Stream()
        entry_id = self._next_id(stream) if parsed is None else parsed
        if stream.last_id == (_LARGEST, _LARGEST):
            raise ReplyError("ERR The stream has exhausted the last possible ID, unable to add more items")
        if entry_id <= stream.last_id:
            raise ReplyError("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        self._streams[key] = stream
        stream.ids.append(entry_id)
        stream.fields.append(fields)
        stream.times.append(self.now)
        stream.last_id = entry_id
        if most is not None:
            stream.drop(max(0, len(stream.ids) - most))
        self._versions[key] += 1
        return _bulk(_text_of(entry_id))

    def _next_id(self, stream: _Stream) -> _Id:
        milliseconds = int(self.now * 1000)
        if milliseconds > stream.last_id[0]:
            return milliseconds, 0
        last_ms, number = stream.last_id
        return (last_ms, number + 1) if number < _LARGEST else (last_ms + 1, 0)

    def _read(self, words: list[bytes], lag_s: float) -> bytes:
        count, options = 0, words
        while options[0].upper() != b"STREAMS":
            if options[0].upper() == b"COUNT":
                count = int(options[1])
            options = options[2:]
        names = options[1:]
        half = len(names) // 2
        answers = []
        for key, after in zip(names[:half], names[half:], strict=True):
            stream = self._streams.get(key)
            last = stream.last_id if after == b"$" and stream is not None else _id_of(after, 0)
            if stream is None:
                continue
            start = bisect_right(stream.ids, last)
            stop = min(self._visible(stream, lag_s), start + count if count > 0 else len(stream.ids))
            if stop > start:
                answers.append(_array([_bulk(key), _entries(stream, range(start, stop))]))
        return _array(answers) if answers else _NOTHING

    def _range(self, words: list[bytes], lag_s: float) -> bytes:
        return self._page(words[0], words[1], words[2], words[3:], lag_s, backwards=False)

    def _range_backwards(self, words: list[bytes], lag_s: float) -> bytes:
        return self._page(words[0], words[2], words[1], words[3:], lag_s, backwards=True)

    def _page(
        self, key: bytes, first: bytes, last: bytes, options: list[bytes], lag_s: float, *, backwards: bool
    ) -> bytes:
        low, high = _bound(first, 0), _bound(last, _LARGEST)
        stream = self._streams.get(key)
        if stream is None:
            return _array([])
        start = bisect_right(stream.ids, low) if first.startswith(b"(") else bisect_left(stream.ids, low)
        stop = bisect_left(stream.ids, high) if last.startswith(b"(") else bisect_right(stream.ids, high)
        places = range(start, min(stop, self._visible(stream, lag_s)))
        if options:
            count = int(options[1])
            places = places[max(0, len(places) - count) :] if backwards else places[:count]
        return _entries(stream, reversed(places) if backwards else places)

    def _visible(self, stream: _Stream, lag_s: float) -> int:
        return bisect_right(stream.times, self.now - lag_s) if lag_s else len(stream.ids)

    def _trim(self, words: list[bytes], lag_s: float) -> bytes:
        key, kind, *rest = words
        stream, bound = self._streams.get(key), rest[-1]
        if kind.upper() == b"MINID":
            least = _id_of(bound, 0)
            count = 0 if stream is None else bisect_left(stream.ids, least)
        else:
            count = 0 if stream is None else max(0, len(stream.ids) - int(bound))
        if stream is not None and count:
            stream.drop(count)
            self._versions[key] += 1
        return b":%d\r\n" % count

    def _length(self, words: list[bytes], lag_s: float) -> bytes:
        stream = self._streams.get(words[0])
        return b":%d\r\n" % (0 if stream is None else len(stream.ids))

    def _delete(self, words: list[bytes], lag_s: float) -> bytes:
        found = [key for key in dict.fromkeys(words) if self._streams.pop(key, None) is not None]
        self._versions.update(found)
        return b":%d\r\n" % len(found)


class Traffic:
    """What a client sent and was sent: ``commands`` by name, and bytes."""

    def __init__(self) -> None:
        self.commands: Counter[str] = Counter()
        self.sent_bytes = 0
        self.received_bytes = 0


class _Session:
    """One connection of the server: transactions are its own."""

    def __init__(self, server: Streams, lag_s: float, traffic: Traffic) -> None:
        self._server, self._lag_s, self._traffic = server, lag_s, traffic
        self._watched: dict[bytes, int] = {}
        self._queued: list[list[bytes]] | None = None

    def answer(self, command: list[bytes]) -> bytes:
        name = command[0].upper()
        self._traffic.commands[name.decode()] += 1
        try:
            if name == b"WATCH":
                self._watched |= {key: self._server.version(key) for key in command[1:]}
            elif name == b"UNWATCH":
                self._watched.clear()
            elif name == b"MULTI":
                self._queued = []
            elif name == b"EXEC":
                return self._exec()
            elif self._queued is not None:
                self._queued.append(command)
                return b"+QUEUED\r\n"
            else:
                return self._server.execute(command, self._lag_s)
        except ReplyError as error:
            return b"-%s\r\n" % str(error).encode()
        return _OK

    def _exec(self) -> bytes:
        queued, watched = self._queued or [], self._watched
        self._queued, self._watched = None, {}
        if any(self._server.version(key) != version for key, version in watched.items()):
            return _NOTHING
        return _array([self.answer(command) for command in queued])


class _Socket:
    """What redis-py needs of a socket."""

    def __init__(self, session: _Session, traffic: Traffic) -> None:
        self._session, self._traffic = session, traffic
        self._asked, self._replies = bytearray(), bytearray()
        self._timeout: float | None = None

    def sendall(self, data: bytes) -> None:
        self._traffic.sent_bytes += len(data)
        self._asked += data
        while (command := _take_command(self._asked)) is not None:
            self._replies += self._session.answer(command)

    def recv(self, size: int) -> bytes:
        if not self._replies:
            raise BlockingIOError(EWOULDBLOCK, "nothing") if self._timeout == 0 else TimeoutError
        data = bytes(self._replies[:size])
        del self._replies[:size]
        self._traffic.received_bytes += len(data)
        return data

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def gettimeout(self) -> float | None:
        return self._timeout

    def setblocking(self, blocks: bool) -> None:
        self._timeout = None if blocks else 0

    def shutdown(self, how: int) -> None:
        self._replies.clear()

    def close(self) -> None:
        self._replies.clear()


def _take_command(data: bytearray) -> list[bytes] | None:
    """The first command of ``data``, taken from it; None where it has not come whole."""
    if not data.startswith(b"*") or (end := data.find(b"\r\n")) < 0:
        return None
    words, place = [], end + 2
    for _ in range(int(data[1:end])):
        if (end := data.find(b"\r\n", place)) < 0:
            return None
        start = end + 2
        stop = start + int(data[place + 1 : end])
        if len(data) < stop + 2:
            return None
        words.append(bytes(data[start:stop]))
        place = stop + 2
    del data[:place]
    return words


def _id_of(text: bytes, number: int) -> _Id:
    """An id as commands have it; ``number`` : the second half of one that has none. Raises ReplyError."""
    halves = text.split(b"-")
    if len(halves) > 2 or not all(half.isdigit() and int(half) <= _LARGEST for half in halves):
        raise ReplyError("ERR Invalid stream ID specified as stream command argument")
    return int(halves[0]), int(halves[1]) if len(halves) == 2 else number


def _bound(text: bytes, number: int) -> _Id:
    if text == b"-":
        return 0, 0
    if text == b"+":
        return _LARGEST, _LARGEST
    if text.startswith(b"("):
        entry_id = _id_of(text[1:], number)
        if (number == 0 and entry_id == (_LARGEST, _LARGEST)) or (number and entry_id == (0, 0)):
            raise ReplyError(f"ERR invalid {'end' if number else 'start'} ID for the interval")
        return entry_id
    return _id_of(text, number)


def _text_of(entry_id: _Id) -> bytes:
    return b"%d-%d" % entry_id


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text)


def _array(parts: list[bytes]) -> bytes:
    return b"*%d\r\n%s" % (len(parts), b"".join(parts))


def _entries(stream: _Stream, places: Any) -> bytes:
    return _array(
        [_array([_bulk(_text_of(stream.ids[i])), _array(list(map(_bulk, stream.fields[i])))]) for i in places]
    )
