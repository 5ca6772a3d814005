"""Measure memory and speed of the retrieval index, the time until new text is searchable, and the cost of indexing.

``python -m benchmarks.index --tokens N [--static M] [--json]``

A cache with its background threads and files is filled with N tokens of synthetic completions (200 to 2,000 tokens
each), so that it contains segments of all sizes and a memtable. Lookups are timed: half of the contexts occur
completely, of the other half only the last 1 to 10 tokens occur. Then 10,000 tokens per second are appended. Last,
new processes open the cache directory (and the prebuilt cache of ``--static`` tokens) and must draft the stored text.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.child import ROOT
from benchmarks.index.measures import (
    DRAFT_TOKENS,
    FINGERPRINT,
    LAST_COMPLETIONS,
    LONGEST,
    TOKENS_PER_S,
    Context,
    completions,
    drafted_contexts,
    fill,
    measure,
    warm_up,
    watch_traffic,
)
from benchmarks.run import Option, Run
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.drafting import DraftRequest, make_drafter
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.prebuilt import PrebuiltWriter

_REOPENINGS: Final = 3
_STORED: Final = 8  # contexts of static text, and as many others, that a reopened cache must draft from
_LEAST_TOKENS: Final = 50_000


def measure_index(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all measurements, and return their figures for the result."""
    stream, random = completions(options.vocab, options.seed), np.random.default_rng(options.seed + 10)
    next(stream)  # which has all its memory then: it is none of the cache's
    index, idle = IndexConfig(capacity_tokens=options.tokens), warm_up()
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as temporary:
        static, directory = Path(temporary) / "static", Path(temporary) / "cache"
        with CacheManager(CacheConfig(index=index, directory=directory), FINGERPRINT) as caches:
            cache = caches.get()
            if options.static:
                texts = completions(options.vocab, options.seed + 1)
                with PrebuiltWriter(static, fingerprint=FINGERPRINT) as writer:
                    while (left := options.static - writer.num_tokens) > 1:
                        writer.append(next(texts)[: left - 1])
                cache.add_prebuilt_directory(static)
            room = LONGEST * (LAST_COMPLETIONS + 2)  # nothing is evicted before the ring is full
            snapshot, filled = fill(cache, stream, options.tokens - room, index, idle)
            say(f"ingest: {json.dumps(filled)}")
            proposing = measure(snapshot, random)
            say(f"propose: {json.dumps(proposing)}")
            traffic = watch_traffic(cache, stream, options.seconds, options.vocab)
            say(f"traffic: {json.dumps(traffic)}")
            caches.flush()
            stored = drafted_contexts(cache.snapshot(), _STORED, random)
        asked = [str(directory), str(static) if options.static else "", str(options.tokens)]
        asked.append(json.dumps([(each.tokens.tolist(), each.following.tolist()) for each in stored]))
        reopened = [_reopened(asked) for _ in range(_REOPENINGS)]
    return {
        **filled,
        # Static files are built elsewhere: what the process grew by says nothing about their tokens.
        "bytes_per_token": None if options.static else filled["bytes_per_token"],
        **proposing,
        **traffic,
        "reopen_s": median(reopened),
        "reopen_s_all": reopened,
    }


def _reopened(asked: Sequence[str]) -> float:
    """Run `reopen` in a new process, and return its result. Raises AssertionError with the output if it fails."""
    command = [sys.executable, "-m", "benchmarks.index", "reopen", *asked]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise AssertionError(f"reopening failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def reopen(directory: str, static: str, capacity: str, stored: str) -> float:
    """Open a cache directory and return the seconds until the first draft.

    Imports are not included, and compiled kernels come from numba's cache on disk. ``static`` is the directory of a
    prebuilt cache, or empty. ``stored`` is JSON: stored contexts, each with the tokens that follow it. Raises
    AssertionError if these tokens are not drafted.
    """
    contexts = [
        Context(np.array(tokens, np.int32), len(tokens), np.array(following, np.int32))
        for tokens, following in json.loads(stored)
    ]
    config = CacheConfig(index=IndexConfig(capacity_tokens=int(capacity)), directory=Path(directory))
    took = None
    began = time.perf_counter()
    with CacheManager(config, FINGERPRINT) as caches:
        if static:
            caches.add_prebuilt_directory(Path(static))
        drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=DRAFT_TOKENS))
        snapshot = caches.get().snapshot()
        for number, context in enumerate(contexts):
            request = DraftRequest(str(number), context.tokens, len(context.tokens), snapshot, DRAFT_TOKENS)
            (draft,) = drafter.propose([request])
            took = took or time.perf_counter() - began
            if not context.goes_on(draft.token_ids):
                raise AssertionError(f"stored context {number} of {len(contexts)} was not drafted from after reopening")
    assert took is not None
    return round(took, 3)


COLUMNS = (
    (">tokens in the ring buffer", "{tokens:,}"),
    (">tokens in prebuilt segments", "{parameters[static]:,}"),
    (">memory, bytes per token", "{bytes_per_token:.1f}"),
    (">lookup and 10 draft tokens for a new request, median µs", "{propose_us_p50:.0f}"),
    (">lookup and 10 draft tokens for a new request, 99th percentile, µs", "{propose_us_p99:.0f}"),
    (">lookup and 10 draft tokens for a running request, median µs", "{row_us_p50:.0f}"),
    (">time until new text is searchable, 99th percentile, ms", "{freshness_ms_p99:.1f}"),
    (">background indexing, share of one core", "{maintenance_core_share:.1%}"),
    (">restart: time to the first draft, s", "{reopen_s:.2f}"),
)
NOTE = (
    "The text is synthetic, with {parameters[vocab]:,} different tokens. The contexts have 64 tokens. Half of the "
    "searched contexts occur in the index completely. Of the other half, only the last 1 to 10 tokens occur. Memory is "
    "the growth of the process. Background indexing was measured at 10,000 new tokens per second. The command is "
    "`python -m benchmarks.index`, with one thread. Measured on {measured}."
)
OPTIONS: dict[str, Any] = {
    "tokens": Option(default=1_000_000, least=_LEAST_TOKENS, help="size of the ring buffer in tokens, which is filled"),
    "vocab": Option(default=32_000, least=16, help="number of different token ids"),
    "static": Option(default=0, least=0, help="number of tokens in prebuilt segments in addition"),
    "seconds": Option(default=20.0, least=LONGEST / TOKENS_PER_S, help="duration of the measurement under traffic"),
    "seed": 0,
}


def main(argv: Sequence[str] | None = None) -> int:
    if argv is None and sys.argv[1:2] == ["reopen"]:
        print(reopen(*sys.argv[2:]))
        return 0
    run = Run("index", __doc__, argv, OPTIONS, under=("ssd/jit", "ssd/config.py", "ssd/drafting", "ssd/retrieval"))
    args = run.args
    return run.end(tokens=args.tokens, **measure_index(args, run.say))


if __name__ == "__main__":
    sys.exit(main())
