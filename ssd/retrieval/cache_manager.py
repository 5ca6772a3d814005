"""The retrieval caches of all namespaces: opened on first use, and maintained by background threads."""

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
from ssd.errors import CacheError, ConfigError, StoreUnavailable, reraise_exits
from ssd.retrieval.cache_state import CacheStats
from ssd.retrieval.directory import SegmentDirectory, remove_directory
from ssd.retrieval.files import check_fingerprint, check_namespace
from ssd.retrieval.namespace import DEFAULT_POLICY, NamespaceEntry, NamespaceLease, NamespacePolicy
from ssd.retrieval.namespace_cache import NamespaceCache
from ssd.retrieval.segment import Segment

__all__ = ["DEFAULT_NAMESPACE", "CacheManager", "CacheStats", "NamespaceCache"]

log = logging.getLogger(__name__)

DEFAULT_NAMESPACE = "default"


class _Discarded(Exception):
    """Raised while a namespace is being opened, if a request to delete this namespace has arrived since."""


class CacheManager:
    """The retrieval caches of all namespaces for one tokenizer.

    A request leases its namespace when it is submitted (``acquire``), and the engine's thread reads the lease. Files
    are read and closed on other threads. If a namespace's directory is slow or cannot be opened, only requests of this
    namespace are affected, and these lose only their drafts from the cache.

    No data crosses from one namespace to another. If ``config.directory`` is given, each namespace has a directory of
    its own below it. A restart then restores all flushed text and, if the manager was closed with ``close``, also the
    memtable. Without a directory, all text stays in this process's memory.
    """

    def __init__(
        self,
        config: CacheConfig,
        fingerprint: str,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        inline: bool = False,
        max_namespaces: int = 256,
        on_open: Callable[[NamespaceCache], object] | None = None,
        on_close: Callable[[NamespaceCache], object] | None = None,
    ) -> None:
        """Create the manager and open the default ``namespace``, so that errors of its directory are raised here.

        Other namespaces are opened on first use.

        Args:
            config: The settings of the cache.
            fingerprint: The tokenizer's fingerprint, 32 hexadecimal characters.
            namespace: The name of the default namespace, which is never closed.
            inline: Start no threads. The owner calls ``maintain``, and results are deterministic.
            max_namespaces: The maximum number of open namespaces. Beyond it, the least recently used namespace without
                a lease is closed. Its text is lost if it has no directory.
            on_open: Called with every durable cache before its first use, on the thread that opens it.
            on_close: Called with every cache that is closed or deleted while the manager is in use.

        Raises:
            ConfigError, CacheLocked, SegmentCorrupt, FormatVersion, TokenizerMismatch, NamespaceMismatch: The directory
                of ``namespace`` cannot be used.
            StoreUnavailable: The directory cannot be written.
        """
        self.config = config
        self.namespace = check_namespace(namespace)
        self.fingerprint = check_fingerprint(fingerprint)
        self._max_namespaces = max(1, max_namespaces)
        self._on_open = on_open
        self._on_close = on_close
        self._namespaces: OrderedDict[str, NamespaceEntry] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()  # locked for microseconds, never while files are read
        self._closing: dict[str, threading.Event] = {}
        self._logged: set[str] = set()
        self.num_failed_openings = 0
        """The number of failed attempts to open a namespace."""
        self._wake = threading.Event()
        self._stopping = False
        self._inline = inline

        self._attaching = threading.Lock()  # locked while segments are attached to other namespaces
        self._prebuilt_ids: frozenset[str] = frozenset()
        self._shared_table = -1
        self._shared: tuple[Segment, ...] = ()

        self._root = config.directory  # contains one directory per namespace; None: all is in memory
        self._sorter = None if inline else ThreadPoolExecutor(1, "ssd-merge")
        self._namespaces[namespace] = self._first = NamespaceEntry(namespace, self._open)
        self._first.opened()
        self._thread: threading.Thread | None = None
        if not inline:
            self._thread = threading.Thread(target=self._run, name="ssd-cache", daemon=True)
            self._thread.start()

    def get(self, name: str | None = None) -> NamespaceCache:
        """Return the cache of the namespace ``name``, which is opened on first use. Safe from any thread.

        ``name`` = None selects the default namespace. The first use reads files. If the directory cannot be used, the
        cache counts one failure and keeps its text in memory only. Raises ConfigError for an invalid name.
        """
        while True:
            namespace, _lease = self._lease(self.namespace if name is None else name)  # lasts until it is open
            with suppress(_Discarded):
                return namespace.opened()

    def acquire(self, name: str, policy: NamespacePolicy = DEFAULT_POLICY) -> NamespaceLease | None:
        """Lease a namespace for one request; the namespace is not closed while the returned lease exists.

        A namespace that is not open yet is opened on a thread of its own or, with ``inline``, before this method
        returns. Never raises: if opening fails, the failure is counted and logged once, and the next request tries
        again. Safe from any thread.

        Args:
            name: The namespace.
            policy: The settings of the namespace from now on.

        Returns:
            None if the name is invalid, or if the namespace is not open and requests already lease
            ``policy.max_in_group`` namespaces of its group.
        """
        try:
            if self._is_group_full(name, policy):
                return None
            namespace, lease = self._lease(name, policy)
        except ConfigError as error:
            self._record_failed_opening(name, error)
            return None
        with self._lock:
            must_open = not self._stopping and namespace.cache is None and not namespace.is_opening
            namespace.is_opening |= must_open
        if must_open:
            if self._inline:
                self._open_leased(namespace)
            else:
                threading.Thread(
                    target=self._open_leased, args=[namespace], name=f"ssd-open-{name}", daemon=True
                ).start()
        return lease

    def add_prebuilt_directory(self, path: Path) -> None:
        """Make the text of a directory made by ``ssd-cache build`` searchable in all namespaces, which share one copy.

        If the directory cannot be used, CacheError is raised: SegmentCorrupt, FormatVersion, TokenizerMismatch or
        StoreUnavailable.
        """
        segment_ids = self.get().add_prebuilt_directory(path)
        with self._attaching:
            self._prebuilt_ids |= segment_ids
        self._attach_shared_to_all()

    def discard(self, name: str) -> None:
        """Delete the namespace ``name`` and its files, and all namespaces of the group ``name``.

        Requests that lease one of these namespaces find it empty from now on. Waits for writes in progress.

        Raises:
            ConfigError: ``name`` is the default namespace.
            StoreUnavailable: Some files could not be removed. The namespace is not used any more nevertheless.
        """
        if check_namespace(name) == self.namespace:
            raise ConfigError(
                f"namespace {name} cannot be deleted while its server runs: stop the server and remove the directory"
            )
        while True:  # later requests open it anew after the deletion
            with self._lock:
                closing = self._closing.get(name)
                if closing is None:
                    gone = [each for each in self._namespaces.values() if name in (each.name, each.policy.group)]
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
                f"namespace {name} is no longer used, but its files in {path} could not be removed: {error}. "
                "Remove them by hand"
            ) from error

    def names(self) -> list[str]:
        return sorted(cache.name for cache in self._open_caches())

    def stats(self) -> dict[str, CacheStats]:
        """Return the sizes and counters of every open namespace that belongs to no group, by name."""
        with self._lock:
            found = [each for each in self._namespaces.values() if each.policy.group is None]
        return {each.name: each.cache.stats() for each in found if each.cache is not None}

    def maintain(self) -> None:
        """In every namespace, flush the memtable and merge segments if necessary. Only needed if ``inline`` is set."""
        for cache in self._open_caches():
            cache.maintain()
        self._attach_shared_to_all()

    def flush(self) -> None:
        """Turn every memtable into segments, and wait until all merges of segments have ended."""
        for cache in self._open_caches():
            cache.flush()
        self._attach_shared_to_all()

    def close(self) -> None:
        """Flush all text, write it to files, and stop the threads. This method may be called twice.

        It waits for segments that are being sorted and for namespaces that are being closed, but not for a namespace
        that is still being opened.
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

    def _open_caches(self) -> list[NamespaceCache]:
        with self._lock:
            return [each.cache for each in self._namespaces.values() if each.cache is not None]

    def _open(self, namespace: NamespaceEntry) -> NamespaceCache:
        """Open the cache of a namespace.

        If its directory cannot be used, the cache keeps its text in memory; only for the default namespace, CacheError
        is raised instead. Raises _Discarded if the namespace was deleted while it was being opened.
        """
        with self._lock:
            if self._namespaces.get(namespace.name) is not namespace:
                raise _Discarded  # the thread that deletes it waits for this one
            closing = self._closing.get(namespace.name)
        if closing is not None:
            closing.wait()
        try:
            cache = self._open_directory(namespace)
        except CacheError as error:
            if namespace.name == self.namespace:
                raise
            cache = self._make(namespace, None)
            cache.report_failure(
                "its directory cannot be used, so its text stays in memory and is lost at a restart", error
            )
        with self._lock:
            is_discarded = self._namespaces.get(namespace.name) is not namespace
        if not is_discarded:
            if self._on_open is not None and namespace.policy.is_durable:
                self._on_open(cache)
            self._attach_shared([(cache, namespace.policy)])
        return cache

    def _open_directory(self, namespace: NamespaceEntry) -> NamespaceCache:
        if self._root is None or not namespace.policy.is_durable:
            return self._make(namespace, None)
        path = self._root / namespace.name
        try:
            directory = SegmentDirectory(
                path, fingerprint=self.fingerprint, namespace=namespace.name, owner=namespace.policy.owner
            )
            return self._make(namespace, directory)
        except OSError as error:
            raise StoreUnavailable(
                f"the cache directory {path} cannot be used: {error}. Use a writable directory, or pass a read-only "
                "directory with --warm"
            ) from error

    def _make(self, namespace: NamespaceEntry, directory: SegmentDirectory | None) -> NamespaceCache:
        config, capacity = self.config.index, namespace.policy.capacity_tokens
        return NamespaceCache(
            namespace.name,
            config if capacity is None else replace(config, capacity_tokens=capacity),
            fingerprint=self.fingerprint,
            directory=directory,
            sorter=self._sorter,
            wake=None if self._inline else self._wake.set,
        )

    def _attach_shared_to_all(self) -> None:
        with self._lock:
            found = list(self._namespaces.values())
        self._attach_shared([(each.cache, each.policy) for each in found if each.cache is not None])

    def _attach_shared(self, caches: Iterable[tuple[NamespaceCache, NamespacePolicy]]) -> None:
        """Attach the default namespace's segments to other caches, as far as their policies allow.

        Every cache gets the prebuilt segments; caches with ``reads_shared`` get all segments of the default namespace.
        Segments are immutable, so they are not copied.
        """
        owner = self._first.cache
        if owner is None:
            return
        with self._attaching:
            snapshot = owner.snapshot()
            if snapshot.segment_table.number != self._shared_table:
                self._shared_table = snapshot.segment_table.number
                known = {id(segment.text): segment for segment in self._shared}
                # The arrays are the same. ``start`` is None because ring positions differ between namespaces.
                self._shared = tuple(
                    known.get(id(each.text)) or replace(each, start=None) for each in snapshot.segments
                )
            prebuilt = tuple(segment for segment in self._shared if segment.segment_id in self._prebuilt_ids)
            for cache, policy in caches:
                segments = self._shared if policy.reads_shared else prebuilt
                if cache is not owner and cache.shared_segments != segments:
                    cache.attach_shared(segments)

    def _is_group_full(self, name: str, policy: NamespacePolicy) -> bool:
        if policy.group is None:
            return False
        with self._lock:
            others = [each for each in self._namespaces.values() if each.policy.group == policy.group]
        return (
            all(each.name != name for each in others) and sum(each.is_leased for each in others) >= policy.max_in_group
        )

    def _lease(self, name: str, policy: NamespacePolicy | None = None) -> tuple[NamespaceEntry, NamespaceLease]:
        with self._lock:
            namespace = self._namespaces.get(name)
            is_changed = namespace is not None and policy is not None and policy != namespace.policy
            if namespace is None:
                namespace = NamespaceEntry(check_namespace(name), self._open, policy or DEFAULT_POLICY)
                self._namespaces[name] = namespace
            elif policy is not None:
                namespace.policy = policy
            self._namespaces.move_to_end(name)
            lease = namespace.lease()
            unused = self._pop_least_used(namespace.policy)
        if is_changed and namespace.cache is not None:
            self._attach_shared([(namespace.cache, namespace.policy)])  # before the first draft under the new policy
        for cache in unused:
            if self._inline:
                self._close_one(cache)
            else:
                threading.Thread(
                    target=self._close_one, args=[cache], name=f"ssd-close-{cache.name}", daemon=True
                ).start()
        return namespace, lease

    def _pop_least_used(self, policy: NamespacePolicy) -> list[NamespaceCache]:
        """Remove the least recently used namespaces if there are too many; return their caches, to be closed.

        The limits are ``policy.max_in_group`` for the group of ``policy``, the policy of the namespace requested last,
        and ``max_namespaces`` for the manager. Leased namespaces are not removed. Namespaces that are not durable are
        removed first, because closing durable namespaces costs more.
        """
        entries = list(self._namespaces.values())
        group = [each for each in entries if policy.group is not None and each.policy.group == policy.group]
        num_over = max(0, len(group) - policy.max_in_group)
        unused = [each for each in group if not each.is_leased][:num_over] if num_over else []
        is_full = len(entries) > self._max_namespaces
        for namespace in sorted(entries, key=lambda each: each.policy.is_durable) if is_full else ():
            if len(entries) - len(unused) <= self._max_namespaces:
                break
            if namespace.name != self.namespace and not namespace.is_leased and namespace not in unused:
                unused.append(namespace)
        caches = []
        for namespace in unused:
            del self._namespaces[namespace.name]
            if namespace.cache is not None:
                self._closing[namespace.name] = threading.Event()
                caches.append(namespace.cache)
        return caches

    def _close_one(self, cache: NamespaceCache) -> None:
        try:
            if self._on_close is not None:
                self._on_close(cache)
            cache.close()
            log.debug("closed namespace=%s: it was the least recently used", cache.name)
        finally:
            self._is_closed(cache.name)

    def _is_closed(self, name: str) -> None:
        with self._lock:
            self._closing.pop(name).set()

    def _open_leased(self, namespace: NamespaceEntry) -> None:
        try:
            cache = namespace.opened()
            if self._stopping:  # ``close`` does not wait for it
                cache.close()
        except _Discarded:
            pass
        except BaseException as error:
            if self._inline:
                reraise_exits(error)
            self._record_failed_opening(namespace.name, error)
        finally:
            namespace.is_opening = False

    def _record_failed_opening(self, name: str, error: BaseException) -> None:
        self.num_failed_openings += 1
        kind = f"{name[:80]} {type(error).__name__}"
        if kind not in self._logged:
            self._logged.add(kind)
            log.error(
                "namespace=%.80s was not opened (logged once): %s. Its requests get no drafts from its cache",
                name,
                error,
            )

    def _run(self) -> None:
        interval_s = self.config.index.rebuild_interval_s
        flushed_at = time.monotonic()
        while not self._stopping:
            self._wake.wait(interval_s)
            self._wake.clear()
            is_due = time.monotonic() - flushed_at >= interval_s
            if is_due:
                flushed_at = time.monotonic()
            for cache in self._open_caches():
                if self._stopping:
                    return
                try:
                    cache.maintain(flush_all=is_due, wait=False)
                except Exception as error:  # the thread must survive the failure of one namespace
                    cache.report_failure("maintenance failed", error)
            self._attach_shared_to_all()
