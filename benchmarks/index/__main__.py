"""How large, how fast, how fresh is the retrieval index, and what does its upkeep cost?

``python -m benchmarks.index --tokens N [--data made|traces] [--static M] [--peers [NAME ...]] [--json]``

A real cache (its thread, its rebuild process, files in a temporary directory) is filled with N tokens in completions
of 200 to 2,000, and measured as ingest leaves it: segments of all sizes, the tail not empty. Half the contexts asked
for are present in full; of the other half only the last 1 to 10 tokens occur. The last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.index.asked import compare, measure, sample_contexts
from benchmarks.index.fill import FINGERPRINT, LAST_COMPLETIONS, Filled, describe_segments, fill, trim, warm_up
from benchmarks.index.live import TOKENS_PER_S, measure_merging, measure_seals, measure_traffic
from benchmarks.made_text import KINDS, LONGEST, completions, flat, sequences_within
from benchmarks.peers.names import PEER_NAMES
from benchmarks.run import Option, Run
from ssd.config import CacheConfig, IndexConfig
from ssd.errors import ConfigError
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.static import StaticWriter

_ROOT = Path(__file__).parents[2]


def run_child(task: str, **arguments: Any) -> dict[str, Any]:
    """Do ``task`` in a fresh process; its figures. Raises AssertionError with what it said when it fails."""
    command = [sys.executable, "-m", "benchmarks.index", "child", task, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT)
    if done.returncode:
        raise AssertionError(f"{task} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


def build(data: str, vocabulary: int, seed: int, tokens: int) -> dict[str, Any]:
    """Sort the first ``tokens`` tokens of a stream into one segment: how fast, and the largest growth of resident
    memory beside the text itself.
    """
    from ssd.retrieval.suffix_array import build_segment

    text = flat(completions(data, vocabulary, seed), tokens)
    build_segment(np.append(text[:2000], np.int32(-1)).astype(np.int32), start=0, segment_id="0")  # libraries loaded
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status_bytes("VmRSS")
    began = time.perf_counter()
    segment = build_segment(text, start=0, segment_id="1")
    took = time.perf_counter() - began
    peak = _status_bytes("VmHWM") - before
    return {
        "tokens": len(text),
        "width_bytes": segment.width,
        "seconds": round(took, 3),
        "tokens_per_s": round(len(text) / took),
        "peak_bytes_per_token": round(peak / len(text), 2),
    }


def reopen(directory: str, capacity: int, context: list[int], fingerprint: str) -> dict[str, Any]:
    """Open a cache directory until its first proposal, everything imported. Kernels come from numba's cache on disk."""
    from ssd.config import CacheConfig, DraftConfig, IndexConfig
    from ssd.drafting import DraftRequest, make_drafter
    from ssd.retrieval.cache import CacheSet

    tokens = np.array(context, np.int32)
    config = CacheConfig(index=IndexConfig(capacity_tokens=capacity), directory=Path(directory))
    began = time.perf_counter()
    with CacheSet(config, fingerprint) as caches:
        opened = time.perf_counter()
        drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=10))
        snapshot = caches.get().snapshot()
        draft = drafter.propose([DraftRequest("first", tokens, len(tokens), snapshot, 10)])[0]
        proposed = time.perf_counter()
    if not len(draft.token_ids):
        raise AssertionError("a context that is stored was not drafted from after reopening")
    return {
        "reopen_s": round(proposed - began, 3),
        "open_s": round(opened - began, 3),
        "tokens": snapshot.num_tokens,
    }


Say = Callable[[str], None]

_MOST_SORTED = 16 << 20
_CONTEXTS = 1000
_REOPENINGS = 3


def measure_index(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Everything but peers and worst cases; what belongs into the JSON object."""
    index = IndexConfig(capacity_tokens=options.tokens)
    built = _bulk_build(options, min(options.tokens, _MOST_SORTED), say)
    idle = warm_up()
    stream = completions(options.data, options.vocab, options.seed)
    random = np.random.default_rng(options.seed + 10)
    sealing = measure_seals(completions(options.data, options.vocab, options.seed + 2), index.seal_tokens)
    say(f"seal: {json.dumps(asdict(sealing))}")
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as temporary:
        static, directory = Path(temporary) / "static", Path(temporary) / "cache"
        if options.static:
            _build_static(static, options, say)
        with CacheSet(CacheConfig(index=index, directory=directory), FINGERPRINT) as caches:
            cache = caches.get()
            if options.static:
                cache.add_static_directory(static)
            room = LONGEST * (LAST_COMPLETIONS + 2)  # nothing is evicted before the ring is full
            filled = fill(cache, stream, options.tokens - room, index, idle, most_extra=options.tokens // 8)
            structure = describe_segments(filled.snapshot, index)
            say(f"ingest: {json.dumps(_without_snapshot(filled))}")
            say(f"structure: {json.dumps(structure)}")
            proposing = measure(filled.snapshot, random)
            say(f"propose: {json.dumps(asdict(proposing))}")
            contexts = sample_contexts(filled.snapshot, _CONTEXTS, random)
            traffic = measure_traffic(cache, stream, contexts, options.seconds, options.vocab)
            say(f"traffic: {json.dumps(asdict(traffic))}")
            beside = measure_merging(cache, directory, index, contexts)
            say(f"merging: {json.dumps(None if beside is None else asdict(beside))}")
            caches.flush()
            stored = sample_contexts(cache.snapshot(), 1, random)[0].tokens.tolist()
        reopened = _reopen(directory, options.tokens, stored, say)
    return {
        "segments": len(filled.snapshot.segments),
        "structure": structure,
        **_without_snapshot(filled),
        "rebuild_process_idle_bytes": idle,
        "build_tokens_per_s": built["tokens_per_s"],
        "bulk_peak_bytes_per_token": built["peak_bytes_per_token"],
        "build": built,
        "seal": asdict(sealing),
        **asdict(proposing),
        "freshness_ms_p99": traffic.freshness_ms_p99,
        "maintenance_core_share": traffic.maintenance_core_share,
        "traffic": asdict(traffic),
        "propose_us_p99_merging": None if beside is None else beside.merging.p99,
        "propose_us_p99_not_merging": None if beside is None else beside.idle.p99,
        "merging": None if beside is None else asdict(beside),
        "reopen_s": statistics.median(reopened),
        "reopen_s_all": reopened,
    }


def _without_snapshot(filled: Filled) -> dict[str, Any]:
    names = [name for name in Filled.__dataclass_fields__ if name != "snapshot"]
    return {("ingest_" if name == "tokens_per_s" else "") + name: round(getattr(filled, name), 2) for name in names}


def _bulk_build(options: argparse.Namespace, tokens: int, say: Say) -> dict[str, Any]:
    built = run_child("build", data=options.data, vocabulary=options.vocab, seed=options.seed, tokens=tokens)
    say(f"build: {json.dumps(built)}")
    return built


def _build_static(path: Path, options: argparse.Namespace, say: Say) -> None:
    stream = completions(options.data, options.vocab, options.seed + 1)
    with StaticWriter(path, fingerprint=FINGERPRINT) as writer:
        while (left := options.static - writer.num_tokens) > 1:
            writer.append(next(stream)[: left - 1])
    say(f"static: {writer.num_tokens} tokens are built")


def _reopen(directory: Path, capacity: int, context: list[int], say: Say) -> list[float]:
    """Seconds to the first proposal, each in a fresh process."""
    found = []
    for _ in range(_REOPENINGS):
        figures = run_child(
            "reopen", directory=str(directory), capacity=capacity, context=context, fingerprint=FINGERPRINT
        )
        say(f"reopen: {json.dumps(figures)}")
        found.append(float(figures["reopen_s"]))
    return found


def compare_peers(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Ours and each peer at --peer-tokens; what belongs under "ours_at_peer_tokens" and "peers"."""
    random = np.random.default_rng(options.seed + 11)
    index = IndexConfig(capacity_tokens=options.peer_tokens)
    idle = warm_up()
    sequences = sequences_within(completions(options.data, options.vocab, options.seed), options.peer_tokens)
    with (
        tempfile.TemporaryDirectory(prefix="ssd-bench-") as temporary,
        CacheSet(CacheConfig(index=index, directory=Path(temporary)), FINGERPRINT) as caches,
    ):
        num_tokens = sum(len(tokens) + 1 for tokens in sequences[:-LAST_COMPLETIONS])
        filled = fill(caches.get(), iter(sequences), num_tokens, index, idle)
        # sglang's trie of default size forgets all but half a million tokens: it is asked where it is named.
        names = options.peers or [name for name in PEER_NAMES if name != "sglang-ngram"]
        figures = compare(names, filled.snapshot, filled.bytes_per_token, sequences, random)
    for name, values in figures.items():
        say(f"peer {name}: {json.dumps(values)}")
    ours = {"tokens": filled.snapshot.num_tokens, "structure": describe_segments(filled.snapshot, index)}
    return {"ours_at_peer_tokens": ours | _without_snapshot(filled), "peers": figures}


_LEAST_TOKENS = 50_000


OPTIONS: dict[str, Any] = {
    "tokens": Option(default=1_000_000, least=_LEAST_TOKENS, help="size of the ring, filled"),
    "data": Option(default="made", choices=KINDS, help="what text"),
    "vocab": Option(default=32_000, least=16, help="token ids are below this"),
    "static": Option(default=0, least=0, help="tokens in static segments beside the ring"),
    "seconds": Option(default=20.0, least=LONGEST / TOKENS_PER_S, help="how long it is watched under traffic"),
    "peers": Option(default=None, several=True, choices=PEER_NAMES, help="compare with these; with none named, all"),
    "peer_tokens": Option(default=None, kind=int, least=_LEAST_TOKENS, help="of that comparison; at most 4,000,000"),
    "seed": 0,
}
_SHOWN = (
    ("bytes a token, at rest", "bytes_per_token", ".2f"),
    ("bytes a token, peak of ingest", "peak_bytes_per_token", ".2f"),
    ("bytes a token, peak of one sort", "bulk_peak_bytes_per_token", ".2f"),
    ("one sort, tokens/s", "build_tokens_per_s", ",.0f"),
    ("ingest, tokens/s", "ingest_tokens_per_s", ",.0f"),
    ("propose, us p50", "propose_us_p50", ".1f"),
    ("propose, us p99", "propose_us_p99", ".1f"),
    ("propose while merging, us p99", "propose_us_p99_merging", ".1f"),
    ("propose between merges, us p99", "propose_us_p99_not_merging", ".1f"),
    ("freshness, ms p99", "freshness_ms_p99", ".2f"),
    ("maintenance, share of a core", "maintenance_core_share", ".3f"),
    ("reopen, s", "reopen_s", ".3f"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    if argv is None and sys.argv[1:2] == ["child"]:
        task: Callable[..., dict[str, Any]] = build if sys.argv[2] == "build" else reopen
        print(json.dumps(task(**json.loads(sys.argv[3]))))
        return 0
    run = Run("index", __doc__, argv, OPTIONS)
    args = run.args
    args.peer_tokens = args.peer_tokens or min(args.tokens, 4_000_000)
    run.parameters["peer_tokens"] = args.peer_tokens
    try:
        next(completions(args.data, args.vocab, args.seed))  # is there text?
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = measure_index(args, run.say)
    found |= {"peers": {}} if args.peers is None else compare_peers(args, run.say)
    for label, key, form in _SHOWN:
        run.say(f"{label:<34} {'-' if found[key] is None else format(found[key], form):>14}")
    return run.end(tokens=args.tokens, **found)


if __name__ == "__main__":
    sys.exit(main())
