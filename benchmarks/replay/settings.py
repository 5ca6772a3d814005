"""The drafters that can be replayed, and each one's settings from frugal to generous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.drafters import Setting
from cache_builder.evaluation.costs import CostCurve
from ssd.drafting import DRAFTER_NAMES

OURS = "ssd"
MEASURED_PATH = Path(__file__).parents[1] / "results" / "verify-cost.json"
"""The cost curve that `benchmarks.replay.measure_cost` measured."""
PEERS = {
    "arctic": "arctic",
    "vllm-ngram": "vllm-ngram",
    "prompt-lookup-hf": "prompt-lookup",
    "sglang": "sglang-ngram",
    "llama-cpp": "llama-cpp",
}
"""What other people's drafters are called here, and in `benchmarks.peers`."""

CONTENDER_NAMES = (*DRAFTER_NAMES, *PEERS)

PRICED_BY = "priced by "

_LENGTHS = (2, 4, 8, 16)
_FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
_LEAST_PROBABILITIES = (0.1, 0.01)

DEFAULT = "default"
"""What the names of settings begin with that are a drafter's own; arctic's have names that say all."""
ARCTIC_DEFAULT = "factor 1, p 0.1"

_SGLANG_NODES = 11  # its 12 count the token that they follow
_SGLANG_BREADTH = 10
_LLAMA_CPP_LIMITS = {
    "ngram-mod": 64,
    "ngram-simple": 48,
    "ngram-map-k": 48,
    "ngram-map-k4v": 48,
    "ngram-cache": 8,
    "lookup": 3,
}
_LLAMA_CPP_SIZES = (
    ("ngram-mod", (3, 0, 64)),
    ("ngram-mod", (8, 0, 16)),
    ("ngram-simple", (2, 4, 1)),
    ("ngram-simple", (2, 8, 1)),
    ("ngram-simple", (3, 8, 1)),
    ("ngram-map-k", (2, 4, 1)),
    ("ngram-map-k", (3, 8, 1)),
    ("ngram-map-k4v", (2, 8, 1)),
)
"""n_match, n_min, n_max of ngram-mod, size_n, size_m, min_hits of the others: the best of 52 tried on agent_tools."""


@dataclass(frozen=True, slots=True)
class PeerSetting(Setting):
    """One way to run somebody else's drafter."""

    knobs: dict[str, float | str] = field(default_factory=dict)
    """Its own, as `benchmarks.peers` takes them."""


def settings_of(
    drafter: str, max_draft: int, *, curve: bool, tree: bool, priced_by: Sequence[CostCurve] = ()
) -> list[Setting]:
    """The settings to run a drafter with: all of its curve, or its default. ``priced_by`` adds to ours."""
    if drafter == OURS:
        priced = [Setting(drafter, PRICED_BY + each.name, max_draft, curve=each) for each in priced_by]
        return [Setting(drafter, "default", max_draft), *priced]
    if drafter == "arctic":
        pairs = [(factor, least) for least in _LEAST_PROBABILITIES for factor in _FACTORS] if curve else [(1.0, 0.1)]
        return [
            PeerSetting(
                drafter,
                f"factor {factor:g}, p {least:g}",
                max_draft,
                knobs={"max_spec_factor": factor, "min_token_prob": least, "use_tree_spec": tree},
            )
            for factor, least in pairs
        ]
    if drafter == "sglang":
        return _sglang(max_draft, curve=curve)
    if drafter == "llama-cpp":
        return _llama_cpp(max_draft, curve=curve)
    if drafter == "none":
        return [Setting(drafter, "default", 0)]
    lengths = sorted({length for length in _LENGTHS if length < max_draft} | {max_draft}) if curve else [max_draft]
    return [Setting(drafter, f"draft {length}", length) for length in lengths]


def _sglang(max_draft: int, *, curve: bool) -> list[Setting]:
    """As its server drafts by default; for a curve also more and fewer nodes, without those that only fill up, by
    frequency in place of recency, as paths, and with prompts in the trie: what did best of 21 tried on agent_tools."""
    default = PeerSetting("sglang", DEFAULT, min(_SGLANG_NODES, max_draft), knobs={"padded": 1})
    if not curve:
        return [default]
    ways = [
        *(("BFS", _SGLANG_BREADTH, 0, nodes) for nodes in (2, 4, 7, _SGLANG_NODES, 15, 31, 63)),
        *(("BFS", 1, 0, nodes) for nodes in (3, 7)),
        *(("PROB", _SGLANG_BREADTH, 0, nodes) for nodes in (7, 15)),
        *(("BFS", _SGLANG_BREADTH, 1, nodes) for nodes in (7, 15, 31)),
    ]
    found: list[Setting] = [default]
    for match_type, breadth, prompts, nodes in ways:
        if nodes <= max_draft:
            name = f"{match_type} {breadth}, {nodes} nodes{', prompts' if prompts else ''}"
            knobs: dict[str, float | str] = {"match_type": match_type, "max_bfs_breadth": breadth, "prompts": prompts}
            found.append(PeerSetting("sglang", name, nodes, knobs=knobs))
    return found


def _llama_cpp(max_draft: int, *, curve: bool) -> list[Setting]:
    """Each of its drafters by default; for a curve also with other sizes and shorter and longer drafts."""
    found: list[Setting] = [
        PeerSetting("llama-cpp", f"{DEFAULT} {name}", min(limit, max_draft), knobs={"type": name})
        for name, limit in _LLAMA_CPP_LIMITS.items()
    ]
    if not curve:
        return found
    found += [
        PeerSetting("llama-cpp", f"lookup, draft {length}", length, knobs={"type": "lookup"})
        for length in (1, 2, 5, 8, 16)
        if length <= max_draft
    ]
    for name, (first, second, third) in _LLAMA_CPP_SIZES:
        knobs: dict[str, float | str] = {"type": name, "first": first, "second": second, "third": third}
        found.append(PeerSetting("llama-cpp", f"{name} {first}/{second}/{third}", max_draft, knobs=knobs))
    return found
