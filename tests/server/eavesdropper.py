"""Published attacks on what is drafted (arXiv 2411.01076): by the records of a stream, by times of own requests."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

RECORD_BYTES = 22
"""What TLS 1.3 adds to a write: header, kind and tag."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One streamed answer: bytes of each record, seconds from the request to its arrival, and what the records hold."""

    sizes: tuple[int, ...]
    times: tuple[float, ...]
    content: bytes


def watch(port: int, body: dict[str, Any], path: str = "/v1/completions") -> Trace:
    """Ask for a stream and look at it as an eavesdropper does.

    The server makes one write of each group of events, and a TLS connection one record of each write: what is read here
    are the writes, told apart by the chunks of HTTP, which no eavesdropper needs. Raises OSError; ValueError where the
    answer is not a stream, or not whole.
    """
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection, connection.makefile("rb") as answer:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        connection.sendall(head.encode() + content)
        if not (status := answer.readline()).startswith(b"HTTP/1.1 200"):
            raise ValueError(status.decode())
        while answer.readline().strip():
            pass
        writes, times = [], []
        while size := int(answer.readline(), 16):
            writes.append(answer.read(size))
            times.append(time.perf_counter() - began)
            answer.readline()
    return Trace(tuple(len(write) + RECORD_BYTES for write in writes), tuple(times), b"".join(writes))


def watch_all(
    port: int, prompts: Sequence[str], fields: dict[str, Any], *, times: int, at_once: int = 1
) -> list[tuple[int, Trace]]:
    """Every prompt so many times, round by round: (its number, what was seen)."""

    def ask(number: int) -> tuple[int, Trace]:
        return number, watch(port, {**fields, "prompt": prompts[number]})

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, [number for _ in range(times) for number in range(len(prompts))]))


Distance = Callable[[Trace, Trace], float]


def _at_places(first: Sequence[float], second: Sequence[float]) -> float:
    longest = max(len(first), len(second))
    padded = [(*values, *([0.0] * (longest - len(values)))) for values in (first, second)]
    return float(sum(abs(a - b) for a, b in zip(*padded, strict=True)))


def _pauses(trace: Trace) -> list[float]:
    return [after - before for before, after in zip((0.0, *trace.times), trace.times, strict=False)]


def _bags(first: Trace, second: Trace) -> float:
    mine, others = Counter(first.sizes), Counter(second.sizes)
    return float(sum(((mine - others) + (others - mine)).values()))


DISTANCES: dict[str, Distance] = {
    "sizes by place": lambda a, b: _at_places(a.sizes, b.sizes),
    "sizes in any order": _bags,
    "bytes": lambda a, b: float(abs(sum(a.sizes) - sum(b.sizes))),
    "sizes and pauses": lambda a, b: _at_places(a.sizes, b.sizes) / 100 + _at_places(_pauses(a), _pauses(b)) / 0.02,
}


def guess(trace: Trace, known: Sequence[tuple[int, Trace]], distance: Distance) -> int:
    """The prompt of the nearest known trace."""
    return min(known, key=lambda pair: distance(trace, pair[1]))[0]


def rate(known: Sequence[tuple[int, Trace]], seen: Sequence[tuple[int, Trace]]) -> float:
    """Share of the victim's traces whose prompt is guessed, by the distance that guesses most of the attacker's own."""

    def own(distance: Distance) -> int:
        others = [[pair for pair in known if pair is not left_out] for left_out in known]
        return sum(guess(trace, rest, distance) == prompt for (prompt, trace), rest in zip(known, others, strict=True))

    best = max(DISTANCES.values(), key=own)
    return sum(guess(trace, known, best) == prompt for prompt, trace in seen) / len(seen)


_VICTIMS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Attack:
    """A server and how long the answers are; the attacker counts the records of answers."""

    port: int
    max_tokens: int

    def rate(self, texts: Iterator[str], *, num_texts: int, num_own: int, **victims: Any) -> float:
        """Share of right guesses among ``num_texts`` that were asked and as many that were not.

        ``texts`` : new ones. ``victims`` : the fields that they are asked with. The limit between fast and slow is
        learned from ``num_own`` that nobody else asks.
        Every text is tried once: afterwards it has been asked.
        """
        asked, others, own = (list(islice(texts, number)) for number in (num_texts, num_texts, num_own))
        watch_all(self.port, asked, {**self._fields, **victims}, times=2, at_once=_VICTIMS_AT_ONCE)
        time.sleep(1)  # by now what was said can be drafted from
        limit, right = self._limit(own), 0
        for known, unknown in zip(asked, others, strict=True):
            right += self._slowness(known) < limit
            right += self._slowness(unknown) >= limit
        return right / (2 * num_texts)

    def _limit(self, own: Sequence[str]) -> float:
        first = [self._slowness(text) for text in own]
        again = [min(self._slowness(text) for _ in range(2)) for text in own]
        if max(again) < min(first):
            return (max(again) + min(first)) / 2
        return (median(first) + median(again)) / 2

    def _slowness(self, text: str) -> float:
        """In how many records the answer comes."""
        return len(watch(self.port, {**self._fields, "prompt": text}).times)

    @property
    def _fields(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}
