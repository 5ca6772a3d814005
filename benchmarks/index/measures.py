"""Synthetic text, a cache that is filled with it, and measurements of lookups and of traffic on this cache."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.index.longest_match import longest_match
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.drafting import DraftRequest
from ssd.drafting.draft_records import DraftRow
from ssd.drafting.suffix_drafter import NamespaceGroup, SuffixDrafter, draft_of
from ssd.jit.addresses import Records, address
from ssd.retrieval.cache_manager import CacheManager, NamespaceCache
from ssd.retrieval.segment import Segment, unpack
from ssd.retrieval.snapshot import Snapshot

Tokens = npt.NDArray[np.int32]

SHORTEST, LONGEST = 200, 2000
EDITED = 0.02
"""The share of tokens that are replaced in a near-copy of a completion."""

_ZIPF_EXPONENT = 1.1

_PHRASES = 20_000
_LONGEST_PHRASE = 12
_NEXT_PHRASES = 12  # a phrase is followed by one of so many, the first ones mostly
_KEPT_DOCUMENTS = 512
_COPIES = 0.25
_DOCUMENTS_AT_ONCE = 128


def completions(vocabulary: int, seed: int) -> Iterator[Tokens]:
    """Yield synthetic completions of 200 to 2,000 tokens: int32 ids below ``vocabulary``, without separators.

    The stream never ends, and the same seed gives the same completions. They consist of 20,000 phrases of 2 to 12
    Zipf-distributed tokens; each phrase is followed by one of 12 phrases, mostly by the first ones. A quarter of the
    completions are near-copies of one of 512 earlier ones. In a million tokens, a sequence of 4, 8 or 16 tokens occurs
    6, 3 or 1 times (median), and new text matches 11 tokens. All memory is allocated before the first completion, so
    that it does not count as growth of the cache.
    """
    random = np.random.default_rng(seed)
    kept = np.zeros((_KEPT_DOCUMENTS, LONGEST), np.int32)
    kept.fill(1)  # touches its pages now
    lengths = np.zeros(_KEPT_DOCUMENTS, np.int64)
    new = _new_documents(vocabulary, random)
    num_kept = 0
    while True:
        if num_kept and random.random() < _COPIES:
            place = int(random.integers(min(num_kept, _KEPT_DOCUMENTS)))
            copy = kept[place, : lengths[place]].copy()
            edited = random.random(len(copy)) < EDITED
            copy[edited] = random.integers(0, vocabulary, int(edited.sum()))
            yield copy
            continue
        tokens = next(new)
        place = num_kept if num_kept < _KEPT_DOCUMENTS else int(random.integers(_KEPT_DOCUMENTS))
        kept[place, : len(tokens)], lengths[place] = tokens, len(tokens)
        num_kept += 1
        yield tokens


def _new_documents(vocabulary: int, random: np.random.Generator) -> Iterator[Tokens]:
    """Yield completions that are random walks over the phrases. Many walks are computed together, for speed."""
    cumulative = np.cumsum(1.0 / np.arange(1, vocabulary + 1) ** _ZIPF_EXPONENT)
    places = random.random(_PHRASES * _LONGEST_PHRASE) * cumulative[-1]
    drawn = np.searchsorted(cumulative, places).astype(np.int32)
    phrases = drawn.reshape(_PHRASES, _LONGEST_PHRASE)
    sizes = random.integers(2, _LONGEST_PHRASE + 1, _PHRASES)
    followers = random.integers(0, _PHRASES, (_PHRASES, _NEXT_PHRASES))
    columns = np.arange(_LONGEST_PHRASE)
    steps = LONGEST // 2  # no phrase is shorter than 2
    while True:
        lengths = random.integers(SHORTEST, LONGEST + 1, _DOCUMENTS_AT_ONCE)
        chosen = np.empty((steps, _DOCUMENTS_AT_ONCE), np.int64)
        chosen[0] = random.integers(0, _PHRASES, _DOCUMENTS_AT_ONCE)
        choices = np.minimum(random.geometric(0.35, (steps, _DOCUMENTS_AT_ONCE)) - 1, _NEXT_PHRASES - 1)
        for step in range(1, steps):
            chosen[step] = followers[chosen[step - 1], choices[step]]
        for document, length in enumerate(lengths.tolist()):
            path = chosen[: length // 2, document]
            yield phrases[path][columns < sizes[path][:, None]][:length]


CONTEXT_TOKENS = 64
DRAFT_TOKENS = 10
MOST_KNOWN = 10
"""The maximum length of the suffix that occurs in the cache, for contexts in which one token was replaced."""

_ATTEMPTS = 50


@dataclass(frozen=True, slots=True)
class Context:
    """A context to search for, with the expected result.

    Attributes:
        tokens: The context, int32[CONTEXT_TOKENS].
        known: The length of the longest suffix that occurs in the cache.
        following: The tokens that follow the context in the text, int32[DRAFT_TOKENS].
    """

    tokens: Tokens
    known: int
    following: Tokens

    @property
    def is_present(self) -> bool:
        """Whether the complete context occurs in the cache."""
        return self.known == CONTEXT_TOKENS

    def goes_on(self, draft: Tokens) -> bool:
        """Return whether ``draft`` is not empty and equals the tokens that follow the context in the text."""
        return len(draft) > 0 and np.array_equal(draft, self.following[: len(draft)])


def sample_contexts(
    snapshot: Snapshot, count: int, random: np.random.Generator, segments: Sequence[Segment] | None = None
) -> list[Context]:
    """Take ``count`` contexts from random places of ``segments`` (all if None), alternately complete and broken.

    In a broken context, the token before the last 1 to MOST_KNOWN tokens is replaced, so that no longer suffix occurs
    in the cache. Raises AssertionError if the text does not contain enough such contexts.
    """
    segments = snapshot.segments if segments is None else segments
    bounds = np.cumsum([len(segment) for segment in segments])
    largest = _largest_id(snapshot, random)
    contexts: list[Context] = []
    for _ in range(1000 + 100 * count):
        if len(contexts) == count:
            return contexts
        place = int(random.integers(bounds[-1]))
        segment = segments[int(np.searchsorted(bounds, place, side="right"))]
        text = _stretch(segment, CONTEXT_TOKENS + DRAFT_TOKENS, random)
        if text is None:
            continue
        tokens, following = text[:CONTEXT_TOKENS].copy(), text[CONTEXT_TOKENS:].copy()
        known = CONTEXT_TOKENS
        if len(contexts) % 2:
            known = int(random.integers(1, MOST_KNOWN + 1))
            if not _break(tokens, known, largest, snapshot, random):
                continue
        contexts.append(Context(tokens, known, following))
    if len(contexts) < count:
        raise AssertionError(f"only {len(contexts)} of {count} contexts were found in {bounds[-1]} tokens")
    return contexts


def _stretch(segment: Segment, length: int, random: np.random.Generator) -> Tokens | None:
    if len(segment) <= length:
        return None
    start = int(random.integers(0, len(segment) - length))
    text = unpack(segment.text, length, segment.width, start=start)
    return None if text.min() < 0 else text


def _largest_id(snapshot: Snapshot, random: np.random.Generator) -> int:
    """Estimate the largest token id in the cache from a few thousand tokens of each segment."""
    found = 0
    for segment in snapshot.segments:
        start = int(random.integers(max(1, len(segment) - 4096)))
        count = min(4096, len(segment) - start)
        found = max(found, int(unpack(segment.text, count, segment.width, start=start).max()))
    return found


def _break(tokens: Tokens, known: int, largest: int, snapshot: Snapshot, random: np.random.Generator) -> bool:
    for _ in range(_ATTEMPTS):
        tokens[-known - 1] = random.integers(0, largest + 1)
        if longest_match(snapshot, tokens[-known - 1 :], known + 1).length == known:
            return True
    return False  # anything precedes these tokens somewhere


_CHECKED_MATCH_TOKENS = DraftConfig().max_match_length
_LEAST_AGREEING = 0.9
_TRIED = 8  # contexts for each that is wanted


class Prober:
    """A drafter whose calls are timed."""

    def __init__(self) -> None:
        self.drafter = SuffixDrafter()
        self._number = 0
        self._memory = Records(DraftRow)
        self._rows = np.array([self._memory.address], np.int64)
        self.drafter.warm_up()

    def one(self, tokens: Tokens, snapshot: Snapshot) -> tuple[float, Tokens]:
        """Time a draft for a new request; return microseconds and the draft."""
        request = self._request(tokens, snapshot)
        began = time.perf_counter_ns()
        drafts = self.drafter.propose([request])
        took = time.perf_counter_ns() - began
        self.drafter.finish(request.request_id)
        return took / 1e3, drafts[0].token_ids

    def row(self, tokens: Tokens, snapshot: Snapshot) -> tuple[float, Tokens]:
        """Time a draft for a running request, whose tokens the kernels hold already; return microseconds and draft."""
        request, row, groups = (
            self._request(tokens, snapshot),
            self._memory[0],
            [NamespaceGroup(snapshot, None, self._rows, ())],
        )
        self.drafter.start_request(request, row, self._memory.address)
        params = row.params
        params.context, params.context_length, params.is_tree = address(tokens), len(tokens), 0
        params.limit, params.token_cost = DRAFT_TOKENS, self.drafter.default_token_cost
        began = time.perf_counter_ns()
        self.drafter.draft_groups(self._rows, groups)
        took = time.perf_counter_ns() - began
        found = draft_of(row.draft)
        self.drafter.finish(request.request_id)
        return took / 1e3, found.token_ids

    def _request(self, tokens: Tokens, snapshot: Snapshot) -> DraftRequest:
        self._number += 1
        return DraftRequest(f"probe-{self._number}", tokens, len(tokens), snapshot, DRAFT_TOKENS)


def measure(snapshot: Snapshot, random: np.random.Generator, *, passes: int = 3, count: int = 2000) -> dict[str, Any]:
    """Time drafting for new and running requests, and return the percentiles in microseconds.

    Each of ``passes`` repetitions uses ``count`` new contexts; the result is the median over the repetitions. Raises
    AssertionError if more than a tenth of the drafts for contexts with one occurrence differ from the stored text.
    """
    prober = Prober()
    ways = {"propose_us": prober.one, "row_us": prober.row}
    unique = agreeing = 0
    found: dict[str, Any] = {}
    gc.collect()
    gc.disable()
    try:
        for name, ask in ways.items():
            taken = []
            for _ in range(passes):
                taken.append(list[float]())
                for context in sample_contexts(snapshot, count, random):
                    took, draft = ask(context.tokens, snapshot)
                    taken[-1].append(took)
                    match = longest_match(snapshot, context.tokens, _CHECKED_MATCH_TOKENS)
                    if context.is_present and match.support == 1:
                        unique += 1
                        agreeing += context.goes_on(draft)
            for q in (50, 99):
                found[f"{name}_p{q}"] = round(float(np.median([np.percentile(times, q) for times in taken])), 1)
    finally:
        gc.enable()
    if not unique or agreeing < _LEAST_AGREEING * unique:
        raise AssertionError(f"of {unique} contexts that stand in one place only {agreeing} drafts are what follows")
    return {**found, "checked_drafts": unique, "checked_drafts_equal": agreeing}


def drafted_contexts(snapshot: Snapshot, count: int, random: np.random.Generator) -> list[Context]:
    """Return up to ``count`` stored contexts, and as many of prebuilt segments, for which the stored text is drafted.

    The contexts alternate between prebuilt and other segments. Raises AssertionError if there are none of one kind.
    """
    prober, found = Prober(), list[list[Context]]()
    for is_static in (True, False):
        some = [segment for segment in snapshot.segments if (segment.start is None) == is_static]
        if not some:
            continue
        contexts = sample_contexts(snapshot, _TRIED * count, random, some)
        right = [each for each in contexts if each.is_present and each.goes_on(prober.one(each.tokens, snapshot)[1])]
        if not right:
            raise AssertionError(f"of {len(contexts) // 2} stored contexts none was drafted from")
        found.append(right[:count])
    return [context for turn in zip(*found, strict=False) for context in turn]


FINGERPRINT: Final = "0" * 32
"""The fingerprint of a tokenizer that does not exist, because the token ids are synthetic."""
LAST_COMPLETIONS: Final = 2
"""The number of completions that are appended last. They are too short for a flush, so the memtable is not empty."""
TOKENS_PER_S: Final = 10_000
_SLOW_TOKENS: Final = 1 << 21
_SETTLED_S: Final = 1.5  # longer than the interval in which the cache looks for something to do
_PAGE_BYTES: Final = 4096
_PATIENCE_S: Final = 10.0
_MARK_TOKENS: Final = 3


def resident_bytes() -> int:
    """Return the proportional resident memory (PSS) of this process, after freed memory was returned to the kernel.

    It counts anonymous pages fully; mapped pages are divided by the number of processes that share them.
    """
    gc.collect()
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give pages back themselves
    if release is not None:
        release(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _task_stat(thread: int) -> list[str]:
    """Return the fields of a thread's ``/proc`` stat file, beginning with the state; an empty list if it ended."""
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _threads(prefix: str) -> list[list[str]]:
    found = (thread for thread in threading.enumerate() if thread.name.startswith(prefix))
    return list(filter(None, (_task_stat(thread.native_id or 0) for thread in found)))


def _is_merging() -> bool:
    """Return whether the cache's merge thread is working: running, ready to run or waiting for a disk."""
    return any(fields[0] in "RD" for fields in _threads("ssd-merge"))


def _upkeep_s() -> float:
    """Return the CPU time that the cache's background threads have used so far, in seconds."""
    return sum(int(fields[11]) + int(fields[12]) for fields in _threads("ssd-")) / os.sysconf("SC_CLK_TCK")


def warm_up() -> int:
    """Load and compile everything that a cache needs; return the memory in bytes that the process holds then.

    This memory does not depend on the number of tokens, so it is subtracted from later measurements.
    """
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as directory:
        config = CacheConfig(index=IndexConfig(capacity_tokens=1 << 20), directory=Path(directory))
        with CacheManager(config, FINGERPRINT) as caches:
            cache = caches.get()
            for _ in range(8):
                cache.append(np.arange(8000, dtype=np.int32))
                cache.flush()
            Prober().one(np.arange(64, dtype=np.int32), cache.snapshot())
    return resident_bytes()


def fill(
    cache: NamespaceCache, stream: Iterator[Tokens], num_tokens: int, index: IndexConfig, idle: int
) -> tuple[Snapshot, dict[str, Any]]:
    """Fill the cache with ``num_tokens`` tokens, wait until merging has ended, and append LAST_COMPLETIONS.

    Most tokens are appended as fast as they can be flushed. The last ones are appended one flush at a time as under
    traffic, so that there are small segments too. ``idle`` is the memory before, from `warm_up`. Returns the snapshot,
    and figures such as the bytes of memory per token after every page of the segments was read. Raises AssertionError
    if text was lost or the memtable is empty.
    """
    began = time.perf_counter()
    stored = _append(cache, stream, num_tokens - min(num_tokens // 8, _SLOW_TOKENS), 8 * index.flush_tokens)
    tokens_per_s = stored / (time.perf_counter() - began)
    _append(cache, stream, num_tokens - stored, index.flush_tokens)
    _settle(cache)
    for _ in range(LAST_COMPLETIONS):
        cache.append(next(stream))
    snapshot, stats = cache.snapshot(), cache.stats()
    if stats.num_dropped_tokens or stats.num_failures:
        raise AssertionError(f"ingest lost text: {stats}")
    if snapshot.memtable_start == snapshot.memtable_stop:
        raise AssertionError("the tail is empty: a lookup would not be what it is under traffic")
    for segment in snapshot.segments:
        for array in (segment.text, segment.order, segment.sparse_index):
            int(array[:: _PAGE_BYTES // array.itemsize].sum())
    grown = resident_bytes() - idle
    held = sum(part.nbytes for s in snapshot.segments for part in (s.text, s.order, s.sparse_index))
    return snapshot, {
        "segments": len(snapshot.segments),
        "ingest_tokens_per_s": round(tokens_per_s),
        "bytes_per_token": round(grown / snapshot.num_tokens, 2),
        "segment_bytes_per_token": round(held / snapshot.num_tokens, 2),
        "num_flushes": stats.num_flushes,
        "num_merges": stats.num_merges,
    }


def _append(cache: NamespaceCache, stream: Iterator[Tokens], num_tokens: int, most_unsealed: int) -> int:
    """Append completions until ``num_tokens`` tokens are stored, with separators; return the exact number stored.

    Waits while the memtable holds ``most_unsealed`` tokens or more, so that nothing is dropped.
    """
    stored = 0
    while stored < num_tokens:
        tokens = next(stream)
        cache.append(tokens)
        stored += len(tokens) + 1
        while cache.stats().num_memtable_tokens >= most_unsealed:
            time.sleep(0.0005)
    return stored


def _settle(cache: NamespaceCache) -> None:
    """Wait until the memtable is empty and no merge has run for a while."""
    generation, since = -1, time.monotonic()
    while time.monotonic() - since < _SETTLED_S:
        time.sleep(0.05)
        stats = cache.stats()
        if stats.generation != generation or stats.num_memtable_tokens or _is_merging():
            generation, since = stats.generation, time.monotonic()


def watch_traffic(cache: NamespaceCache, stream: Iterator[Tokens], seconds: float, vocabulary: int) -> dict[str, Any]:
    """Append `TOKENS_PER_S` for ``seconds``; measure the delay until new text is drafted, and the CPU time of indexing.

    Every completion contains three token ids that occur nowhere else (``vocabulary`` and above), so a draft of the
    token after them can only come from this completion. Raises AssertionError if new text is not drafted within 10 s.
    """
    prober = Prober()
    fresh_ms = list[float]()
    append_s, arrived, marked = 0.0, 0, 0
    before = _upkeep_s()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        tokens = next(stream).copy()
        place, run = len(tokens) // 2, np.arange(_MARK_TOKENS, dtype=np.int32) + vocabulary + _MARK_TOKENS * marked
        tokens[place : place + _MARK_TOKENS] = run
        marked += 1
        asked, wanted = np.concatenate([tokens[:2], run]), int(tokens[place + _MARK_TOKENS])
        at, used = time.perf_counter(), time.thread_time()
        cache.append(tokens)
        append_s += time.thread_time() - used
        while prober.one(asked, cache.snapshot())[1][:1].tolist() != [wanted]:
            if time.perf_counter() - at > _PATIENCE_S:
                raise AssertionError("new text was not drafted")
        fresh_ms.append((time.perf_counter() - at) * 1e3)
        arrived += len(tokens)
        time.sleep(max(0.0, began + arrived / TOKENS_PER_S - time.perf_counter()))
    elapsed = time.perf_counter() - began
    share = (_upkeep_s() - before + append_s) / elapsed
    return {
        "freshness_ms_p99": round(float(np.percentile(fresh_ms, 99)), 3),
        "maintenance_core_share": round(share, 4),
    }
