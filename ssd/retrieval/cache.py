"""All namespaces of a server: opened on first use, maintained by one thread and one rebuild process."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from ssd.config import CacheConfig
from ssd.errors import CacheError, StoreUnavailable
from ssd.retrieval.directory import DirectoryReader, SegmentDirectory
from ssd.retrieval.file_bytes import CopyBudget
from ssd.retrieval.merge_worker import MergeWorker
from ssd.retrieval.names import check_fingerprint, check_namespace
from ssd.retrieval.scratch import make_scratch
from ssd.retrieval.suffix_cache import CacheStats, SuffixCache

__all__ = ["DEFAULT_NAMESPACE", "CacheSet", "CacheStats", "SuffixCache"]

log = logging.getLogger(__name__)

DEFAULT_NAMESPACE = "default"

_BYTES_PER_TOKEN = 8  # token and suffix
_SCRATCH_COPIES = 2  # while segments are merged, both they and the result are there
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class CacheSet:
    """The caches of one tokenizer by namespace.

    Nothing crosses from one namespace to another. With ``config.directory`` each namespace has a directory of its own
    below it and is found again after a restart: all that was sealed, and the tail as well after ``close``. Without,
    segments lie in a private directory, in memory where the machine has such a file system, that goes away with the
    process.
    """

    def __init__(
        self,
        config: CacheConfig,
        fingerprint: str,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        inline: bool = False,
        max_namespaces: int = 256,
        on_open: Callable[[SuffixCache], None] | None = None,
    ) -> None:
        """Opens ``namespace``, so that what is wrong with the directory is known at once; no other is opened unasked.

        ``fingerprint`` : the tokenizer's, 32 hexadecimal characters. ``inline`` : no thread and no process; the owner
        calls ``maintain`` and gets the same result every time. ``max_namespaces`` : beyond it the one not used for
        longest is closed, never ``namespace``; what it learned is lost if it has no directory. ``on_open`` : called
        with every cache before its first use.

        Raises ConfigError, CacheLocked, SegmentCorrupt, FormatVersion, TokenizerMismatch, NamespaceMismatch, and
        StoreUnavailable for a directory that can neither be written nor read.
        """
        self.config = config
        self.namespace = check_namespace(namespace)
        self._budget = CopyBudget(config.memory_bytes)
        self.fingerprint = check_fingerprint(fingerprint)
        self._max_namespaces = max(1, max_namespaces)
        self._on_open = on_open
        self._caches: OrderedDict[str, SuffixCache] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._stopping = False
        self._inline = inline

        self._root = config.directory
        self._scratch = None
        if self._root is None and not inline:
            self._scratch = make_scratch(config.index.capacity_tokens * _BYTES_PER_TOKEN * _SCRATCH_COPIES)
            self._root = None if self._scratch is None else self._scratch[0]
        self._worker = None
        if not inline and self._root is not None:
            self._worker = MergeWorker(None if self._scratch is None else self._scratch[0])
        try:
            self._caches[namespace] = self._announced(self._open(namespace))
        except BaseException:
            self._remove_scratch()
            raise
        self._thread: threading.Thread | None = None
        if not inline:
            if self._scratch is not None and self._worker is not None:
                self._worker.start()
            self._thread = threading.Thread(target=self._run, name="ssd-cache", daemon=True)
            self._thread.start()

    def get(self, name: str | None = None) -> SuffixCache:
        """The cache of a namespace, None for the first one. Opened on first use (then files are read). From any thread.

        A directory that cannot be used is one failure of its cache, which then stays in memory. Raises ConfigError for
        a name that cannot be one.
        """
        name = self.namespace if name is None else name
        with self._lock:
            cache = self._caches.get(name)
            if cache is None:
                cache = self._caches[name] = self._announced(self._open_or_begin(check_namespace(name)))
                self._close_least_used()
            self._caches.move_to_end(name)
            return cache

    def names(self) -> list[str]:
        """The open namespaces."""
        with self._lock:
            return sorted(self._caches)

    def stats(self) -> dict[str, CacheStats]:
        """Sizes and counters of every open namespace."""
        with self._lock:
            caches = list(self._caches.values())
        return {cache.name: cache.stats() for cache in caches}

    @property
    def num_worker_restarts(self) -> int:
        """How often the rebuild process had to be started again."""
        return 0 if self._worker is None else self._worker.num_restarts

    def maintain(self) -> None:
        """Seal and merge what is due in every namespace, now, on this thread. For ``inline`` sets."""
        for cache in self._open_caches():
            cache.maintain()

    def flush(self) -> None:
        """Seal every tail and wait until nothing is left to merge."""
        for cache in self._open_caches():
            cache.flush()

    def close(self) -> None:
        """Seal and keep everything, stop thread and process. May be called twice."""
        with self._lock:
            self._stopping = True
        self._wake.set()
        for cache in self._open_caches():
            cache.begin_close()
        if self._thread is not None:
            self._thread.join()
        if self._worker is not None:
            self._worker.close()  # before the directories are let go: it may be writing into one
        for cache in self._open_caches():
            cache.close()
        self._remove_scratch()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_caches(self) -> list[SuffixCache]:
        with self._lock:
            return list(self._caches.values())

    def _announced(self, cache: SuffixCache) -> SuffixCache:
        if self._on_open is not None:
            self._on_open(cache)
        return cache

    def _open_or_begin(self, name: str) -> SuffixCache:
        """While it serves, a directory that cannot be used costs only what would be kept there."""
        try:
            return self._open(name)
        except CacheError as error:
            cache = self._make(name, None)
            cache.report_failure("its directory cannot be used, it stays in memory", error)
            return cache

    def _open(self, name: str) -> SuffixCache:
        """Raises CacheError."""
        if self._root is None:
            return self._make(name, None)
        path, is_durable = self._root / name, self._scratch is None
        whose: dict[str, Any] = {"fingerprint": self.fingerprint, "namespace": name, "budget": self._budget}
        try:
            try:
                return self._make(name, SegmentDirectory(path, durable=is_durable, **whose))
            except OSError as error:
                if error.errno not in _NOT_WRITABLE or not path.is_dir():
                    raise
                cache = self._make(name, DirectoryReader(path, **whose))
                cache.report_failure(
                    "its directory cannot be written: what it holds is searched, what is learned stays in memory", error
                )
                return cache
        except OSError as error:
            raise StoreUnavailable(
                f"the cache directory {path} cannot be used: {error}. Give one that can be written, or at least read"
            ) from error

    def _make(self, name: str, directory: DirectoryReader | None) -> SuffixCache:
        return SuffixCache(
            name,
            self.config.index,
            fingerprint=self.fingerprint,
            directory=directory,
            budget=self._budget,
            worker=self._worker,
            wake=None if self._inline else self._wake.set,
        )

    def _close_least_used(self) -> None:
        if len(self._caches) <= self._max_namespaces:
            return
        name = next(name for name in self._caches if name != self.namespace)
        cache = self._caches.pop(name)
        cache.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch[0] / name, ignore_errors=True)
        log.info("closed namespace=%s: more than %d are in use", name, self._max_namespaces)

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

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            path, lock = self._scratch
            shutil.rmtree(path, ignore_errors=True)
            lock.close()
