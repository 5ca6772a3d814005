"""Is what was sealed still there, and whole, after ``kill -9`` at any moment?

``python -m benchmarks.crash [--kills N] [--seed S] [--capacity TOKENS] [--json]``

A child opens a durable cache and appends sequences whose text is a pure function of (seed, number); small segments and
a small capacity keep it sealing, merging, evicting and replacing manifests. Through a pipe it tells what it is about to
append and what is on disk. It is killed at a random moment of its opening, its work or its closing. Then this process
opens the same directory and checks it against the texts made again from their numbers; the next child goes on from
there, and some kills get a new directory. In between, files that no manifest names are torn, as a power failure leaves
them. What a directory may be in between two file operations is tried one by one in ``tests/test_crash.py``. Ends stdout
with one JSON line, and with exit status 1 if anything was wrong.
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
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from benchmarks.run import Option, Run
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache import DEFAULT_NAMESPACE, CacheSet
from ssd.retrieval.files import MANIFEST_NAME, read_manifest
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot

Tokens = npt.NDArray[np.int32]
Say = Callable[..., object]

FINGERPRINT = "0123456789abcdef" * 2
PROBLEMS = (
    "unreadable_stores",
    "segments_left_out",
    "lost_sealed_sequences",
    "wrong_texts",
    "writer_failures",
)

_FIRST_NUMBER = 1000  # sequence i begins with token 1000 + i, which occurs nowhere else
_SHORTEST = 20
_LONGEST = 600
_ALPHABET = 40
_WIDE_ID = 1 << 20  # in some sequences, so that segments of narrow and of wide ids are merged
_TAIL_SEALS = 4  # the writer waits while more than this many seals are due
_WINDOW_S = 1.0  # a writer works so long at most
_FRESH_EVERY = 20  # one kill in so many gets a new directory
_PHASES = ("starting", "opening", "running", "closing", "closed")


@dataclass(frozen=True, slots=True)
class Setting:
    """What a child and its checker have to agree on."""

    seed: int
    index: IndexConfig

    def config(self, directory: Path) -> CacheConfig:
        """The cache's, at ``directory``."""
        return CacheConfig(index=self.index, directory=directory)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: it must not be cut into pieces."""
        return min(_LONGEST, self.index.capacity_tokens // 16)

    @property
    def most_unsealed(self) -> int:
        """Tokens the tail may hold at most, with the sequence that made it so long."""
        return _TAIL_SEALS * self.index.seal_tokens + self.longest + 1

    def text(self, number: int) -> Tokens:
        """int32[n], the sequence with this number."""
        chance = np.random.default_rng((self.seed, number))
        tokens = chance.integers(0, _ALPHABET, chance.integers(_SHORTEST, self.longest)).astype(np.int32)
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


@dataclass(slots=True)
class Tally:
    """Results over all kills."""

    problems: Counter[str] = field(default_factory=Counter)
    num_checked_sequences: int = 0


# The writer: a forked child


def live(setting: Setting, directory: Path, first: int, chance: random.Random, life_s: float, say: Say) -> None:
    """A server's life: open, append from number ``first`` on, close after ``life_s``."""
    say("opening")
    caches = CacheSet(setting.config(directory), FINGERPRINT)
    cache = caches.get()
    say("running")
    stops: list[int] = []  # where sequences first, first + 1, ... end in the ring
    number, close_at = first, time.monotonic() + life_s
    while time.monotonic() < close_at:
        say("appending", number)
        cache.append(setting.text(number))
        stops.append(cache.snapshot().tail_stop)
        number += 1
        while cache.stats().num_tail_tokens > _TAIL_SEALS * setting.index.seal_tokens:
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


def check(setting: Setting, store: Store, child: Child, was_killed: bool, tally: Tally, chance: random.Random) -> None:
    """Open the store a child left and compare everything in it with what must be there."""
    store.durable = max(store.durable, child.durable)
    store.announced = max(store.announced, child.announced)
    tally.problems["writer_failures"] += child.num_failures + (not was_killed)
    try:
        _tear_leftovers(store.directory / DEFAULT_NAMESPACE, chance)
        caches = CacheSet(setting.config(store.directory), FINGERPRINT, inline=True)
    except Exception:
        traceback.print_exc()
        tally.problems["unreadable_stores"] += 1
        store.directory = store.directory.with_name(store.directory.name + "+")  # the evidence stays
        store.first = store.announced + 1
        store.durable = store.announced
        return
    with caches:
        tally.problems["segments_left_out"] += caches.get().stats().num_failures
        numbers = _check_text(setting, store, caches.get().snapshot(), tally)
    if numbers:
        store.first, store.durable = numbers[0], numbers[-1]
    store.announced = store.durable  # the next writer goes on with the next number


def _tear_leftovers(directory: Path, chance: random.Random) -> None:
    """Sometimes tear what the kill left behind and no manifest names, as a power failure would, and add more of it."""
    if not directory.exists() or chance.random() < 0.6:
        return
    manifest = read_manifest(directory, fingerprint=FINGERPRINT)
    named = {f"{segment_id}.seg" for segment_id in manifest.segment_ids} if manifest else set()
    patterns = ("*.seg.*.tmp", f"{MANIFEST_NAME}.*.tmp", "*.seg")
    for path in [path for pattern in patterns for path in directory.glob(pattern) if path.name not in named]:
        size = path.stat().st_size
        os.truncate(path, chance.randint(0, size))
        if chance.random() < 0.5:
            os.truncate(path, size)  # a tail of zeros
    (directory / f"000000000000-{chance.getrandbits(64):016x}.seg").write_bytes(b"")
    (directory / f"000000000000-{chance.getrandbits(64):016x}.seg.1.tmp").write_bytes(bytes(300))
    (directory / f"{MANIFEST_NAME}.1.tmp").write_bytes(b'{"format": 1, "mani')


def _check_text(setting: Setting, store: Store, snapshot: Snapshot, tally: Tally) -> list[int]:
    """The numbers of the sequences found, oldest first."""
    text = np.concatenate([np.empty(0, np.int32), *(segment.tokens for segment in snapshot.segments)])
    stops = np.flatnonzero(text == SEPARATOR)
    starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
    numbers = [int(text[start]) - _FIRST_NUMBER for start in starts]
    tally.num_checked_sequences += len(numbers)
    wrong = int(len(text) != (stops[-1] + 1 if len(stops) else 0))
    wrong += numbers != list(range(numbers[0], numbers[0] + len(numbers))) if numbers else False
    wrong += bool(numbers) and not store.first <= numbers[0] <= numbers[-1] <= store.announced
    for number, start, stop in zip(numbers, starts, stops, strict=True):
        wrong += not 0 <= number <= store.announced or not np.array_equal(text[start:stop], setting.text(number))
    tally.problems["wrong_texts"] += int(wrong)
    missing = set(range(store.first, store.durable + 1)).difference(numbers)
    if numbers and numbers[0] > store.first:
        capacity = setting.index.capacity_tokens
        # One segment, at most an eighth of the capacity, is evicted when the next sequence does not fit; what was in
        # the tail then may have been lost.
        if len(text) >= capacity - capacity // 8 - setting.most_unsealed - setting.longest:
            missing.difference_update(range(numbers[0]))
    tally.problems["lost_sealed_sequences"] += len(missing)
    if wrong or missing:
        print(f"wrong={wrong} missing={sorted(missing)[:10]} found={numbers[:1]}..{numbers[-1:]} in {store}")
    return numbers


# The kills


def kill_at_random(setting: Setting, num_kills: int, home: Path, tally: Tally) -> None:
    """Kill writers of one store, and of some new ones, at random moments from their opening to their end."""
    chance, kept = random.Random(setting.seed), Store(home / "kept")
    for number in range(num_kills):
        store = Store(home / f"new-{number}") if number % _FRESH_EVERY == _FRESH_EVERY - 1 else kept
        close_after_s, life = chance.uniform(0.0, _WINDOW_S), random.Random(chance.getrandbits(32))
        first = store.durable + 1
        child = Child(partial(live, setting, store.directory, first, life, close_after_s))
        begins = chance.choices(("starting", "opening", "running", "closing"), (0.1, 0.2, 0.5, 0.2))[0]
        child.listen(time.monotonic() + 60, _PHASES[_PHASES.index(begins) :])
        kill_at = time.monotonic() + chance.uniform(0.0, _WINDOW_S if begins == "running" else _WINDOW_S / 4)
        child.listen(kill_at)
        check(setting, store, child, child.kill(), tally, chance)
        if (number + 1) % 20 == 0:
            wrong = {name: count for name, count in tally.problems.items() if count} or "nothing wrong"
            print(f"{number + 1:>5} kills, sequences up to {kept.durable}: {wrong}", flush=True)


OPTIONS = {
    "kills": Option(default=200, help="at random moments"),
    "seed": 0,
    "capacity": Option(default=1 << 18, help="tokens; merges beyond 16384 are another thread's"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, check, print; returns the exit status."""
    run = Run("crash", __doc__, argv, OPTIONS, under=("ssd/retrieval",))
    args = run.args
    index = IndexConfig(
        capacity_tokens=args.capacity,
        seal_tokens=max(64, args.capacity // 128),
        merge_fanout=2,
        dedup_block_tokens=0,
        rebuild_interval_s=0.05,
    )
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="crash-", ignore_cleanup_errors=True) as home:
        kill_at_random(Setting(args.seed, index), args.kills, Path(home), tally)
    return run.end(
        kills=args.kills,
        **{name: tally.problems[name] for name in PROBLEMS},
        checked_sequences=tally.num_checked_sequences,
        is_wrong=any(tally.problems.values()),
    )


if __name__ == "__main__":
    sys.exit(main())
