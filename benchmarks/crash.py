"""Is what was sealed still there, and whole, after ``kill -9`` at any moment?

``python -m benchmarks.crash [--kills N] [--seed S] [--json]``

A child opens a durable cache and appends sequences whose text is a pure function of (seed, number); small segments and
a small capacity keep it sealing, merging, evicting and replacing manifests. Through a pipe it tells what it is about to
append and what is on disk. It is killed at a random moment of its opening, its work or its closing. Then this process
opens the same directory and checks it against the texts made again from their numbers; the next child goes on from
there, and some kills get a new directory. What a directory may be in between two file operations, and what a power
failure leaves, is tried one by one in ``tests/test_crash.py``. Ends stdout with one JSON line, and with exit status 1
if anything was wrong.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from benchmarks.run import Option, Run
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache_manager import DEFAULT_NAMESPACE, CacheManager
from ssd.retrieval.files import read_manifest
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot

Tokens = npt.NDArray[np.int32]
Say = Callable[..., object]

FINGERPRINT = "0123456789abcdef" * 2
PROBLEMS = ("unreadable_stores", "segments_left_out", "lost_sealed_sequences", "wrong_texts", "writer_failures")

_FIRST_NUMBER = 1000  # sequence i begins with token 1000 + i, which occurs nowhere else
_SHORTEST = 20
_LONGEST = 600
_ALPHABET = 40
_WIDE_ID = 1 << 20  # in some sequences, so that segments of narrow and of wide ids are merged
_TAIL_SEALS = 4  # the writer waits while more than this many seals are due
_WINDOW_S = 1.0  # a writer works so long at most
_FRESH_EVERY = 20  # one kill in so many gets a new directory
_PHASES = ("starting", "opening", "running", "closing", "closed")
_INDEX = IndexConfig(  # merges beyond 16384 tokens are another thread's
    capacity_tokens=1 << 18, flush_tokens=1 << 11, merge_fanout=2, dedup_block_tokens=0, rebuild_interval_s=0.05
)
_MOST_UNSEALED = _TAIL_SEALS * _INDEX.flush_tokens + _LONGEST + 1
"""Tokens the tail may hold at most, with the sequence that made it so long."""


def text_of(seed: int, number: int) -> Tokens:
    """int32[n], the sequence with this number."""
    chance = np.random.default_rng((seed, number))
    tokens = chance.integers(0, _ALPHABET, chance.integers(_SHORTEST, _LONGEST)).astype(np.int32)
    tokens[0] = _FIRST_NUMBER + number
    if number % 97 == 0:
        tokens[-1] = _WIDE_ID
    return tokens


@dataclass(slots=True)
class Store:
    """A directory and what must be in it."""

    directory: Path
    first: int = 0
    """The oldest sequence it may still have."""
    durable: int = -1
    """The newest sequence known to be on disk."""
    announced: int = -1
    """The newest sequence that can be there."""


Tally = Counter[str]
"""Over all kills: of each of PROBLEMS how often, and "checked_sequences"."""

# The writer: a forked child


def live(seed: int, directory: Path, first: int, chance: random.Random, life_s: float, say: Say) -> None:
    """A server's life: open, append from number ``first`` on, close after ``life_s``."""
    say("opening")
    caches = CacheManager(CacheConfig(index=_INDEX, directory=directory), FINGERPRINT)
    cache = caches.get()
    say("running")
    stops: list[int] = []  # where sequences first, first + 1, ... end in the ring
    number, close_at = first, time.monotonic() + life_s
    while time.monotonic() < close_at:
        say("appending", number)
        cache.append(text_of(seed, number))
        stops.append(cache.snapshot().memtable_stop)
        number += 1
        while cache.stats().num_memtable_tokens > _TAIL_SEALS * _INDEX.flush_tokens:
            time.sleep(0.0005)
        draw = chance.random()
        if draw < 0.03:
            caches.flush()
            say("durable", number - 1)
        elif draw < 0.2:
            manifest = read_manifest(directory / DEFAULT_NAMESPACE, fingerprint=FINGERPRINT)
            if manifest is not None and manifest.segments:
                newest = manifest.segments[-1]
                num_durable = bisect_right(stops, newest["start"] + newest["num_tokens"])
                if num_durable:
                    say("durable", first + num_durable - 1)
    say("closing")
    caches.close()
    say("durable", number - 1)
    say("failures", cache.stats().num_failures)
    say("closed")


class Child:
    """A forked process that runs ``work(say)`` and then waits to be killed."""

    def __init__(self, work: Callable[[Say], None]) -> None:
        self.phase = "starting"
        self.durable = self.announced = -1
        self.num_failures = 0
        self._pipe, pipe = Pipe(duplex=False)
        self.process_id = os.fork()
        if self.process_id == 0:
            self._pipe.close()
            self._live(work, pipe)
        pipe.close()

    def _live(self, work: Callable[[Say], None], pipe: Connection) -> NoReturn:
        try:
            work(lambda *words: pipe.send(words))
            signal.pause()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def listen(self, until: float, phases: Sequence[str] = ()) -> None:
        """Take in what the child says, until ``until`` (time.monotonic), or it ends, or it says one of ``phases``."""
        while self.phase not in phases and (left_s := until - time.monotonic()) > 0:
            if self._pipe.poll(left_s) and not self._hear():
                return

    def kill(self) -> bool:
        """SIGKILL the child, and hear its last words. False if it had failed before."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process_id, signal.SIGKILL)
        _, status = os.waitpid(self.process_id, 0)
        while self._hear():
            pass
        self._pipe.close()
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL

    def _hear(self) -> bool:
        try:
            word, *number = self._pipe.recv()
        except (EOFError, OSError):  # its last word may be half a one
            return False
        if word == "durable":
            self.durable = number[0]
        elif word == "appending":
            self.announced = number[0]
        elif word == "failures":
            self.num_failures = number[0]
        else:
            self.phase = word
        return True


# The checker


def check(seed: int, store: Store, child: Child, was_killed: bool, tally: Tally) -> None:
    """Open the store a child left and compare everything in it with what must be there."""
    store.durable = max(store.durable, child.durable)
    store.announced = max(store.announced, child.announced)
    tally["writer_failures"] += child.num_failures + (not was_killed)
    try:
        caches = CacheManager(CacheConfig(index=_INDEX, directory=store.directory), FINGERPRINT, inline=True)
    except Exception:
        traceback.print_exc()
        tally["unreadable_stores"] += 1
        store.directory = store.directory.with_name(store.directory.name + "+")  # the evidence stays
        store.first = store.announced + 1
        store.durable = store.announced
        return
    with caches:
        tally["segments_left_out"] += caches.get().stats().num_failures
        numbers = _check_text(seed, store, caches.get().snapshot(), tally)
    if numbers:
        store.first, store.durable = numbers[0], numbers[-1]
    store.announced = store.durable  # the next writer goes on with the next number


def _check_text(seed: int, store: Store, snapshot: Snapshot, tally: Tally) -> list[int]:
    """The numbers of the sequences found, oldest first."""
    text = np.concatenate([np.empty(0, np.int32), *(segment.tokens for segment in snapshot.segments)])
    stops = np.flatnonzero(text == SEPARATOR)
    starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
    numbers = [int(text[start]) - _FIRST_NUMBER for start in starts]
    tally["checked_sequences"] += len(numbers)
    wrong = int(len(text) != (stops[-1] + 1 if len(stops) else 0))
    wrong += numbers != list(range(numbers[0], numbers[0] + len(numbers))) if numbers else False
    wrong += bool(numbers) and not store.first <= numbers[0] <= numbers[-1] <= store.announced
    for number, start, stop in zip(numbers, starts, stops, strict=True):
        wrong += not 0 <= number <= store.announced or not np.array_equal(text[start:stop], text_of(seed, number))
    tally["wrong_texts"] += int(wrong)
    missing = set(range(store.first, store.durable + 1)).difference(numbers)
    if numbers and numbers[0] > store.first:
        capacity = _INDEX.capacity_tokens
        # One segment, at most an eighth of the capacity, is evicted when the next sequence does not fit; what was in
        # the tail then may have been lost.
        if len(text) >= capacity - capacity // 8 - _MOST_UNSEALED - _LONGEST:
            missing.difference_update(range(numbers[0]))
    tally["lost_sealed_sequences"] += len(missing)
    if wrong or missing:
        print(f"wrong={wrong} missing={sorted(missing)[:10]} found={numbers[:1]}..{numbers[-1:]} in {store}")
    return numbers


# The kills


def kill_at_random(seed: int, num_kills: int, home: Path, tally: Tally) -> None:
    """Kill writers of one store, and of some new ones, at random moments from their opening to their end."""
    chance, kept = random.Random(seed), Store(home / "kept")
    for number in range(num_kills):
        store = Store(home / f"new-{number}") if number % _FRESH_EVERY == _FRESH_EVERY - 1 else kept
        close_after_s, life = chance.uniform(0.0, _WINDOW_S), random.Random(chance.getrandbits(32))
        first = store.durable + 1
        child = Child(partial(live, seed, store.directory, first, life, close_after_s))
        begins = chance.choices(("starting", "opening", "running", "closing"), (0.1, 0.2, 0.5, 0.2))[0]
        child.listen(time.monotonic() + 60, _PHASES[_PHASES.index(begins) :])
        kill_at = time.monotonic() + chance.uniform(0.0, _WINDOW_S if begins == "running" else _WINDOW_S / 4)
        child.listen(kill_at)
        check(seed, store, child, child.kill(), tally)
        if (number + 1) % 20 == 0:
            wrong = {name: tally[name] for name in PROBLEMS if tally[name]} or "nothing wrong"
            print(f"{number + 1:>5} kills, sequences up to {kept.durable}: {wrong}", flush=True)


OPTIONS = {
    "kills": Option(default=200, help="at random moments"),
    "seed": 0,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, check, print; returns the exit status."""
    run = Run("crash", __doc__, argv, OPTIONS, under=("ssd/retrieval",))
    args = run.args
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="crash-", ignore_cleanup_errors=True) as home:
        kill_at_random(args.seed, args.kills, Path(home), tally)
    return run.end(
        kills=args.kills,
        **{name: tally[name] for name in (*PROBLEMS, "checked_sequences")},
        is_wrong=any(tally[name] for name in PROBLEMS),
    )


if __name__ == "__main__":
    sys.exit(main())
