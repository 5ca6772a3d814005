"""One namespace of a cache set while it is opened, used and closed."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from ssd.config import IndexConfig
from ssd.errors import CacheError, StoreUnavailable
from ssd.retrieval.directory import DirectoryReader, SegmentDirectory
from ssd.retrieval.file_bytes import CopyBudget
from ssd.retrieval.merge_worker import MergeWorker
from ssd.retrieval.packed import Tokens
from ssd.retrieval.segment import Segment
from ssd.retrieval.suffix_cache import SuffixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceTerms:
    """The same for all requests of a namespace; what the last of them said counts.

    ``capacity_tokens`` : most tokens kept, None for the configured number; of effect when the namespace is opened.
    ``reads_shared`` : drafts come from what the set's first namespace has sealed as well.
    ``is_kept`` : it has a directory, where the set has one, and is shared with other replicas; without, all stays in
        this process' memory.
    ``group`` : of the namespaces of one group at most ``most_in_group`` are open: the one used longest ago is closed
        for another; where requests hold them all, there is none for the next.
    """

    capacity_tokens: int | None = None
    reads_shared: bool = False
    is_kept: bool = True
    group: str | None = None
    most_in_group: int = 8


DEFAULT_TERMS = NamespaceTerms()


_MOST_WAITING_TOKENS: Final = 1 << 18


class Namespace:
    """A name and, once its files were read, its cache. Safe from any thread; only ``opened`` ever waits.

    ``cache`` : None until it is open.
    """

    def __init__(
        self, name: str, open_cache: Callable[[str], SuffixCache], terms: NamespaceTerms = DEFAULT_TERMS
    ) -> None:
        """``open_cache`` : makes the cache of a name; reads files. ``terms`` : those that count now."""
        self.name = name
        self.terms = terms
        self.cache: SuffixCache | None = None
        self._open_cache = open_cache
        self._opening = threading.Lock()  # held while files are read
        self._lock = threading.Lock()
        self._opening_since: float | None = None
        self._waiting: list[tuple[Tokens, int]] = []
        self._num_waiting_tokens = self._num_lost_tokens = 0
        self._is_discarded = False
        self._holders: WeakSet[HeldNamespace] = WeakSet()

    def opened(self) -> SuffixCache:
        """The cache. The first to ask opens it, and others wait for that; raises what opening it raises."""
        if self.cache is not None:
            return self.cache
        with self._opening:
            if self.cache is None:
                cache = self._open_cache(self.name)
                with self._lock:
                    for tokens, prompt_length in self._waiting:
                        cache.append(tokens, prompt_length=prompt_length)
                    if self._num_lost_tokens:
                        error = TimeoutError(f"{self._num_lost_tokens} tokens were too many to be kept for it")
                        cache.report_failure("not all text of the time it took to open was stored", error)
                    self._waiting.clear()
                    self.cache = cache
                if self._is_discarded:
                    cache.discard()
            return self.cache

    def append(self, tokens: Tokens, *, prompt_length: int) -> None:
        """Store a finished sequence, int32[n]: now, or as soon as the cache is open. Never waits for files. O(n)."""
        with self._lock:
            if self._is_discarded:
                return
            if self.cache is None:
                if self._num_waiting_tokens + len(tokens) > _MOST_WAITING_TOKENS:
                    self._num_lost_tokens += len(tokens)
                    return
                self._num_waiting_tokens += len(tokens)
                self._waiting.append((tokens, prompt_length))
                return
        self.cache.append(tokens, prompt_length=prompt_length)

    def discard(self) -> None:
        """Forget all of it, for those too that hold it, and store nothing more. Waits while its files are read."""
        with self._lock:
            self._is_discarded = True
            self._waiting.clear()
        with self._opening:
            if self.cache is not None:
                self.cache.discard()

    def held(self) -> HeldNamespace:
        """The namespace for one more holder."""
        holder = HeldNamespace(self)
        with self._lock:
            self._holders.add(holder)
        return holder

    @property
    def is_held(self) -> bool:
        """Whether what ``held`` gave is still alive, or the cache is being opened."""
        with self._lock:
            return self._opening_since is not None or len(self._holders) > 0

    def begin_opening(self) -> bool:
        """Whether the caller is to call ``opened``, and then ``end_opening``: True for one caller at a time."""
        with self._lock:
            if self.cache is not None or self._opening_since is not None:
                return False
            self._opening_since = time.monotonic()
            return True

    def end_opening(self) -> None:
        """The cache is open, or could not be opened."""
        with self._lock:
            self._opening_since = None

    @property
    def opening_s(self) -> float:
        """Seconds since somebody began to open it; 0 while nobody does."""
        since = self._opening_since
        return 0.0 if since is None else time.monotonic() - since


class HeldNamespace:
    """A namespace as one request holds it: not closed to make room for another while this object lives."""

    __slots__ = ("__weakref__", "_namespace")

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    @property
    def cache(self) -> SuffixCache | None:
        """The cache; None while its files are read, or where they cannot be. O(1)."""
        return self._namespace.cache

    def append(self, tokens: Tokens, *, prompt_length: int) -> None:
        """Store a finished sequence, int32[n], see ``SuffixCache.append``; now, or as soon as the cache is open."""
        self._namespace.append(tokens, prompt_length=prompt_length)


class Lending:
    """Segments of ``owner`` for others: those of warm-up directories for all, what it sealed for its readers.

    Segments never change, so lending one costs no memory; a tail is lent once it is sealed. Borrowers get new tuples
    when the owner's segments have changed. Safe from any thread.
    """

    def __init__(self, owner: SuffixCache) -> None:
        self._owner = owner
        self._lock = threading.Lock()  # held while one namespace gets what there is for it
        self._warm_ids: frozenset[str] = frozenset()
        self._table = -1
        self._warm: tuple[Segment, ...] = ()
        self._all: tuple[Segment, ...] = ()

    def lend_to_all(self, segment_ids: frozenset[str]) -> None:
        """These segments of the owner are for every namespace."""
        with self._lock:
            self._warm_ids |= segment_ids
            self._table = -1

    def refresh(self, namespace: Namespace, cache: SuffixCache) -> None:
        """Give ``cache`` of ``namespace`` what there is by now on its terms, if that is new to it. O(segments)."""
        if cache is self._owner:
            return
        with self._lock:
            if self._owner.snapshot().segment_table.number != self._table:
                self._collect()
            lent = self._all if namespace.terms.reads_shared else self._warm
            if cache.borrowed is not lent:
                cache.borrow(lent)

    def _collect(self) -> None:
        """Tuples that stay the same objects while what they hold does."""
        snapshot = self._owner.snapshot()
        self._table = snapshot.segment_table.number
        known = {segment.segment_id: segment for segment in self._all}
        found = []
        for segment in snapshot.segments:
            lent = known.get(segment.segment_id)
            # The same arrays, and to the kernels a segment outside the ring: its positions are not the borrower's.
            found.append(lent if lent is not None and lent.text is segment.text else replace(segment, start=None))
        warm = [segment for segment in found if segment.segment_id in self._warm_ids]
        self._all = self._all if _are_same(found, self._all) else tuple(found)
        self._warm = self._warm if _are_same(warm, self._warm) else tuple(warm)


def _are_same(some: Sequence[Segment], others: Sequence[Segment]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


_NOT_WRITABLE: Final = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheOpener:
    """Makes the caches of one tokenizer below one directory. Safe from any thread.

    ``root`` : holds a directory for each namespace; None keeps all in memory. ``is_durable`` : whether it is to outlive
    the process. ``budget``, ``worker``, ``wake`` : as for ``SuffixCache``.
    """

    config: IndexConfig
    fingerprint: str
    root: Path | None
    is_durable: bool
    budget: CopyBudget
    worker: MergeWorker | None
    wake: Callable[[], None] | None

    def open(self, name: str, terms: NamespaceTerms = DEFAULT_TERMS) -> SuffixCache:
        """The cache of a namespace; one whose directory cannot be written is searched, and learns in memory.

        Raises CacheError: what is wrong with the directory.
        """
        if self.root is None or not terms.is_kept:
            return self._make(name, None, terms)
        path = self.root / name
        whose: dict[str, Any] = {"fingerprint": self.fingerprint, "namespace": name, "budget": self.budget}
        try:
            try:
                return self._make(name, SegmentDirectory(path, durable=self.is_durable, **whose), terms)
            except OSError as error:
                if error.errno not in _NOT_WRITABLE or not path.is_dir():
                    raise
                cache = self._make(name, DirectoryReader(path, **whose), terms)
                cache.report_failure(
                    "its directory cannot be written: what it holds is searched, what is learned stays in memory", error
                )
                return cache
        except OSError as error:
            raise StoreUnavailable(
                f"the cache directory {path} cannot be used: {error}. Give one that can be written, or at least read"
            ) from error

    def in_memory(self, name: str, error: CacheError, terms: NamespaceTerms = DEFAULT_TERMS) -> SuffixCache:
        """An empty cache without a directory, because that cannot be used: ``error`` is its first failure."""
        cache = self._make(name, None, terms)
        cache.report_failure("its directory cannot be used, it stays in memory", error)
        return cache

    def _make(self, name: str, directory: DirectoryReader | None, terms: NamespaceTerms) -> SuffixCache:
        capacity = terms.capacity_tokens
        return SuffixCache(
            name,
            self.config if capacity is None else replace(self.config, capacity_tokens=capacity),
            fingerprint=self.fingerprint,
            directory=directory,
            budget=self.budget,
            worker=self.worker,
            wake=self.wake,
        )
