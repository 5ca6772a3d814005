"""The phases of a run, one function each."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.index import children, live, lookups, merging
from benchmarks.index.contexts import sample_contexts
from benchmarks.index.data import LONGEST, completions, sequences_within
from benchmarks.index.ingest import FINGERPRINT, LAST_COMPLETIONS, Filled, describe_segments, fill, warm_up
from benchmarks.peers.names import PEER_NAMES
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.static import StaticWriter

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
    sealing = merging.measure_seals(completions(options.data, options.vocab, options.seed + 2), index.seal_tokens)
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
            proposing = lookups.measure(filled.snapshot, random)
            say(f"propose: {json.dumps(asdict(proposing))}")
            contexts = sample_contexts(filled.snapshot, _CONTEXTS, random)
            traffic = live.measure(cache, stream, contexts, options.seconds, options.vocab)
            say(f"traffic: {json.dumps(asdict(traffic))}")
            beside = merging.measure_merging(cache, directory, index, contexts)
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
        "stall_ms_max": traffic.beside.stall_ms.max,
        "stall_ms_max_no_traffic": traffic.beside_no_traffic.stall_ms.max,
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
    built = children.run("build", data=options.data, vocabulary=options.vocab, seed=options.seed, tokens=tokens)
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
        figures = children.run(
            "reopen", directory=str(directory), capacity=capacity, context=context, fingerprint=FINGERPRINT
        )
        say(f"reopen: {json.dumps(figures)}")
        found.append(float(figures["reopen_s"]))
    return found


def compare_peers(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Ours and each peer at --peer-tokens; what belongs under "ours_at_peer_tokens" and "peers"."""
    from benchmarks.index.against import compare

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
        figures = compare(names, filled, sequences, random)
    for name, values in figures.items():
        say(f"peer {name}: {json.dumps(values)}")
    ours = {"tokens": filled.snapshot.num_tokens, "structure": describe_segments(filled.snapshot, index)}
    return {"ours_at_peer_tokens": ours | _without_snapshot(filled), "peers": figures}


def sort_worst_cases(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Figures by name of the text."""
    figures = {}
    for name in children.WORST_CASES:
        tokens = min(options.tokens, _MOST_SORTED)
        figures[name] = children.run("worst_case", name=name, tokens=tokens, seed=options.seed)
        say(f"worst case {name}: {json.dumps(figures[name])}")
    return figures
