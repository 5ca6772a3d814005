"""The same text and the same contexts for other people's drafters, in turn with ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.index.contexts import DRAFT_TOKENS, Context, sample_contexts
from benchmarks.index.ingest import Filled
from benchmarks.index.lookups import Prober, percentile
from benchmarks.made_text import Tokens
from benchmarks.peers import Peer, PeerError

_ROUNDS = 3
_CONTEXTS = 1000
_WARM_UP = 64

TREE_DEPTHS = (24, 64)
"""vLLM's default for the suffix tree, and its own."""
WAYS: dict[str, dict[str, dict[str, int | str]]] = {
    "arctic": {f", depth {depth}": {"depth": depth} for depth in TREE_DEPTHS},
    "sglang-ngram": {"": {"draft_tokens": DRAFT_TOKENS + 1}},
    "llama-cpp": {", lookup": {"type": "lookup"}},
}
"""Of a peer, what is put behind its name and the options of it; no options where it is not listed."""


def compare(
    names: Sequence[str], ours: Filled, sequences: Sequence[Tokens], random: np.random.Generator
) -> dict[str, dict[str, Any]]:
    """Each peer beside ours: bytes a token, tokens inserted a second, microseconds of a proposal.

    ``ours`` holds ``sequences``. Every round asks ours and then the peer the same new contexts; medians over rounds,
    ratios within a round. A peer that cannot be used has a reason under "unavailable".
    """
    figures: dict[str, dict[str, Any]] = {}
    for name in names:
        for suffix, options in WAYS.get(name, {"": {}}).items():
            label = f"{name}{suffix}"
            try:
                figures[label] = _one(name, options, ours, sequences, random)
            except PeerError as error:
                figures[label] = {"unavailable": str(error).splitlines()[0]}
    return figures


def _one(
    name: str, options: dict[str, int | str], ours: Filled, sequences: Sequence[Tokens], random: np.random.Generator
) -> dict[str, Any]:
    prober = Prober()
    rounds: list[dict[str, float]] = []
    lengths: list[int] = []
    with Peer(name, **options) as peer:
        insertion = peer.insert(sequences)
        warm_up = sample_contexts(ours.snapshot, _WARM_UP, random)
        peer.propose([context.tokens for context in warm_up], DRAFT_TOKENS)
        for context in warm_up:
            prober.one(context.tokens, ours.snapshot)
        for _ in range(_ROUNDS):
            contexts = sample_contexts(ours.snapshot, _CONTEXTS, random)
            our_us = np.array([prober.one(context.tokens, ours.snapshot)[0] for context in contexts])
            theirs = peer.propose([context.tokens for context in contexts], DRAFT_TOKENS)
            lengths += [len(draft) for draft in theirs.drafts]
            rounds.append(_round(contexts, our_us, theirs.us))
        versions = peer.versions
    figures: dict[str, Any] = {"versions": versions, "tokens": insertion.num_tokens}
    if insertion.num_tokens:
        bytes_per_token = insertion.resident_growth_bytes / insertion.num_tokens
        figures |= {
            "bytes_per_token": round(bytes_per_token, 1),
            "bytes_per_token_times_ours": round(bytes_per_token / ours.bytes_per_token, 1),
            "insert_tokens_per_s": round(insertion.num_tokens / insertion.seconds),
        }
    figures["draft_tokens_mean"] = round(float(np.mean(lengths)), 2)
    return figures | {key: round(float(np.median([each[key] for each in rounds])), 2) for key in rounds[0]}


def _round(
    contexts: Sequence[Context], our_us: npt.NDArray[np.float64], their_us: npt.NDArray[np.float64]
) -> dict[str, float]:
    present = np.array([context.is_present for context in contexts])
    figures: dict[str, float] = {}
    for kind, chosen in (("present", present), ("broken", ~present)):
        for q in (50, 99):
            figures[f"propose_us_{kind}_p{q}"] = percentile(their_us[chosen], q)
            figures[f"ours_propose_us_{kind}_p{q}"] = percentile(our_us[chosen], q)
        figures[f"propose_{kind}_times_ours"] = float(np.median(their_us[chosen]) / np.median(our_us[chosen]))
    return figures
