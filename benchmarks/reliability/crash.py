"""Test whether every text that was on disk is still there and intact after ``kill -9`` at any moment.

``python -m benchmarks.reliability --question crash [--kills N] [--seed S] [--json]``

A child process opens a cache with files and appends sequences, whose tokens depend only on the seed and their number.
Small segments and a small capacity keep it flushing, merging, evicting and replacing manifests. In shared memory, it
counts the sequences that it appends and those that are on disk. It is killed at a random moment while it opens, fills
or closes the cache. Then this process opens the directory and compares its content with the expected sequences. The
next child continues from there; some children get a new directory. Prints the number of problems of each kind.
``tests/test_crash.py`` tests the states between any two file operations and after power failures.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
import traceback
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reliability.clients import sequences
from benchmarks.run import Option, Run
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache_manager import DEFAULT_NAMESPACE, CacheManager
from ssd.retrieval.files import read_manifest
from ssd.retrieval.segment import SEPARATOR, Segment, Tokens

FINGERPRINT = "0123456789abcdef" * 2
PROBLEMS = ("unreadable_stores", "segments_left_out", "lost_sealed_sequences", "wrong_texts", "writer_failures")

_FIRST_NUMBER = 1000  # sequence i begins with token 1000 + i, which occurs nowhere else
_SHORTEST, _LONGEST = 20, 600
_ALPHABET = 40
_WIDE_ID = 1 << 20  # in some sequences, so that segments of narrow and of wide ids are merged
_MAX_FLUSHES_DUE = 4  # the writer waits while more than this many flushes are due
_WINDOW_S = 1.0
_FRESH_EVERY = 20  # one kill in so many gets a new directory
_STARTING, _OPENING, _RUNNING, _CLOSING, _CLOSED = range(5)
_PHASE, _APPENDED, _DURABLE, _FAILURES = range(4)
"""Indices into a writer's shared memory: phase, newest sequence appended, newest on disk, number of failures."""
_INDEX = IndexConfig(  # merges beyond 16384 tokens are another thread's
    capacity_tokens=1 << 18, flush_tokens=1 << 11, merge_fanout=2, dedup_block_tokens=0, rebuild_interval_s=0.05
)
_MAX_UNFLUSHED = _MAX_FLUSHES_DUE * _INDEX.flush_tokens + _LONGEST + 1
OPTIONS = {"kills": Option(default=200, help="number of times that a writer is killed at a random moment"), "seed": 0}


def text_of(seed: int, number: int) -> Tokens:
    """Return the test sequence with this number, int32[n]."""
    chance = np.random.default_rng((seed, number))
    tokens = chance.integers(0, _ALPHABET, chance.integers(_SHORTEST, _LONGEST)).astype(np.int32)
    tokens[0] = _FIRST_NUMBER + number
    if number % 97 == 0:
        tokens[-1] = _WIDE_ID
    return tokens


@dataclass(slots=True)
class Store:
    """A cache directory and the numbers of the test sequences that it must or may contain.

    Attributes:
        directory: The directory.
        first: The oldest sequence that it may contain.
        durable: The newest sequence that is known to be on disk, so it must be found.
        announced: The newest sequence that may be found, because its writing had begun.
    """

    directory: Path
    first: int = 0
    durable: int = -1
    announced: int = -1


def write(seed: int, directory: Path, first: int, chance: random.Random, progress: Any) -> None:
    """Run the process to be killed: open a cache, append sequences from ``first`` on, close the cache, and wait."""
    life_s = chance.uniform(0.0, _WINDOW_S)
    progress[_PHASE] = _OPENING
    caches = CacheManager(CacheConfig(index=_INDEX, directory=directory), FINGERPRINT)
    cache = caches.get()
    progress[_PHASE] = _RUNNING
    stops: list[int] = []  # where sequences first, first + 1, ... end in the ring buffer
    number, close_at = first, time.monotonic() + life_s
    while time.monotonic() < close_at:
        progress[_APPENDED] = number
        cache.append(text_of(seed, number))
        stops.append(cache.snapshot().memtable_stop)
        number += 1
        while cache.stats().num_memtable_tokens > _MAX_FLUSHES_DUE * _INDEX.flush_tokens:
            time.sleep(0.0005)
        draw = chance.random()
        if draw < 0.03:
            caches.flush()
            progress[_DURABLE] = number - 1
        elif draw < 0.2:
            manifest = read_manifest(directory / DEFAULT_NAMESPACE, fingerprint=FINGERPRINT)
            if manifest is not None and manifest.segments:
                newest = manifest.segments[-1]
                if num_durable := bisect_right(stops, newest["start"] + newest["num_tokens"]):
                    progress[_DURABLE] = first + num_durable - 1
    progress[_PHASE] = _CLOSING
    caches.close()
    progress[_DURABLE], progress[_FAILURES] = number - 1, cache.stats().num_failures
    progress[_PHASE] = _CLOSED
    signal.pause()


def check(seed: int, store: Store, tally: Counter[str]) -> None:
    """Open the cache of a killed writer, compare it with the expected sequences, and count problems in ``tally``."""
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
        numbers = _check_text(seed, store, caches.get().snapshot().segments, tally)
    if numbers:
        store.first, store.durable = numbers[0], numbers[-1]
    store.announced = store.durable  # the next writer continues with the next number


def _check_text(seed: int, store: Store, segments: Sequence[Segment], tally: Counter[str]) -> list[int]:
    """Count missing and wrong sequences in ``tally``, and return the numbers of those found, the oldest first."""
    found = [sequence for sequence in sequences(segments) if len(sequence)]
    num_tokens = sum(map(len, segments))
    numbers = [int(sequence[0]) - _FIRST_NUMBER for sequence in found]
    tally["checked_sequences"] += len(numbers)
    is_wrong = bool(segments) and int(segments[-1].tokens[-1]) != SEPARATOR  # the last sequence is whole, too
    is_wrong |= num_tokens != sum(len(sequence) + 1 for sequence in found)
    if numbers:
        is_wrong |= numbers != list(range(numbers[0], numbers[0] + len(numbers)))
        is_wrong |= not store.first <= numbers[0] <= numbers[-1] <= store.announced
    for number, sequence in zip(numbers, found, strict=True):
        is_wrong |= not 0 <= number <= store.announced or not np.array_equal(sequence, text_of(seed, number))
    tally["wrong_texts"] += is_wrong
    first, last = (numbers[0], numbers[-1]) if numbers else (store.first, store.first - 1)
    # One segment, at most an eighth of the capacity, is evicted if the next sequence does not fit; the memtable of that
    # moment may have been lost.
    may_evict = num_tokens >= _INDEX.capacity_tokens * 7 // 8 - _MAX_UNFLUSHED - _LONGEST
    num_missing = max(0, store.durable - last) + (0 if may_evict else max(0, first - store.first))
    tally["lost_sealed_sequences"] += num_missing
    if is_wrong or num_missing:
        print(f"wrong={is_wrong} missing={num_missing} found={first}..{last} in {store}")
    return numbers


def kill_at_random(seed: int, num_kills: int, home: Path, run: Run) -> Counter[str]:
    """Kill writers of one directory, and of some new ones, at random moments; return the number of problems by kind."""
    chance, kept, tally, context = random.Random(seed), Store(home / "kept"), Counter[str](), get_context("fork")
    for number in range(num_kills):
        store = Store(home / f"new-{number}") if number % _FRESH_EVERY == _FRESH_EVERY - 1 else kept
        progress: Any = RawArray("q", [_STARTING, store.announced, store.durable, 0])
        arguments = (seed, store.directory, store.durable + 1, random.Random(chance.getrandbits(32)), progress)
        writer = context.Process(target=write, args=arguments, daemon=True)
        writer.start()
        (begins,) = chance.choices((_STARTING, _OPENING, _RUNNING, _CLOSING), (0.1, 0.2, 0.5, 0.2))
        deadline = time.monotonic() + 60
        while progress[_PHASE] < begins and writer.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, _WINDOW_S if begins == _RUNNING else _WINDOW_S / 4))
        writer.kill()
        writer.join()
        tally["writer_failures"] += progress[_FAILURES] + (writer.exitcode != -signal.SIGKILL)
        store.durable, store.announced = progress[_DURABLE], progress[_APPENDED]
        check(seed, store, tally)
        if (number + 1) % 20 == 0:
            wrong = {name: tally[name] for name in PROBLEMS if tally[name]} or "nothing wrong"
            run.say(f"{number + 1:>5} kills, sequences up to {kept.durable}: {wrong}")
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    run = Run("crash", __doc__, argv, OPTIONS, program="reliability --question crash", under=("ssd/retrieval",))
    with tempfile.TemporaryDirectory(prefix="crash-", ignore_cleanup_errors=True) as home:
        tally = kill_at_random(run.args.seed, run.args.kills, Path(home), run)
    return run.end(
        kills=run.args.kills,
        **{name: tally[name] for name in (*PROBLEMS, "checked_sequences")},
        is_wrong=any(tally[name] for name in PROBLEMS),
    )
