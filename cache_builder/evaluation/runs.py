"""Ways to decode a whole log: with which cache, which drafts, by how many replicas; several at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from cache_builder import workers
from cache_builder.evaluation.costs import CostCurve, StepCosts, at_batch
from cache_builder.evaluation.decoding import OutputDecoder, warm_up
from cache_builder.evaluation.log import Int64s, Log
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.prefixes import split_sequence
from ssd.retrieval.segment import Tokens
from ssd.retrieval.snapshot import Snapshot
from ssd.sharing.entry import LEAD_IN_TOKENS, MAX_ENTRY_TOKENS, Entry, pack_entry

CacheUse = Literal["growing", "frozen", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A setting.

    ``cache`` : "growing": what was said is learned; "frozen": only ``warm`` is searched; "none": own text alone.
    ``fingerprint`` : the tokenizer's. ``replicas`` : to which requests are dealt at random, each with a cache of its
    own. ``every`` : of the requests with a prompt each so manieth is decoded; all are learned.
    ``counts_shared`` : whether to count what sharing would write to Redis.
    """

    curve: CostCurve
    draft: DraftConfig
    index: IndexConfig
    fingerprint: str
    is_tree: bool = True
    cache: CacheUse = "growing"
    warm: tuple[Path, ...] = ()
    replicas: int = 1
    every: int = 1
    counts_shared: bool = False
    seed: int = 0

    def num_decoded(self, log: Log) -> int:
        """Output tokens that it decodes."""
        return int(log.output_lengths[log.with_prompt[:: self.every]].sum())


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a run came to.

    ``requests`` : int64[r], the numbers of those decoded, by replica and then in order. Of each ``num_steps``,
    ``num_accepted`` : int64[r]. ``drafted`` : int16, tokens drafted in each step of all, one request after another.
    ``ns`` : of a processor, for all proposals. ``by_depth``, ``by_source`` : see `OutputDecoder`.
    ``num_cached_tokens``, ``index_bytes`` : of what the largest cache of a replica holds at the end. ``ring_bytes`` :
    of one. ``shared_bytes``, ``num_shared`` : of the entries that all replicas would write, and how many.
    """

    requests: Int64s
    num_steps: Int64s
    num_accepted: Int64s
    drafted: npt.NDArray[np.int16]
    ns: int
    by_depth: tuple[Int64s, Int64s]
    by_source: dict[str, tuple[int, int, int]]
    num_cached_tokens: int = 0
    index_bytes: int = 0
    ring_bytes: int = 0
    shared_bytes: int = 0
    num_shared: int = 0


def execute(run: Run, log: Log, tell: Callable[[int], None] = lambda num_tokens: None) -> Outcome:
    """Decode the log. ``tell`` : called with the output tokens of each request that was decoded.

    Raises CacheError for a warm directory that cannot be used.
    """
    warm_up()
    decoded = np.zeros(len(log), np.bool_)
    decoded[log.with_prompt[:: run.every]] = True
    dealt = np.random.default_rng(run.seed).integers(run.replicas, size=len(log))
    outcomes = []
    for replica in range(run.replicas):
        outcomes.append(_execute_one(run, log, np.flatnonzero(dealt == replica), decoded, tell))
    return outcomes[0] if len(outcomes) == 1 else _together(outcomes)


def _execute_one(
    run: Run, log: Log, numbers: Int64s, decoded: npt.NDArray[np.bool_], tell: Callable[[int], None]
) -> Outcome:
    """One replica's requests."""
    decoder = OutputDecoder(run.curve, draft=run.draft, tree=run.is_tree)
    steps, drafted, shared = list[tuple[int, int, int]](), [np.empty(0, np.int16)], _Shared()
    # Files of warm directories are mapped: several processes read them.
    config = CacheConfig(index=run.index, memory_bytes=0)
    with CacheSet(config, run.fingerprint, inline=True) as caches:
        cache = caches.get()
        for directory in run.warm if run.cache != "none" else ():
            caches.add_static_directory(directory)
        if run.counts_shared:
            cache.add_listener(shared.count)
        ns = 0
        for number in numbers.tolist():
            row = log.row(number)
            if decoded[number]:
                found = decoder.decode(row, None if run.cache == "none" else cache.snapshot())
                steps.append((number, len(found.drafted), int(found.accepted.sum())))
                drafted.append(found.drafted.astype(np.int16))
                ns += found.ns
                tell(len(row.output))
            if run.cache == "growing":
                cache.append(row.text(), prompt_length=len(row.context))
                cache.maintain()
        snapshot = cache.snapshot()
        requests, num_steps, num_accepted = np.array(steps, np.int64).reshape(-1, 3).T.copy()
        return Outcome(
            requests,
            num_steps,
            num_accepted,
            np.concatenate(drafted),
            ns,
            decoder.by_depth(),
            decoder.by_source(),
            snapshot.num_tokens,
            _index_bytes(snapshot),
            snapshot.ring.nbytes,
            shared.num_bytes,
            shared.num_entries,
        )


class _Shared:
    """What a cache would write to the log that replicas share, without what Redis adds to every entry."""

    def __init__(self) -> None:
        self.num_bytes = self.num_entries = 0

    def count(self, pieces: list[Tokens]) -> None:
        for piece in pieces:
            for part in split_sequence(piece, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS):
                self.num_bytes += len(pack_entry(Entry(bytes(8), bytes(16), part), ""))
                self.num_entries += 1


def _index_bytes(snapshot: Snapshot) -> int:
    """Bytes of the segments, in memory or in files; what is in the tail as if it were in one."""
    of_segments = sum(each.text.nbytes + each.order.nbytes + each.fence.nbytes for each in snapshot.segments)
    return of_segments + 8 * (snapshot.tail_stop - snapshot.tail_start)


def _together(outcomes: list[Outcome]) -> Outcome:
    by_source: dict[str, tuple[int, int, int]] = {}
    for outcome in outcomes:
        for source, (drafts, drafted, accepted) in outcome.by_source.items():
            known = by_source.get(source, (0, 0, 0))
            by_source[source] = known[0] + drafts, known[1] + drafted, known[2] + accepted
    drafted, accepted = (np.sum([each.by_depth[which] for each in outcomes], axis=0) for which in (0, 1))
    return Outcome(
        np.concatenate([each.requests for each in outcomes]),
        np.concatenate([each.num_steps for each in outcomes]),
        np.concatenate([each.num_accepted for each in outcomes]),
        np.concatenate([each.drafted for each in outcomes]),
        sum(each.ns for each in outcomes),
        (drafted, accepted),
        by_source,
        max(each.num_cached_tokens for each in outcomes),
        max(each.index_bytes for each in outcomes),
        outcomes[0].ring_bytes,
        sum(each.shared_bytes for each in outcomes),
        sum(each.num_shared for each in outcomes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to find out.

    ``warm`` : directories searched beside what is learned. ``batch`` : sequences decoded together; above 1 drafts are
    chains unless ``shape`` says otherwise, as in the engine. ``sample_tokens`` : of output that every point of a curve
    decodes at most; 0 leaves the curves out. ``jobs`` : processes.
    """

    fingerprint: str
    cache: CacheUse = "growing"
    warm: tuple[Path, ...] = ()
    draft: DraftConfig = field(default_factory=DraftConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    batch: int = 1
    sample_tokens: int = 150_000
    jobs: int = 1
    seed: int = 0

    @property
    def is_tree(self) -> bool:
        """Whether drafts branch."""
        shape = self.draft.draft_shape
        return shape == "tree" or (shape == "auto" and self.batch == 1)


def in_batch(costs: StepCosts, batch: int) -> StepCosts:
    """Costs of a batch of rows that are all alike, from those of one row.

    What surrounds a pass is taken to grow with the rows; what the target's own candidates bring is left out, for it is
    the passes of one row that have room for them.
    """
    if batch == 1:
        return costs
    of_all = float(costs.curve.upto(batch)[batch])
    return replace(
        costs,
        curve=at_batch(costs.curve, batch),
        source=f"{costs.source}; of {batch} rows, taken to be alike, by the cost of as many tokens",
        step_ms=None if costs.step_ms is None else costs.step_ms * of_all,
        overhead=None if costs.overhead is None else costs.overhead * batch / of_all,
        recycling=0.0,
    )


K = TypeVar("K", bound=Hashable)


def execute_all(
    runs: Mapping[K, Run], log: Log, num_jobs: int, progress: Callable[[int], None] = lambda num_tokens: None
) -> dict[K, Outcome]:
    """`execute` for all of ``runs``, the longest first, by several processes: what they come to is the same.

    ``progress`` : told how many output tokens were decoded. Raises what `execute` raises, and SSDError where a process
    was killed.
    """
    ordered = sorted(runs, key=lambda key: -runs[key].num_decoded(log))
    if min(num_jobs, len(runs)) <= 1:
        return {key: execute(runs[key], log, progress) for key in ordered}
    with tempfile.TemporaryDirectory(prefix="ssd-evaluate-") as directory:
        log.save(Path(directory))
        items = [(key, runs[key]) for key in ordered]
        found = workers.run(_execute, items, Path(directory), lambda _, tokens: progress(tokens), jobs=num_jobs)
        return dict(found)


def _execute(item: tuple[K, Run], log: Path, progress: workers.Progress) -> tuple[K, Outcome]:
    return item[0], execute(item[1], Log.load(log), lambda num_tokens: progress(0, num_tokens))
