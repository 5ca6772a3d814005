"""Can sizes and times of answers tell what was asked? The published attacks, with the guards off and on.

``python -m benchmarks.side_channels [--prompts N] [--train N] [--test N] [--texts N] [--out FILE] [--json]``

1. *Which prompt?* (arXiv 2411.01076) Somebody on the path knows N prompts and has asked each several times. Then a
   victim asks each; from sizes and times of the records of the encrypted stream alone the attacker guesses which it
   was. Greedy and sampled, with streams as they come and with ``--obfuscation always``.
2. *Was it asked before?* An attacker with a key times its own requests for texts, half of which a victim has asked:
   under the attacker's own key, under another, and with a ``cache_salt`` of the victim's; with the guard on under its
   own, where nothing else keeps them apart.

Both against a real server of the bundled model in float32. Chance is 1/N and 1/2. Ends with a table and, with --json,
one JSON line.
"""

from __future__ import annotations

import json
import math
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.processes import Server
from benchmarks.run import Option, Run
from benchmarks.workloads import snippets
from server.answers.stream import DONE

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


Distance = Callable[[Trace, Trace], float]


def _at_places(first: Sequence[float], second: Sequence[float]) -> float:
    longest = max(len(first), len(second))
    padded = [(*values, *([0.0] * (longest - len(values)))) for values in (first, second)]
    return float(sum(abs(a - b) for a, b in zip(*padded, strict=True)))


def _pauses(trace: Trace) -> list[float]:
    return [after - before for before, after in zip((0.0, *trace.times), trace.times, strict=False)]


def _ends(trace: Trace, envelope: int) -> frozenset[int]:
    """Where the text stood after each record, which has so many bytes around each piece of text."""
    text, ends = 0, []
    for size in (*trace.sizes[:-1], trace.sizes[-1] - len(DONE)):  # which may be a record of its own
        if size >= envelope:
            text += size % envelope
            ends.append(text)
    return frozenset(ends)


def _other_ends(first: frozenset[int], second: frozenset[int]) -> float:
    return 1 - len(first & second) / max(1, len(first | second))


def _bags(first: Trace, second: Trace) -> float:
    mine, others = Counter(first.sizes), Counter(second.sizes)
    return float(sum(((mine - others) + (others - mine)).values()))


def distances(known: Sequence[Trace]) -> dict[str, Distance]:
    """Ways to compare two traces. ``known`` : the attacker's own, from which it learns what is around a text."""
    envelope = max(1, min(size for trace in known for size in trace.sizes[:-1] or trace.sizes) - 1)

    @cache
    def ends(trace: Trace) -> frozenset[int]:
        return _ends(trace, envelope)

    return {
        "sizes by place": lambda a, b: _at_places(a.sizes, b.sizes),
        "sizes in any order": _bags,
        "ends of records in the text": lambda a, b: _other_ends(ends(a), ends(b)),
        "pauses by place": lambda a, b: _at_places(_pauses(a), _pauses(b)),
        "bytes": lambda a, b: float(abs(sum(a.sizes) - sum(b.sizes))),
        "seconds": lambda a, b: abs(a.times[-1] - b.times[-1]),
        "records": lambda a, b: float(abs(len(a.sizes) - len(b.sizes))),
        "sizes and pauses": lambda a, b: _at_places(a.sizes, b.sizes) / 100 + _at_places(_pauses(a), _pauses(b)) / 0.02,
    }


def guess(trace: Trace, known: Sequence[tuple[int, Trace]], distance: Distance) -> int:
    """The prompt of the nearest known trace."""
    return min(known, key=lambda pair: distance(trace, pair[1]))[0]


def rate(known: Sequence[tuple[int, Trace]], seen: Sequence[tuple[int, Trace]]) -> tuple[float, str]:
    """Share of the victim's traces whose prompt is guessed, and the distance the attacker took. O(traces squared).

    It takes the one that guesses most of its own traces, each left out in turn.
    """
    ways = distances([trace for _, trace in known])
    scores = {
        name: sum(
            guess(trace, [pair for i, pair in enumerate(known) if i != left_out], distance) == prompt
            for left_out, (prompt, trace) in enumerate(known)
        )
        for name, distance in ways.items()
    }
    best = max(scores, key=lambda name: scores[name])
    return sum(guess(trace, known, ways[best]) == prompt for prompt, trace in seen) / len(seen), best


def interval(share: float, number: int) -> tuple[float, float]:
    """Wilson's interval of 95 % for a share of ``number``."""
    z = 1.96
    middle = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number)) / (1 + z * z / number)
    return max(0.0, middle - half), min(1.0, middle + half)


_VICTIMS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Victim:
    """Under whose key somebody asked for texts, and with which fields; None where there are no keys."""

    key: str | None = None
    fields: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Attack:
    """A server, the attacker's key, how long the answers are, and what the attacker goes by."""

    port: int
    max_tokens: int
    key: str | None = None
    by: Literal["seconds", "records"] = "seconds"

    def rate(self, texts: Iterator[str], victim: Victim, *, num_texts: int, num_own: int) -> float:
        """Share of right guesses among ``num_texts`` that were asked and as many that were not.

        ``texts`` : new ones. The limit between fast and slow is learned from ``num_own`` that nobody else asks.
        Every text is tried once: afterwards it has been asked.
        """
        asked, others, own = (list(islice(texts, number)) for number in (num_texts, num_texts, num_own))
        victims = {**self._fields, **(victim.fields or {})}
        watch_all(self.port, asked, victims, victim.key, times=2, at_once=_VICTIMS_AT_ONCE)
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
        """How long the answer took after its first record, as reading the prompt is another matter; or how many."""
        times = watch(self.port, {**self._fields, "prompt": text}, self.key).times
        return times[-1] - times[0] if self.by == "seconds" else len(times)

    @property
    def _fields(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}


_SERVER = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "1024")
_KEYS = ("attacker", "victim")
_PIECE_TOKENS = 16
_SLACK = 2.0
"""The clock leaves this many times what the model takes for a piece without drafts, alone."""
_PACED_AT_ONCE = 4
_PROMPT_CHARACTERS = 400
_CALIBRATING_TEXTS = 8
_TEMPERATURE = 0.3
_VICTIMS = {
    "own key": Victim("attacker"),
    "another key": Victim("victim"),
    "cache_salt": Victim("victim", {"cache_salt": "mine"}),
}


OPTIONS = {
    "prompts": Option(default=50, help="known to the attacker"),
    "train": Option(default=3, help="times the attacker asks each"),
    "test": Option(default=2, help="times a victim does"),
    "texts": Option(default=24, help="that the victim asked, and as many it did not"),
    "max_tokens": Option(default=96, help="of each answer"),
}
COLUMNS = (
    ("attack", "{attack}, {what}"),
    ("guard", "{guard}"),
    (">guessed", "{rate:.1%} ({interval[0]:.1%} ... {interval[1]:.1%})"),
    (">chance", "{chance:.1%}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Play, print. Returns the exit status, 0."""
    run = Run("side_channels", __doc__, argv, OPTIONS, COLUMNS)
    args = run.args
    texts = iter([text[-_PROMPT_CHARACTERS:] for text in snippets(seed=0)])
    prompts = [next(texts) for _ in range(args.prompts)]
    interval_s = 0.0
    for guard in ("off", "on"):
        options = ["--obfuscation", "always", "--obfuscation-interval", f"{interval_s:g}"] if guard == "on" else []
        with _serving(*options) as port:
            if guard == "off":
                interval_s = _interval(port, prompts[:8], args.max_tokens)
            for sampling, fields in (("greedy", {"temperature": 0}), ("sampled", {"temperature": _TEMPERATURE})):
                asked = {"max_tokens": args.max_tokens, **fields}
                at_once = 1 if guard == "off" else _PACED_AT_ONCE
                # All under one key, so that drafts come from one cache; after a first round all have been asked before.
                _, known, seen = (
                    watch_all(port, prompts, asked, "attacker", times=times, at_once=at_once)
                    for times in (1, args.train, args.test)
                )
                share, distance = rate(known, seen)
                run.row({**_row("which prompt", sampling, guard, share, len(seen), 1 / args.prompts), "by": distance})
            attack = Attack(port, args.max_tokens, "attacker")
            for whose, victim in _VICTIMS.items() if guard == "off" else [("own key", _VICTIMS["own key"])]:
                share = attack.rate(texts, victim, num_texts=args.texts, num_own=_CALIBRATING_TEXTS)
                run.row(_row("asked before", whose, guard, share, 2 * args.texts, 0.5))
    run.parameters |= {"temperature": _TEMPERATURE, "interval_s": interval_s}
    return run.end(rows=run.rows, indent=1)


@contextmanager
def _serving(*options: str) -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="side-channels-") as home:
        keys = Path(home) / "keys"
        keys.write_text("\n".join(_KEYS) + "\n")
        keys.chmod(0o600)
        server = Server(Path(home) / "server.log", *_SERVER, "--api-key-file", str(keys), *options)
        try:
            server.start()
            yield server.port
        finally:
            server.kill()


def _interval(port: int, prompts: Sequence[str], max_tokens: int) -> float:
    """Seconds for a piece: what the model takes without drafts, and some slack."""
    plain = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "num_speculative_tokens": 0}
    spent = [watch(port, {**plain, "cache_salt": "a", "prompt": prompt}, "attacker").times for prompt in prompts]
    a_token = statistics.median((times[-1] - times[0]) / (max_tokens - 1) for times in spent)
    return max(0.1, round(_SLACK * _PIECE_TOKENS * a_token, 2))


def _row(attack: str, what: str, guard: str, share: float, number: int, chance: float) -> dict[str, Any]:
    low, high = interval(share, number)
    row = {"attack": attack, "what": what, "guard": guard, "rate": round(share, 4), "chance": round(chance, 4)}
    return {**row, "interval": [round(low, 4), round(high, 4)], "number": number}


if __name__ == "__main__":
    sys.exit(main())
