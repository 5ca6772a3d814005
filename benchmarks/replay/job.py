"""Replay one trace with one tokenizer: every drafter with each of its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.child import ROOT
from benchmarks.peers.client import Peer
from benchmarks.peers.process import PEERS
from benchmarks.peers.sglang_ngram import CAPACITY, DEPTH
from benchmarks.traces import read_rows, trace_name
from benchmarks.walk import Steps, together
from cache_builder.evaluation.costs import CostCurve, StepCosts
from cache_builder.evaluation.decoding import OutputDecoder, warm_up
from cache_builder.evaluation.hindsight import hindsight_steps
from cache_builder.evaluation.log import RecordedOutput
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.retrieval.cache_manager import CacheManager

T = TypeVar("T")

OURS = "ssd"
MEASURED_PATH = ROOT / "benchmarks" / "results" / "verify-cost.json"
"""The measured cost curve of forward passes, written by `benchmarks.evaluate --save-cost`."""
CONTENDER_NAMES = (OURS, *PEERS)

PRICED_BY = "priced by "
FLAT_WIDTH = 32
"""The number of tokens up to which a pass costs as much as a pass of one token, in the cost curve not measured."""

# Beyond a pass of 12 tokens, which a draft of 11 needs, the measured curve jumps; beyond one of 32 the flat one.
_LENGTHS = (2, 4, 6, 8, 11, 16, 31)
_FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0)
_LEAST_PROBABILITIES = (0.1, 0.01)

DEFAULT = "default"
"""The prefix of setting names that are a drafter's defaults. Arctic's settings are named by their values instead."""
ARCTIC_DEFAULT = "factor 1, p 0.1"
_ARCTIC_WAYS = (
    (4, 3, 0, 64),
    (8, 3, 0, 64),
    (11, 2, 0, 64),
    (11, 3, 0, 64),
    (11, 4, 0, 64),
    (11, 2, 2, 64),
    (16, 3, 0, 64),
    (11, 3, 0, 24),
    (24, 1, 0, 24),
    (31, 4, 0, 64),
    (31, 4, 4, 64),
)
"""Settings of Arctic: maximum draft tokens, factor, offset, depth. These are the best of 76 settings tried on eight
traces, two with depth 24 (one of them as vLLM sets it), and two for passes that cost the same up to 32 tokens."""

_SGLANG_NODES = 11  # its 12 count the token that they follow
_SGLANG_WAYS = (
    ("BFS", 10, 0, (4, 7, 11, 15, 31)),
    ("BFS", 1, 0, (3, 7)),
    ("PROB", 10, 0, (7, 11)),
    ("BFS", 10, 1, (4, 5, 7, 9, 11, 15, 31)),
    ("PROB", 10, 1, (7, 11)),
    ("BFS", 1, 1, (11,)),
)
"""Settings of SGLang: match type, breadth, whether prompts are added to the trie, and numbers of nodes. These are the
best of 43 settings tried on the trace agent_tools and three others."""
_LLAMA_CPP_LIMITS = {
    "ngram-mod": 64,
    "ngram-simple": 48,
    "ngram-map-k": 48,
    "ngram-map-k4v": 48,
    "ngram-cache": 8,
    "lookup": 3,
}
_LLAMA_CPP_SIZES = (
    ("ngram-mod", 3, 0, 64),
    ("ngram-mod", 4, 0, 8),
    ("ngram-mod", 8, 0, 16),
    ("ngram-simple", 1, 4, 1),
    ("ngram-simple", 1, 8, 1),
    ("ngram-simple", 1, 11, 1),
    ("ngram-simple", 2, 4, 1),
    ("ngram-simple", 2, 8, 1),
    ("ngram-simple", 2, 11, 1),
    ("ngram-simple", 3, 8, 1),
    ("ngram-map-k", 2, 4, 1),
    ("ngram-map-k", 2, 8, 1),
    ("ngram-map-k", 3, 8, 1),
    ("ngram-map-k4v", 2, 8, 1),
)
"""Settings of llama.cpp: n_match, n_min and n_max of ngram-mod; size_n, size_m and min_hits of the others. These are
the best of 52 settings tried on the trace agent_tools and of 35 tried on eight traces."""
_LOOKUP_LENGTHS = (1, 2, 4, 6, 8, 11, 16, 31)

_NGRAM_SIZES: dict[str, tuple[dict[str, float | str], ...]] = {
    "prompt-lookup-hf": ({"ngram": 1}, {"ngram": 3}),
    "vllm-ngram": ({"least": 1, "most": 5}, {"least": 3, "most": 5}),
}
"""N-gram sizes that are tried at some draft lengths, in addition to the default sizes."""
_NGRAM_LENGTHS = (4, 8, 16)


@dataclass(frozen=True, slots=True)
class Setting:
    """A drafter with its parameters. ``limit`` is the maximum number of draft tokens."""

    drafter: str
    name: str
    limit: int
    curve: CostCurve | None = None
    """The cost curve that this project's drafter uses to limit its drafts; None for other drafters."""
    knobs: dict[str, float | str] = field(default_factory=dict)
    """The parameters of another project's drafter, see `benchmarks.peers.client.Peer`."""


def settings_of(drafter: str, max_draft: int, *, tree: bool, costs: Sequence[CostCurve]) -> list[Setting]:
    """Return the settings to replay a drafter with, from short to long drafts.

    This project's drafter has one setting per cost curve. Other drafters have their defaults and the settings that were
    best on some of the traces.
    """

    def known(name: str, limit: int, **knobs: float | str) -> Setting:
        return Setting(drafter, name, limit, knobs=knobs)

    if drafter == OURS:
        return [Setting(drafter, PRICED_BY + each.name, max_draft, curve=each) for each in costs]
    if drafter == "arctic":
        found = [
            known(
                f"factor {factor:g}, p {least:g}",
                max_draft,
                max_spec_factor=factor,
                min_token_prob=least,
                use_tree_spec=tree,
            )
            for least in _LEAST_PROBABILITIES
            for factor in _FACTORS
        ]
        for most, factor, offset, depth in _ARCTIC_WAYS:
            if most < max_draft:
                name = f"factor {factor} + {offset}, at most {most}, depth {depth}"
                found.append(
                    known(name, most, max_spec_factor=factor, max_spec_offset=offset, depth=depth, use_tree_spec=tree)
                )
        return found
    if drafter == "sglang":
        found = [known(DEFAULT, min(_SGLANG_NODES, max_draft), padded=1)]
        for kind, breadth, prompts, sizes in _SGLANG_WAYS:
            for nodes in (size for size in sizes if size <= max_draft):
                name = f"{kind} {breadth}, {nodes} nodes{', prompts' if prompts else ''}"
                found.append(known(name, nodes, match_type=kind, max_bfs_breadth=breadth, prompts=prompts))
        return found
    if drafter == "llama-cpp":
        found = [
            known(f"{DEFAULT} {name}", min(most, max_draft), type=name) for name, most in _LLAMA_CPP_LIMITS.items()
        ]
        found += [known(f"lookup, draft {most}", most, type="lookup") for most in _LOOKUP_LENGTHS if most <= max_draft]
        for name, first, second, third in _LLAMA_CPP_SIZES:
            title = f"{name} {first}/{second}/{third}"
            found.append(known(title, max_draft, type=name, first=first, second=second, third=third))
        return found
    lengths = sorted({length for length in _LENGTHS if length < max_draft} | {max_draft})
    found = [known(f"draft {length}", length) for length in lengths]
    for knobs in _NGRAM_SIZES[drafter]:
        title = ", ".join(f"{name} {value}" for name, value in knobs.items())
        found += [known(f"draft {most}, {title}", most, **knobs) for most in _NGRAM_LENGTHS if most <= max_draft]
    return found


Result = dict[str, Any]

_SGLANG_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The drafters and settings to replay, the same for every trace and tokenizer."""

    drafters: Sequence[str]
    draft: DraftConfig
    index: IndexConfig
    costs: Sequence[CostCurve]
    tree: bool = False
    max_output_tokens: int | None = None


class OurDrafter(AbstractContextManager["OurDrafter"]):
    """This project's drafter under several settings that share one index.

    The index is updated at once and not in the background, so that the result does not depend on timing.
    """

    def __init__(self, settings: Sequence[Setting], *, draft: DraftConfig, index: IndexConfig, tree: bool) -> None:
        self.settings, self.made_of = settings, dict[str, Any]()
        self._caches = CacheManager(CacheConfig(index=index), "0" * 32, inline=True)
        self._decoders = []
        warm_up()
        for setting in settings:
            assert setting.curve is not None
            self._decoders.append(OutputDecoder(setting.curve, draft=draft, tree=tree, sure=0.0))

    def __exit__(self, *_: object) -> None:
        self._caches.close()

    def replay(self, request_id: str, row: RecordedOutput) -> list[Steps]:
        cache, found = self._caches.get(), []
        for decoder in self._decoders:
            steps = decoder.decode(row, cache.snapshot())
            found.append(Steps(steps.drafted, steps.accepted))
        cache.append(row.text(), prompt_length=len(row.context))
        cache.maintain()
        return found


class PeerDrafter(AbstractContextManager["PeerDrafter"]):
    """A drafter of another project under several settings, in its own process and environment."""

    def __init__(self, settings: Sequence[Setting], **options: int | str) -> None:
        """Start the drafter's process with its ``options``, see `Peer`. Raises PeerUnavailable."""
        self.settings = settings
        self._peer = Peer(settings[0].drafter, **options)
        self.made_of: dict[str, Any] = {**self._peer.versions, **options}
        self._asked = [(setting.limit, setting.knobs) for setting in settings]

    def __exit__(self, *_: object) -> None:
        self._peer.close()

    def replay(self, request_id: str, row: RecordedOutput) -> list[Steps]:
        return self._peer.replay(request_id, row.text(), len(row.context), self._asked)


def replay_stream(rows: Sequence[RecordedOutput], contender: OurDrafter | PeerDrafter) -> list[Steps]:
    """Replay all requests; return the steps by setting. Raises AssertionError if steps do not emit the output."""
    of_settings: list[list[Steps]] = [[] for _ in contender.settings]
    for number, row in enumerate(rows):
        for found, steps in zip(of_settings, contender.replay(str(number), row), strict=True):
            found.append(steps)
            if (emitted := int((steps.accepted + 1).sum())) != len(row.output):
                raise AssertionError(f"{len(row.output)} tokens came out of steps that emitted {emitted}")
    return [together(found) for found in of_settings]


def run(plan: Plan, trace: Path, tokenizer: Path) -> list[Result]:
    """Replay all drafters with all settings on one trace; return a result row for each setting."""
    rows = read_rows(trace, tokenizer, plan.max_output_tokens)
    results: dict[str, list[Result]] = {}
    # As long as drafts of ours where they are free.
    oracle = oracle_of(rows, min(plan.draft.num_speculative_tokens, FLAT_WIDTH - 1))
    for contender in _contenders(plan, rows):
        with contender:
            for setting, steps in zip(contender.settings, replay_stream(rows, contender), strict=True):
                results.setdefault(setting.drafter, []).append(
                    {
                        "trace": trace_name(trace),
                        "tokenizer": tokenizer.parent.name,
                        "drafter": setting.drafter,
                        "setting": setting.name,
                        "tree": plan.tree,
                        "max_draft": plan.draft.num_speculative_tokens,
                        **(found := summary(steps, plan.costs)),
                        "oracle_tokens_per_step": oracle,
                        "of_oracle": None if oracle is None else round(found["mean_acceptance_length"] / oracle, 4),
                        "made_of": contender.made_of,
                    }
                )
    return [result for drafter in plan.drafters for result in results[drafter]]


def run_all(
    work: Callable[[Path, Path], T], traces: Sequence[Path], tokenizers: Sequence[Path], num_jobs: int
) -> Iterator[T]:
    """Call ``work`` for every trace and tokenizer in ``num_jobs`` processes, and yield the results in order."""
    every = [trace for _ in tokenizers for trace in traces], [each for each in tokenizers for _ in traces]
    if num_jobs == 1:
        yield from map(work, *every)
        return
    # Kernels and a pool of threads do not survive a fork.
    with ProcessPoolExecutor(num_jobs, get_context("spawn")) as pool:
        yield from pool.map(work, *every)


def oracle_of(rows: Sequence[RecordedOutput], limit: int) -> float | None:
    """Return the tokens per step of the best drafts in hindsight (`hindsight_steps`); None if the text is too long."""
    texts = [row.text() for row in rows]
    steps = hindsight_steps(texts, np.array([len(row.context) for row in rows], np.int64), limit)
    return None if steps is None else sum(len(row.output) for row in rows) / max(1, int(steps.sum()))


def _contenders(plan: Plan, rows: Sequence[RecordedOutput]) -> Iterator[OurDrafter | PeerDrafter]:
    """Yield the drafters one after another, so that only one uses memory at a time."""
    limit = plan.draft.num_speculative_tokens
    for drafter in plan.drafters:
        settings = settings_of(drafter, limit, tree=plan.tree, costs=plan.costs)
        if drafter == OURS:
            yield OurDrafter(settings, draft=plan.draft, index=plan.index, tree=plan.tree)
        elif drafter == "sglang":
            yield from _sglang(settings, rows)
        elif drafter == "vllm-ngram":
            longest = max((len(row.context) + len(row.output) for row in rows), default=1)
            yield PeerDrafter(settings, max_draft=limit, max_context_tokens=longest)
        else:
            yield PeerDrafter(settings)


def _sglang(settings: Sequence[Setting], rows: Sequence[RecordedOutput]) -> Iterator[PeerDrafter]:
    """Yield SGLang's drafter with a few settings at a time, because each setting has a large trie of its own.

    If the text is short, the tries get fewer nodes than by default; this changes nothing, because they are never full.
    """
    for first in range(0, len(settings), _SGLANG_AT_ONCE):
        some = settings[first : first + _SGLANG_AT_ONCE]
        has_prompts = any(each.knobs.get("prompts") for each in some)
        num_tokens = sum(_new_tokens(rows) if has_prompts else (DEPTH + len(row.output) for row in rows))
        yield PeerDrafter(some, capacity=min(DEPTH * (num_tokens + 1), CAPACITY))


def _new_tokens(rows: Sequence[RecordedOutput]) -> Iterator[int]:
    """Yield the number of new tokens of each request: if it continues the previous request's text, those after it."""
    known = np.empty(0, np.int32)
    for row in rows:
        text = row.text()
        goes_on = np.array_equal(known, text[: len(known)])
        yield len(text) - len(known) * goes_on
        known = text


def summary(steps: Steps, costs: Sequence[CostCurve]) -> Result:
    """Return the figures of one setting for the result. Without steps, averages are computed as if there were one."""
    num_steps, num_drafted, num_accepted = len(steps.drafted), int(steps.drafted.sum()), int(steps.accepted.sum())
    num_output, at_least_one = num_steps + num_accepted, max(1, num_steps)
    by_drafted = np.bincount(steps.drafted, minlength=1)
    return {
        "output_tokens": num_output,
        "verify_steps": num_steps,
        "drafted_tokens": num_drafted,
        "accepted_tokens": num_accepted,
        "mean_acceptance_length": num_output / at_least_one,
        "drafted_per_step": num_drafted / at_least_one,
        "accepted_per_step": num_accepted / at_least_one,
        "acceptance_rate": num_accepted / max(1, num_drafted),
        "speed_up": {cost.name: StepCosts(cost, "").speed_up(num_output, by_drafted) for cost in costs},
    }
