"""The index's benchmark end to end on little text, and the text it makes; no times are judged."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.index.__main__ import main
from benchmarks.index.asked import CONTEXT_TOKENS, compare, sample_contexts
from benchmarks.index.fill import FINGERPRINT, fill, has_all_sizes, num_by_size
from benchmarks.index.live import largest_merge
from benchmarks.made_text import EDITED, LONGEST, SHORTEST, completions, cut_outputs, flat, sequences_within
from benchmarks.peers.names import PEER_NAMES
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.search import longest_match
from ssd.retrieval.segment import Segment
from tests.reference.drafting import make_snapshot

PROMISED = (
    "tokens", "segments", "bytes_per_token", "peak_bytes_per_token", "build_tokens_per_s", "propose_us_p50",
    "propose_us_p99", "propose64_us_p50", "freshness_ms_p99", "maintenance_core_share", "propose_us_p99_merging",
    "reopen_s",
)  # fmt: skip


def test_made_text_is_the_same_for_one_seed_and_a_quarter_of_it_is_near_copies() -> None:
    first, again = ([tokens.tolist() for tokens in itertools.islice(completions("made", 500, 3), 40)] for _ in "12")
    assert first == again
    assert all(200 <= len(tokens) <= 2000 and min(tokens) >= 0 and max(tokens) < 500 for tokens in first)
    documents = list(itertools.islice(completions("made", 32_000, 1), 300))
    copies = 0
    for i, tokens in enumerate(documents):
        shares = [(tokens == other).mean() for other in documents[:i] if len(other) == len(tokens)]
        copies += any(share > 1 - 4 * EDITED for share in shares)
    assert 0.15 < copies / len(documents) < 0.35


def test_outputs_are_joined_and_cut_into_completions_that_lose_a_short_rest_alone() -> None:
    outputs = [np.full(n, 5, np.int32) for n in (3, 150, 90, 2500, 2000, 1999, 250, 6001, 120)]
    text = np.concatenate([np.append(output, np.int32(9)) for output in outputs])
    bounds = cut_outputs(text)
    sizes = np.diff(bounds)
    assert bounds[0] == 0 and bounds[-1] == len(text) - 121
    assert sizes.min() >= SHORTEST and sizes.max() <= LONGEST
    assert (text[np.array(bounds[1:]) - 1] == 9).sum() >= 5  # most still end where the model stopped


@pytest.mark.parametrize("size", [2, 3000, 3001, 10_000])
def test_flat_text_has_the_size_asked_for_and_ends_with_a_separator(size: int) -> None:
    text = flat(completions("made", 500, 0), size)
    assert len(text) == size and text[-1] == -1 and text.dtype == np.int32


def test_contexts_occur_as_far_as_they_say() -> None:
    parts = [flat(completions("made", 2000, seed), 20_000).tolist() for seed in (1, 2)]
    snapshot = make_snapshot(parts)
    contexts = sample_contexts(snapshot, 40, np.random.default_rng(0))
    assert [context.is_present for context in contexts] == [True, False] * 20
    for context in contexts:
        known = longest_match(snapshot, context.tokens, CONTEXT_TOKENS).length
        assert known == context.known and (context.is_present or 1 <= known <= 10)


@pytest.mark.slow
def test_the_whole_benchmark_runs_and_ends_with_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "60000", "--static", "40000", "--seconds", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == "index" and result["peers"] == {}
    assert all(math.isfinite(result[key]) for key in PROMISED)
    assert result["structure"]["tail"] > 0 and len(result["structure"]["ring"]) > 1
    assert sum(result["structure"]["static"]) >= 40_000
    assert result["checked_drafts_equal"] >= 0.9 * result["checked_drafts"]


def test_the_largest_merge_is_one_that_the_cache_could_make() -> None:
    def sizes(lengths: list[int], first: int | None, most: int, fanout: int) -> list[int]:
        nothing = np.empty(0, np.uint8), np.empty(0, np.uint64)
        segments = [
            Segment(nothing[0], np.empty(n, np.int32), nothing[1], 2, first if place == 0 else place, "0")
            for place, n in enumerate(lengths)
        ]
        return [len(segment) for segment in largest_merge(segments, most, fanout)]

    assert sizes([90, 60, 30, 20, 10, 10, 10], 0, 100, 4) == [90, 10]
    assert sizes([90, 60, 30, 20, 10, 10, 10], 0, 50, 2) == [30, 20]
    assert sizes([40, 20, 10], None, 100, 4) == [20, 10]  # never a static one
    assert sizes([90], 0, 100, 4) == []


def test_ingest_leaves_every_token_and_a_tail() -> None:
    index = IndexConfig(capacity_tokens=40_000, seal_tokens=256)
    sequences = sequences_within(completions("made", 500, 0), 20_000)
    stored = sum(len(tokens) + 1 for tokens in sequences)
    with CacheSet(CacheConfig(index=index), FINGERPRINT) as caches:
        without_last = stored - sum(len(tokens) + 1 for tokens in sequences[-2:])
        filled = fill(caches.get(), iter(sequences), without_last, index, 0)
        assert filled.snapshot.num_tokens == stored
        assert filled.snapshot.tail_stop > filled.snapshot.tail_start
        counts = num_by_size(filled.snapshot, index)
        assert sum(counts) == len(filled.snapshot.segments) and len(counts) == 3
        assert has_all_sizes(filled.snapshot, index) == (min(counts) > 0)


def test_a_peer_that_is_not_installed_is_reported_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_PEERS", str(tmp_path))
    nobody: list[npt.NDArray[np.int32]] = []
    figures = compare(PEER_NAMES, None, 1.0, nobody, np.random.default_rng(0))  # type: ignore[arg-type]
    assert len(figures) == len(PEER_NAMES) + 1  # the tree at two depths
    assert all("make bench-peers" in values["unavailable"] for values in figures.values())


@pytest.mark.parametrize("arguments", [["--tokens", "10"], ["--vocab", "3"], ["--static", "-1"], ["--seconds", "0"]])
def test_bad_sizes_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "takes numbers from" in capsys.readouterr().err


def test_traces_that_are_not_there_are_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SSD_TRACES", raising=False)
    assert main(["--data", "traces", "--json"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
