"""The index's benchmark end to end on little text, and the text it makes; no times are judged."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks.index.__main__ import main
from benchmarks.index.asked import CONTEXT_TOKENS, sample_contexts
from benchmarks.index.live import largest_merge
from benchmarks.made_text import completions, flat
from ssd.retrieval.search import longest_match
from ssd.retrieval.segment import Segment
from tests.reference.drafting import make_snapshot

PROMISED = (
    "tokens", "segments", "bytes_per_token", "peak_bytes_per_token", "build_tokens_per_s", "propose_us_p50",
    "propose_us_p99", "propose64_us_p50", "freshness_ms_p99", "maintenance_core_share", "propose_us_p99_merging",
    "reopen_s",
)  # fmt: skip


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
