"""All namespaces of a server: opened on first use beside what uses them, maintained by threads of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from ssd.config import CacheConfig
from ssd.errors import CacheError, ConfigError, StoreUnavailable, require_fault
from ssd.retrieval.cache_state import CacheStats
from ssd.retrieval.directory import SegmentDirectory, remove_directory
from ssd.retrieval.files import check_fingerprint, check_namespace
from ssd.retrieval.namespace import DEFAULT_TERMS, HeldNamespace, Namespace, NamespaceTerms
from ssd.retrieval.segment import Segment
from ssd.retrieval.suffix_cache import SuffixCache

__all__ = ["DEFAULT_NAMESPACE", "CacheSet", "CacheStats", "SuffixCache"]

log = logging.getLogger(__name__)

DEFAULT_NAMESPACE = "default"


class _Discarded(Exception):
    """A namespace was forgotten before it was open: nothing is opened."""


class CacheSet:
    """The caches of one tokenizer by namespace.

    A request holds its namespace from its submission on (``hold``), and whoever steps the engine reads what is there:
    files are read, and closed, on threads of their own. A directory that is slow, or cannot be opened, costs only its
    own requests, and these only their drafts.

    Nothing crosses from one namespace to another. With ``config.directory`` each namespace has a directory of its own
    below it and is found again after a restart: all that was sealed, and the tail as well after ``close``. Without,
    segments lie in this process's memory.
    """

    def __init__(
        self,
        config: CacheConfig,
        fingerprint: str,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        inline: bool = False,
        max_namespaces: int = 256,
        on_open: Callable[[SuffixCache], object] | None = None,
        on_close: Callable[[SuffixCache], object] | None = None,
    ) -> None:
        """Opens ``namespace``, so that what is wrong with the directory is known at once; no other is opened unasked.

        ``fingerprint`` : the tokenizer's, 32 hexadecimal characters. ``inline`` : no threads; the owner
        calls ``maintain`` and gets the same result every time. ``max_namespaces`` : beyond it the one not used for
        longest of those that nobody holds is closed, never ``namespace``; what it learned is lost if it has no
        directory. ``on_open`` : called with every cache that is kept before its first use, on the thread that opens it;
        ``on_close`` : with those that are closed while the set goes on, or discarded.

        Raises ConfigError, CacheLocked, SegmentCorrupt, FormatVersion, TokenizerMismatch, NamespaceMismatch, and
        StoreUnavailable for a directory that cannot be written.
        """
        self.config = config
        self.namespace = check_namespace(namespace)
        self.fingerprint = check_fingerprint(fingerprint)
        self._max_namespaces = max(1, max_namespaces)
        self._on_open = on_open
        self._on_close = on_close
        self._namespaces: OrderedDict[str, Namespace] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()  # held for microseconds, never while files are read
        self._closing: dict[str, threading.Event] = {}
        self._complained: set[str] = set()
        self.num_failed_openings = 0
        """Times that a namespace could not be opened."""
        self._wake = threading.Event()
        self._stopping = False
        self._inline = inline

        self._lending = threading.Lock()  # held while namespaces get what there is of the first one for them
        self._warm_ids: frozenset[str] = frozenset()
        self._lent_table = -1
        self._lent: tuple[Segment, ...] = ()

        self._root = config.directory  # holds a directory for each namespace; None keeps all in memory
        self._sorter = None if inline else ThreadPoolExecutor(1, "ssd-merge")
        self._namespaces[namespace] = self._first = Namespace(namespace, self._open)
        self._first.opened()
        self._thread: threading.Thread | None = None
        if not inline:
            self._thread = threading.Thread(target=self._run, name="ssd-cache", daemon=True)
            self._thread.start()

    def get(self, name: str | None = None) -> SuffixCache:
        """The cache of a namespace, None for the first one. Opened on first use (then files are read). From any thread.

        A directory that cannot be used is one failure of its cache, which then stays in memory. Raises ConfigError for
        a name that cannot be one.
        """
        while True:
            namespace, _held = self._find(self.namespace if name is None else name)  # held until it is open
            with suppress(_Discarded):
                return namespace.opened()

    def hold(self, name: str, terms: NamespaceTerms = DEFAULT_TERMS) -> HeldNamespace | None:
        """A namespace for one request, which is not closed while the result lives. O(namespaces), from any thread.

        What is not open yet is opened on a thread of its own; with ``inline`` now. None for a name that cannot be one,
        and where all the namespaces of a group are held. ``terms`` : those that count from now on. Never raises: what
        cannot be opened is counted, logged once, and tried again by the next that holds it.
        """
        try:
            if self._is_group_full(name, terms):
                return None
            namespace, held = self._find(name, terms)
        except ConfigError as error:
            self._opening_failed(name, error)
            return None
        with self._lock:
            is_to_open = not self._stopping and namespace.cache is None and not namespace.is_opening
            namespace.is_opening |= is_to_open
        if is_to_open:
            if self._inline:
                self._open_held(namespace)
            else:
                threading.Thread(target=self._open_held, args=[namespace], name=f"ssd-open-{name}", daemon=True).start()
        return held

    def add_static_directory(self, path: Path) -> None:
        """Search the segments of a directory made by ``ssd-cache build`` in every namespace; they are in memory once.

        Raises CacheError: SegmentCorrupt, FormatVersion, TokenizerMismatch, StoreUnavailable.
        """
        segment_ids = self.get().add_static_directory(path)
        with self._lending:
            self._warm_ids |= segment_ids
        self._lend_all()

    def discard(self, name: str) -> None:
        """Forget a namespace and those of its group, open or not, and remove their files; who holds one has none of it.

        Waits for what is being written. Raises ConfigError for the first namespace, and StoreUnavailable, with nothing
        of it in use any more, where files of it could not be removed.
        """
        if check_namespace(name) == self.namespace:
            raise ConfigError(f"namespace {name} is open as long as its server is: stop that and remove its directory")
        while True:  # who asks for it from here on opens it anew, once it is gone
            with self._lock:
                closing = self._closing.get(name)
                if closing is None:
                    gone = [each for each in self._namespaces.values() if name in (each.name, each.terms.group)]
                    for namespace in gone:
                        del self._namespaces[namespace.name]
                    self._closing[name] = threading.Event()
                    break
            closing.wait()
        try:
            for namespace in gone:
                if namespace.cache is not None and self._on_close is not None:
                    self._on_close(namespace.cache)
                namespace.discard()
            if self._root is not None:
                self._remove(name, self._root / name)
        finally:
            self._is_closed(name)

    def _remove(self, name: str, path: Path) -> None:
        try:
            remove_directory(path)
        except (OSError, CacheError) as error:
            raise StoreUnavailable(
                f"nothing is drafted from namespace {name} any more, but its files in {path} could not be removed: "
                f"{error}. Remove them by hand"
            ) from error

    def names(self) -> list[str]:
        """The open namespaces."""
        return sorted(cache.name for cache in self._open_caches())

    def stats(self) -> dict[str, CacheStats]:
        """Sizes and counters of every open namespace that belongs to no group."""
        with self._lock:
            found = [each for each in self._namespaces.values() if each.terms.group is None]
        return {each.name: each.cache.stats() for each in found if each.cache is not None}

    def maintain(self) -> None:
        """Seal and merge what is due in every namespace, now, on this thread. For ``inline`` sets."""
        for cache in self._open_caches():
            cache.maintain()
        self._lend_all()

    def flush(self) -> None:
        """Seal every tail and wait until nothing is left to merge."""
        for cache in self._open_caches():
            cache.flush()
        self._lend_all()

    def close(self) -> None:
        """Seal and keep everything, stop the threads. May be called twice.

        Waits for what is being sorted or closed. A namespace that is still being opened is left to its thread.
        """
        with self._lock:
            self._stopping = True
        self._wake.set()
        for cache in self._open_caches():
            cache.begin_close()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            closing = list(self._closing.values())
        for closed in closing:
            closed.wait()
        if self._sorter is not None:
            self._sorter.shutdown(cancel_futures=True)
        for cache in self._open_caches():
            cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_caches(self) -> list[SuffixCache]:
        with self._lock:
            return [each.cache for each in self._namespaces.values() if each.cache is not None]

    def _open(self, namespace: Namespace) -> SuffixCache:
        """Its cache. While the set serves, a directory that cannot be used costs only what would be kept there.

        Raises CacheError for that of the first namespace, and _Discarded.
        """
        with self._lock:
            if self._namespaces.get(namespace.name) is not namespace:
                raise _Discarded  # whoever discards it waits for this thread
            closing = self._closing.get(namespace.name)
        if closing is not None:
            closing.wait()
        try:
            cache = self._open_directory(namespace)
        except CacheError as error:
            if namespace.name == self.namespace:
                raise
            cache = self._make(namespace, None)
            cache.report_failure("its directory cannot be used, it stays in memory", error)
        with self._lock:
            is_discarded = self._namespaces.get(namespace.name) is not namespace
        if not is_discarded:
            if self._on_open is not None and namespace.terms.is_kept:
                self._on_open(cache)
            self._lend([(cache, namespace.terms)])
        return cache

    def _open_directory(self, namespace: Namespace) -> SuffixCache:
        """Raises CacheError."""
        if self._root is None or not namespace.terms.is_kept:
            return self._make(namespace, None)
        path = self._root / namespace.name
        try:
            directory = SegmentDirectory(
                path, fingerprint=self.fingerprint, namespace=namespace.name, owner=namespace.terms.owner
            )
            return self._make(namespace, directory)
        except OSError as error:
            raise StoreUnavailable(
                f"the cache directory {path} cannot be used: {error}. Give one that can be written; one that is only "
                "to be read is given to --warm"
            ) from error

    def _make(self, namespace: Namespace, directory: SegmentDirectory | None) -> SuffixCache:
        config, capacity = self.config.index, namespace.terms.capacity_tokens
        return SuffixCache(
            namespace.name,
            config if capacity is None else replace(config, capacity_tokens=capacity),
            fingerprint=self.fingerprint,
            directory=directory,
            sorter=self._sorter,
            wake=None if self._inline else self._wake.set,
        )

    def _lend_all(self) -> None:
        with self._lock:
            found = list(self._namespaces.values())
        self._lend([(each.cache, each.terms) for each in found if each.cache is not None])

    def _lend(self, borrowers: Iterable[tuple[SuffixCache, NamespaceTerms]]) -> None:
        """Have caches search what the first one has by now for those on their terms: of warm-up directories all, what
        it sealed its readers. Segments never change, so this costs no memory. O(segments)."""
        owner = self._first.cache
        if owner is None:
            return
        with self._lending:
            snapshot = owner.snapshot()
            if snapshot.segment_table.number != self._lent_table:
                self._lent_table = snapshot.segment_table.number
                known = {id(segment.text): segment for segment in self._lent}
                # The same arrays, and to the kernels outside the ring: their positions are not the borrower's.
                self._lent = tuple(
                    known.get(id(each.text)) or replace(each, start=None) for each in snapshot.segments
                )  # fmt: skip
            warm = tuple(segment for segment in self._lent if segment.segment_id in self._warm_ids)
            for cache, terms in borrowers:
                lent = self._lent if terms.reads_shared else warm
                if cache is not owner and cache.borrowed != lent:
                    cache.borrow(lent)

    def _is_group_full(self, name: str, terms: NamespaceTerms) -> bool:
        """Whether no place is left for one more namespace of its group: as many as may be are held."""
        if terms.group is None:
            return False
        with self._lock:
            others = [each for each in self._namespaces.values() if each.terms.group == terms.group]
        return all(each.name != name for each in others) and sum(each.is_held for each in others) >= terms.most_in_group

    def _find(self, name: str, terms: NamespaceTerms | None = None) -> tuple[Namespace, HeldNamespace]:
        """A namespace, held for the caller: what is held is not closed. Raises ConfigError."""
        with self._lock:
            namespace = self._namespaces.get(name)
            are_new = namespace is not None and terms is not None and terms != namespace.terms
            if namespace is None:
                namespace = Namespace(check_namespace(name), self._open, terms or DEFAULT_TERMS)
                self._namespaces[name] = namespace
            elif terms is not None:
                namespace.terms = terms
            self._namespaces.move_to_end(name)
            held = namespace.held()
            leaving = self._take_least_used(namespace.terms)
        if are_new and namespace.cache is not None:
            self._lend([(namespace.cache, namespace.terms)])  # before the first draft on new terms
        for cache in leaving:
            if self._inline:
                self._close_one(cache)
            else:
                threading.Thread(
                    target=self._close_one, args=[cache], name=f"ssd-close-{cache.name}", daemon=True
                ).start()
        return namespace, held

    def _take_least_used(self, terms: NamespaceTerms) -> list[SuffixCache]:
        """The caches to be closed, so that no more are open than may be, or than are held: of a group, and in all.

        ``terms`` : of the namespace just asked for. Namespaces that are not kept go first: others have more to lose.
        """
        found = list(self._namespaces.values())
        group = [each for each in found if terms.group is not None and each.terms.group == terms.group]
        num_over = max(0, len(group) - terms.most_in_group)
        leaving = [each for each in group if not each.is_held][:num_over] if num_over else []
        for namespace in (
            sorted(found, key=lambda each: each.terms.is_kept) if len(found) > self._max_namespaces else ()
        ):
            if len(found) - len(leaving) <= self._max_namespaces:
                break
            if namespace.name != self.namespace and not namespace.is_held and namespace not in leaving:
                leaving.append(namespace)
        caches = []
        for namespace in leaving:
            del self._namespaces[namespace.name]
            if namespace.cache is not None:
                self._closing[namespace.name] = threading.Event()
                caches.append(namespace.cache)
        return caches

    def _close_one(self, cache: SuffixCache) -> None:
        try:
            if self._on_close is not None:
                self._on_close(cache)
            cache.close()
            log.debug("closed namespace=%s: it was not used for longest", cache.name)
        finally:
            self._is_closed(cache.name)

    def _is_closed(self, name: str) -> None:
        with self._lock:
            self._closing.pop(name).set()

    def _open_held(self, namespace: Namespace) -> None:
        """Open what somebody holds and goes on without meanwhile."""
        try:
            cache = namespace.opened()
            if self._stopping:  # and nobody waits for it any more
                cache.close()
        except _Discarded:
            pass
        except BaseException as error:
            if self._inline:
                require_fault(error)
            self._opening_failed(namespace.name, error)
        finally:
            namespace.is_opening = False

    def _opening_failed(self, name: str, error: BaseException) -> None:
        self.num_failed_openings += 1
        kind = f"{name[:80]} {type(error).__name__}"
        if kind not in self._complained:
            self._complained.add(kind)
            log.error("namespace=%.80s was not opened, its requests go without (logged once): %s", name, error)

    def _run(self) -> None:
        interval_s = self.config.index.rebuild_interval_s
        sealed_at = time.monotonic()
        while not self._stopping:
            self._wake.wait(interval_s)
            self._wake.clear()
            is_due = time.monotonic() - sealed_at >= interval_s
            if is_due:
                sealed_at = time.monotonic()
            for cache in self._open_caches():
                if self._stopping:
                    return
                try:
                    cache.maintain(seal_all=is_due, wait=False)
                except Exception as error:  # the thread must outlive whatever one namespace does
                    cache.report_failure("maintenance failed", error)
            self._lend_all()
