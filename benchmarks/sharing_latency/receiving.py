"""What receiving an entry takes of a replica's reader: CPU time of its thread, and calls of Python functions.

The reader that serves, without its thread, on a real server: replies of one entry, as a replica of a small fleet gets
them, and of several. The pause after a reply is left out. Other processes make a thread slower and never faster, so
fifth percentiles are said; the calls are the same on every machine.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from typing import Any, Final

import numpy as np

from benchmarks.sharing_latency.texts import FINGERPRINT, LOOKED_UP, VOCABULARY, text_of
from ssd.config import CacheConfig
from ssd.retrieval.cache import CacheSet
from ssd.sharing.append import FIELD
from ssd.sharing.bookmark import Bookmark, sequence_id_of
from ssd.sharing.connection import connect
from ssd.sharing.entry import Entry, pack_entry
from ssd.sharing.keys import stream_key
from ssd.sharing.reader import LogReader
from ssd.sharing.redis_log import DEFAULT_MAX_TOKENS, max_entries_of

SEVERAL: Final = 8
_WARM: Final = 50
_COUNTED: Final = 20
_OTHER: Final = b"elsewher"


def measure(url: str, replies: int) -> dict[str, Any]:
    """Microseconds of an entry, of ``replies`` with one and of as many with SEVERAL. Empties the server."""
    key = stream_key(FINGERPRINT, LOOKED_UP)
    reader = LogReader(
        url, vocab_size=VOCABULARY, max_tokens=DEFAULT_MAX_TOKENS, max_entries=max_entries_of(DEFAULT_MAX_TOKENS)
    )
    with closing(connect(url)) as client, CacheSet(CacheConfig(), FINGERPRINT, namespace=LOOKED_UP) as caches:
        client.flushall()
        stream = reader.follow(key, caches.get(), Bookmark(b"receiver"))
        reader._exchange()
        reader.link.is_connected = True  # nothing interrupts it: no comparison with the log at every read
        written = 0

        def receive(count: int, profile: Any = None) -> float:
            nonlocal written
            for number in range(written, written + count):
                entry = Entry(_OTHER, sequence_id_of(_OTHER, number), text_of(0, number))
                client.xadd(key, {FIELD: pack_entry(entry, key)})
            written += count
            reader._is_changed.set()  # no pause
            stream.compare_at = time.monotonic() + 60.0
            began = time.thread_time()
            sys.setprofile(profile)
            reader._exchange()
            sys.setprofile(None)
            return 1e6 * (time.thread_time() - began) / count

        for _ in range(_WARM):
            receive(1)
        taken = {count: [receive(count) for _ in range(replies)] for count in (1, SEVERAL)}
        calls = 0

        def count_calls(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        for _ in range(_COUNTED):
            receive(1, count_calls)
        if reader.num_received != written:
            raise AssertionError(f"{written} entries were written, {reader.num_received} received")
    reader.close(0)
    return {
        "replies": replies,
        "several": SEVERAL,
        "us_of_one": round(float(np.percentile(taken[1], 5)), 1),
        "us_of_several": round(float(np.percentile(taken[SEVERAL], 5)), 1),
        "median_us_of_one": round(float(np.median(taken[1])), 1),
        "median_us_of_several": round(float(np.median(taken[SEVERAL])), 1),
        "calls": round(calls / _COUNTED),
    }
