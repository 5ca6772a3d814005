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
from benchmarks.index.against import compare
from benchmarks.index.children import WORST_CASES, worst_case, worst_case_text
from benchmarks.index.contexts import CONTEXT_TOKENS, sample_contexts
from benchmarks.index.ingest import FINGERPRINT, fill, has_all_sizes, num_by_size
from benchmarks.index.merging import largest_merge
from benchmarks.made_text import EDITED, KINDS, LONGEST, SHORTEST, completions, cut_outputs, flat, sequences_within
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
GENERATED = [kind for kind in KINDS if kind != "traces"]


@pytest.mark.parametrize("kind", GENERATED)
def test_data_is_the_same_for_one_seed_and_within_its_vocabulary(kind: str) -> None:
    first = [tokens.tolist() for tokens in itertools.islice(completions(kind, 500, 3), 40)]
    again = [tokens.tolist() for tokens in itertools.islice(completions(kind, 500, 3), 40)]
    assert first == again
    assert all(200 <= len(tokens) <= 2000 and min(tokens) >= 0 and max(tokens) < 500 for tokens in first)
    assert kind == "repeat" or len({tuple(tokens) for tokens in first}) > 20


def test_a_quarter_of_made_documents_are_near_copies_of_earlier_ones() -> None:
    documents = list(itertools.islice(completions("made", 32_000, 1), 300))
    copies = 0
    for i, tokens in enumerate(documents):
        shares = [(tokens == other).mean() for other in documents[:i] if len(other) == len(tokens)]
        copies += any(share > 1 - 4 * EDITED for share in shares)
    assert 0.15 < copies / len(documents) < 0.35


def test_outputs_are_joined_and_cut_into_completions_that_lose_a_short_rest_alone() -> None:
    end = 9
    outputs = [np.full(n, 5, np.int32) for n in (3, 150, 90, 2500, 2000, 1999, 250, 6001, 120)]
    text = np.concatenate([np.append(output, np.int32(end)) for output in outputs])
    bounds = cut_outputs(text)
    sizes = np.diff(bounds)
    assert bounds[0] == 0 and bounds[-1] == len(text) - 121
    assert sizes.min() >= SHORTEST and sizes.max() <= LONGEST
    assert (text[np.array(bounds[1:]) - 1] == end).sum() >= 5  # most still end where the model stopped


def test_sequences_within_fill_what_they_may_and_no_more() -> None:
    sequences = sequences_within(completions("zipf", 500, 0), 20_000)
    assert 20_000 - LONGEST - 1 <= sum(len(tokens) + 1 for tokens in sequences) <= 20_000


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


def test_the_fibonacci_word_and_the_periods_are_what_they_are_called() -> None:
    fibonacci = worst_case_text("fibonacci", 500, 0)[:-1]
    assert "".join(map(str, fibonacci[:13].tolist())) == "1011010110110"
    period = worst_case_text("period 1,000", 5000, 0)[:-1]
    assert np.array_equal(period[1000:], period[:-1000])
    nearly = worst_case_text("near-periodic", 50_000, 0)[:-1]
    assert 0.99 < (nearly[1000:] == nearly[:-1000]).mean() < 1.0


@pytest.mark.parametrize("name", WORST_CASES)
def test_worst_cases_are_sorted(name: str) -> None:
    figures = worst_case(name, 3000, 0)
    assert figures["tokens"] == 3000 and figures["seconds"] >= 0.0


@pytest.mark.slow
def test_the_whole_benchmark_runs_and_ends_with_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "60000", "--static", "40000", "--seconds", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == "index" and result["peers"] == {}
    assert all(math.isfinite(result[key]) for key in PROMISED)
    assert result["structure"]["tail"] > 0 and len(result["structure"]["ring"]) > 1
    assert sum(result["structure"]["static"]) >= 40_000
    assert result["checked_drafts_equal"] >= 0.9 * result["checked_drafts"]


def segment_of(num_tokens: int, start: int | None) -> Segment:
    return Segment(np.empty(0, np.uint8), np.empty(num_tokens, np.int32), np.empty(0, np.uint64), 2, start, "0")


def sizes_of(segments: list[Segment]) -> list[int]:
    return [len(segment) for segment in segments]


def test_the_largest_merge_is_one_that_the_cache_could_make() -> None:
    segments = [segment_of(n, start) for start, n in enumerate([90, 60, 30, 20, 10, 10, 10])]
    assert sizes_of(largest_merge(segments, 100, 4)) == [90, 10]
    assert sizes_of(largest_merge(segments, 99, 4)) == [60, 30]
    assert sizes_of(largest_merge(segments, 50, 2)) == [30, 20]
    assert sizes_of(largest_merge([segment_of(40, None), *segments[3:5]], 100, 4)) == [20, 10]  # never a static one
    assert largest_merge(segments[:1], 100, 4) == []


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
    figures = compare(PEER_NAMES, None, nobody, np.random.default_rng(0))  # type: ignore[arg-type]
    assert len(figures) == len(PEER_NAMES) + 1  # the tree at two depths
    assert all("make bench-peers" in values["unavailable"] for values in figures.values())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", "10"],
        ["--vocab", "3"],
        ["--static", "-1"],
        ["--seconds", "0"],
        ["--peer-tokens", "5"],
        ["--data", "traces"],
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SSD_TRACES", raising=False)
    monkeypatch.delenv("SSD_TOKENIZERS", raising=False)
    assert main([*arguments, "--json"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
