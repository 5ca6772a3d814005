"""Replicas for tests: one in this process, or one that is run as a program so that it can be killed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ssd.config import CacheConfig, IndexConfig
from ssd.replication.connection import connect
from ssd.replication.entry import Entry, pack_entry, stream_key
from ssd.replication.redis_stream import FIELD
from ssd.replication.replication_log import ReplicationLog
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.segment import SEPARATOR
from tests.waiting import PATIENCE_S, wait_until

FINGERPRINT = "0123456789abcdef" * 2
VOCAB_SIZE = 1000
KEY = stream_key(FINGERPRINT, "default")


class Replica(NamedTuple):
    """A cache and what it shares through."""

    caches: CacheManager
    log: ReplicationLog

    def append(self, *texts: list[int]) -> None:
        """Learn ``texts`` as finished sequences."""
        for text in texts:
            self.caches.get().append(text)

    def stored(self) -> list[list[int]]:
        """The sequences of its default namespace, oldest first."""
        return stored(self.caches)


@contextmanager
def replica(
    url: str, directory: Path | None = None, *, fingerprint: str = FINGERPRINT, max_tokens: int = 1 << 20
) -> Iterator[Replica]:
    """A replica without threads for its cache: it seals when told to, and when it is closed."""
    config = CacheConfig(directory=directory)
    with (
        ReplicationLog(url, fingerprint=fingerprint, vocab_size=VOCAB_SIZE, max_tokens=max_tokens) as log,
        CacheManager(config, fingerprint, inline=True, on_open=log.attach) as caches,
    ):
        yield Replica(caches, log)


def stored(caches: CacheManager, namespace: str = "default") -> list[list[int]]:
    """The sequences a cache holds, oldest first."""
    snapshot = caches.get(namespace).snapshot()
    positions = np.arange(snapshot.memtable_start, snapshot.memtable_stop)
    tail = snapshot.ring[positions & (len(snapshot.ring) - 1)]
    text = np.concatenate([*(segment.tokens for segment in snapshot.segments), tail]).tolist()
    sequences: list[list[int]] = [[]]
    for token in text:
        if token == SEPARATOR:
            sequences.append([])
        else:
            sequences[-1].append(token)
    return sequences[:-1]


def eventually(claim: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait until ``claim()`` is true."""
    wait_until(claim, within_s)


def entry(*tokens: int, replica_id: bytes = b"elsewher", sequence_id: bytes = b"s" * 16, key: str = KEY) -> bytes:
    """The bytes of an entry another replica could have written."""
    return pack_entry(Entry(replica_id, sequence_id, np.array(tokens, np.int32)), key)


def foreign(number: int, key: str = KEY) -> dict[bytes, bytes]:
    """What another replica writes for the text [7, ``number``]."""
    return {FIELD: entry(7, number, sequence_id=b"another." + number.to_bytes(8, "little"), key=key)}


_numbers = count()


def catch_up(url: str, *replicas: Replica) -> list[int]:
    """Wait until all ``replicas`` have published what they learned, and read the log up to an entry at its end.

    Returns the tokens of that entry.
    """
    eventually(lambda: all(one.log.stats().num_queued == 0 for one in replicas))
    number = next(_numbers)
    text = [VOCAB_SIZE - 1, number // VOCAB_SIZE, number % VOCAB_SIZE]
    with closing(connect(url)) as client:
        client.xadd(KEY, {FIELD: entry(*text, sequence_id=b"the end " + number.to_bytes(8, "little"))})
    eventually(lambda: all(text in one.stored() for one in replicas))
    return text


def text_of(writer: int, number: int) -> list[int]:
    """A sequence of 4 to 60 tokens that no other (writer, number) has."""
    rng = np.random.default_rng([writer, number])
    return [writer, number // 900, number % 900, *rng.integers(0, 900, rng.integers(1, 58)).tolist()]


def main(url: str, directory: str, writer: str, first: str) -> None:
    """Append sequence after sequence, saying each number, until killed. Seals and merges all the time."""
    index = IndexConfig(flush_tokens=200, rebuild_interval_s=0.05)
    config = CacheConfig(directory=Path(directory), index=index)
    with (
        ReplicationLog(url, fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE) as log,
        CacheManager(config, FINGERPRINT, on_open=log.attach) as caches,
    ):
        for number in count(int(first)):
            caches.get().append(text_of(int(writer), number))
            print(number, flush=True)
            time.sleep(0.001)  # slower than sealing


if __name__ == "__main__":
    main(*sys.argv[1:])
