"""The same fleet with nothing left out: each replica a cache, a writer and a reader of its own over one log.

As ``views.Lagging``, but every replica stores everything. Reader and writer are those that serve, without their
threads: what they would do in time is done before a replica is asked, and their server is in this process, on the
virtual clock.
"""

from __future__ import annotations

import time

from benchmarks.fleet.streams import Streams
from benchmarks.fleet.views import FINGERPRINT, make_cache
from ssd.config import IndexConfig
from ssd.retrieval.packed import Tokens
from ssd.retrieval.snapshot import Snapshot
from ssd.sharing.bookmark import Bookmark
from ssd.sharing.keys import stream_key
from ssd.sharing.reader import LogReader
from ssd.sharing.redis_log import max_entries_of
from ssd.sharing.writer import LogWriter

_URL = "redis://in-this-process"
_KEY = stream_key(FINGERPRINT, "fleet")
_QUEUED_TOKENS = 1 << 24
_REST_S = 0.01


class Fleet:
    """A ``View``. ``max_tokens`` : bound of the log."""

    def __init__(self, replicas: int, lag_s: float, config: IndexConfig, *, vocab_size: int, max_tokens: int) -> None:
        self._server = Streams()
        self.replicas = [
            Replica(self._server, number, lag_s, config, vocab_size=vocab_size, max_tokens=max_tokens)
            for number in range(replicas)
        ]

    def snapshot(self, replica: int, now: float) -> Snapshot:
        self._server.now = now
        self.replicas[replica].receive()
        return self.replicas[replica].cache.snapshot()

    def learn(self, replica: int, now: float, text: Tokens, prompt_length: int) -> None:
        self._server.now = now
        self.replicas[replica].receive()
        self.replicas[replica].learn(text, prompt_length)


class Replica:
    """One of them. ``written``, ``read`` : what its two connections carried; ``receive_s`` : CPU time of its reader."""

    def __init__(
        self, server: Streams, number: int, lag_s: float, config: IndexConfig, *, vocab_size: int, max_tokens: int
    ) -> None:
        self.cache = make_cache(config)
        self.receive_s = 0.0
        max_entries = max_entries_of(max_tokens)
        self.writer = LogWriter(_URL, max_entries=max_entries, max_queued_tokens=_QUEUED_TOKENS)
        self.reader = LogReader(_URL, vocab_size=vocab_size, max_tokens=max_tokens, max_entries=max_entries)
        self.writer._client, self.written = server.client()
        self.reader._client, self.read = server.client(lag_s=lag_s)
        self.reader.link.is_connected = True  # nothing interrupts it: no comparison with the log at every read
        replica_id = number.to_bytes(8, "little")
        self.cache.add_listener(lambda pieces: self.writer.publish(_KEY, replica_id, pieces))
        self._stream = self.reader.follow(_KEY, self.cache, Bookmark(replica_id))

    def receive(self) -> None:
        """Read what there is."""
        began = time.process_time()
        while True:
            num_read = self._num_read()
            self.reader._is_changed.set()  # nothing to gather: the clock stands still
            self.reader._exchange()
            if self._stream.is_resting:  # this machine was slow, which the virtual clock does not know
                time.sleep(_REST_S)
            elif self._num_read() == num_read:
                break
            self.cache.maintain()
        self.receive_s += time.process_time() - began

    def learn(self, text: Tokens, prompt_length: int) -> None:
        """Store a request of its own, and write it to the log."""
        self.cache.append(text, prompt_length=prompt_length)
        self.cache.maintain()
        if self.writer.num_queued:
            self.writer._exchange()

    def _num_read(self) -> int:
        return self.reader.num_received + self.reader.num_known + self.reader.num_invalid
