"""One trace under one tokenizer: every drafter under each of its settings, from frugal to generous."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drafters import OurDrafters, Setting, replay_stream
from benchmarks.peers import Peer
from benchmarks.replay.oracle import oracle_steps
from benchmarks.traces import TraceTokenizer, limited, read_records, read_sessions, trace_name
from benchmarks.walk import Counts, Steps
from cache_builder.evaluation.costs import CostCurve, StepCosts
from cache_builder.evaluation.log import Row
from ssd.config import DraftConfig, IndexConfig
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
        return _sglang_settings(max_draft, curve=curve)
    if drafter == "llama-cpp":
        return _llama_cpp(max_draft, curve=curve)
    if drafter == "none":
        return [Setting(drafter, "default", 0)]
    lengths = sorted({length for length in _LENGTHS if length < max_draft} | {max_draft}) if curve else [max_draft]
    return [Setting(drafter, f"draft {length}", length) for length in lengths]


def _sglang_settings(max_draft: int, *, curve: bool) -> list[Setting]:
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


Result = dict[str, Any]

_SGLANG_AT_ONCE = 4
_SGLANG_DEPTH, _SGLANG_CAPACITY = 18, 10_000_000  # its server's defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to replay and how; the same for every trace and tokenizer."""

    drafters: Sequence[str]
    draft: DraftConfig
    index: IndexConfig
    costs: Sequence[CostCurve]
    priced_by: Sequence[CostCurve] = ()
    curve: bool = False
    tree: bool = False
    arctic_depth: int = 64
    max_output_tokens: int | None = None


class PeerDrafter(AbstractContextManager["PeerDrafter"]):
    """Somebody else's drafter under several settings, in its own process and environment."""

    def __init__(self, settings: Sequence[Setting], **options: int | str) -> None:
        """``options`` : the peer's own, see `Peer`. Raises PeerUnavailable where it is not installed."""
        self.settings = settings
        self._peer = Peer(PEERS[settings[0].drafter], **options)
        self._options = options
        knobs = [setting.knobs if isinstance(setting, PeerSetting) else {} for setting in settings]
        self._asked = [(setting.limit, each) for setting, each in zip(settings, knobs, strict=True)]

    def __exit__(self, *_: object) -> None:
        self._peer.close()

    def replay(self, request_id: str, row: Row) -> list[Steps]:
        return self._peer.replay(request_id, row.text(), len(row.context), self._asked)

    def num_cached_tokens(self) -> int:
        return 0

    def describe(self) -> dict[str, Any]:
        return {"versions": self._peer.versions, **self._options}


def run(plan: Plan, trace: Path, tokenizer: Path) -> list[Result]:
    """All drafters under all settings on one trace, which is tokenized once."""
    rows = limited(read_sessions(read_records(trace), TraceTokenizer(tokenizer)), plan.max_output_tokens)
    results: dict[str, list[Result]] = {}
    oracle = oracle_of(rows, plan.draft.num_speculative_tokens)
    for contender in _contenders(plan, rows):
        with contender:
            for setting, counts in zip(contender.settings, replay_stream(rows, contender), strict=True):
                results.setdefault(setting.drafter, []).append(
                    {
                        "trace": trace_name(trace),
                        "tokenizer": tokenizer.parent.name,
                        "drafter": setting.drafter,
                        "setting": setting.name,
                        "tree": plan.tree,
                        "max_draft": plan.draft.num_speculative_tokens,
                        **(found := summary(counts, plan.costs)),
                        "oracle_tokens_per_step": oracle,
                        "of_oracle": None if oracle is None else round(found["mean_acceptance_length"] / oracle, 4),
                        "configuration": {
                            "draft": asdict(plan.draft),
                            "index": asdict(plan.index),
                            "max_output_tokens": plan.max_output_tokens,
                            **contender.describe(),
                        },
                    }
                )
    return [result for drafter in plan.drafters for result in results[drafter]]


def run_all(plan: Plan, traces: Sequence[Path], tokenizers: Sequence[Path], num_jobs: int) -> Iterator[list[Result]]:
    """`run` for every tokenizer and trace, in order, in ``num_jobs`` processes; the results do not depend on it."""
    pairs = [(plan, trace, tokenizer) for tokenizer, trace in product(tokenizers, traces)]
    if num_jobs == 1:
        yield from map(_run_one, pairs)
        return
    # Kernels and a pool of threads do not survive a fork.
    with ProcessPoolExecutor(num_jobs, get_context("spawn")) as pool:
        yield from pool.map(_run_one, pairs)


def _run_one(arguments: tuple[Plan, Path, Path]) -> list[Result]:
    return run(*arguments)


def oracle_of(rows: Sequence[Row], limit: int) -> float | None:
    """Tokens a step of the best drafts in hindsight, see `oracle_steps`; None for more text than it takes."""
    texts = [row.text() for row in rows]
    steps = oracle_steps(texts, np.array([len(row.context) for row in rows], np.int64), limit)
    return None if steps is None else sum(len(row.output) for row in rows) / max(1, int(steps.sum()))


def _contenders(plan: Plan, rows: Sequence[Row]) -> Iterator[OurDrafters | PeerDrafter]:
    """One after another, so that no two hold their memories at once."""
    limit = plan.draft.num_speculative_tokens

    def settings(drafter: str) -> list[Setting]:
        return settings_of(drafter, limit, curve=plan.curve, tree=plan.tree, priced_by=plan.priced_by)

    ours = [setting for drafter in plan.drafters if drafter not in PEERS for setting in settings(drafter)]
    if ours:
        yield OurDrafters(ours, draft=plan.draft, index=plan.index, tree=plan.tree)
    options: dict[str, Callable[[], dict[str, int]]] = {
        "arctic": lambda: {"depth": plan.arctic_depth},
        "vllm-ngram": lambda: {"max_draft": limit, "max_context_tokens": _longest(rows)},
        "prompt-lookup-hf": dict,
        "llama-cpp": dict,
    }
    for drafter in plan.drafters:
        if drafter == "sglang":
            yield from _sglang(settings(drafter), rows)
        elif drafter in PEERS:
            yield PeerDrafter(settings(drafter), **options[drafter]())


def _sglang(settings: Sequence[Setting], rows: Sequence[Row]) -> Iterator[OurDrafters | PeerDrafter]:
    """A few settings at a time: each has a trie of its own, which is large.

    A trie that nothing is evicted from is as good as one of the default size, and gets no more nodes than that takes.
    """
    for first in range(0, len(settings), _SGLANG_AT_ONCE):
        some = settings[first : first + _SGLANG_AT_ONCE]
        has_prompts = any(isinstance(each, PeerSetting) and each.knobs.get("prompts") for each in some)
        num_tokens = sum(_new_tokens(rows) if has_prompts else (_SGLANG_DEPTH + len(row.output) for row in rows))
        yield PeerDrafter(some, capacity=min(_SGLANG_DEPTH * (num_tokens + 1), _SGLANG_CAPACITY))


def _new_tokens(rows: Sequence[Row]) -> Iterator[int]:
    """Of each request the tokens behind the text of the one before it, if it goes on from there, else all."""
    known = np.empty(0, np.int32)
    for row in rows:
        text = row.text()
        goes_on = np.array_equal(known, text[: len(known)])
        yield len(text) - len(known) * goes_on
        known = text


def _longest(rows: Sequence[Row]) -> int:
    return max((len(row.context) + len(row.output) for row in rows), default=1)


def summary(counts: Counts, costs: Sequence[CostCurve]) -> Result:
    """The figures of one setting, as they stand in the JSON; steps counts as 1 where there is none."""
    steps = max(1, counts.num_verify_steps)
    times_us = counts.propose_us if counts.num_verify_steps else np.zeros(1)
    return {
        "output_tokens": counts.num_output_tokens,
        "verify_steps": counts.num_verify_steps,
        "drafted_tokens": counts.num_drafted_tokens,
        "accepted_tokens": counts.num_accepted_tokens,
        "mean_acceptance_length": counts.num_output_tokens / steps,
        "drafted_per_step": counts.num_drafted_tokens / steps,
        "accepted_per_step": counts.num_accepted_tokens / steps,
        "acceptance_rate": counts.num_accepted_tokens / max(1, counts.num_drafted_tokens),
        "speed_up": {
            cost.name: StepCosts(cost, "").speed_up(counts.num_output_tokens, counts.steps_by_drafted) for cost in costs
        },
        "propose_us_p50": round(float(np.percentile(times_us, 50)), 1),
        "propose_us_p99": round(float(np.percentile(times_us, 99)), 1),
        "cached_tokens": counts.num_cached_tokens,
    }
