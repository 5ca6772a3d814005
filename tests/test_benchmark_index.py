"""The contexts that the index's benchmark asks for occur as far as they say."""

from __future__ import annotations

import numpy as np

from benchmarks.index.asked import CONTEXT_TOKENS, sample_contexts
from benchmarks.made_text import completions, sequences_within
from ssd.retrieval.search import longest_match
from tests.reference.drafting import make_snapshot


def test_contexts_occur_as_far_as_they_say() -> None:
    parts = [
        [token for text in sequences_within(completions(2000, seed), 20_000) for token in (*text.tolist(), -1)]
        for seed in (1, 2)
    ]
    snapshot = make_snapshot(parts)
    contexts = sample_contexts(snapshot, 40, np.random.default_rng(0))
    assert [context.is_present for context in contexts] == [True, False] * 20
    for context in contexts:
        known = longest_match(snapshot, context.tokens, CONTEXT_TOKENS).length
        assert known == context.known and (context.is_present or 1 <= known <= 10)
