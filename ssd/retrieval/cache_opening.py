"""How the cache of a namespace is opened: from its directory, written or only read, or in memory."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ssd.config import IndexConfig
from ssd.errors import CacheError, StoreUnavailable
from ssd.retrieval.directory import DirectoryReader, SegmentDirectory
from ssd.retrieval.file_bytes import CopyBudget
from ssd.retrieval.merge_worker import MergeWorker
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.retrieval.terms import DEFAULT_TERMS, NamespaceTerms

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
