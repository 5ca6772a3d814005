"""A namespace of the cache manager: opening, leases and deletion."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from weakref import WeakSet

from ssd.retrieval.files import Owner
from ssd.retrieval.namespace_cache import NamespaceCache
from ssd.retrieval.segment import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacePolicy:
    """The settings of a namespace. If its requests have different settings, those of the last request apply.

    Attributes:
        capacity_tokens: The maximum number of stored tokens; None for the configured number. Applies when the namespace
            is opened.
        reads_shared: Whether drafts may also come from the segments of the default namespace.
        is_durable: Whether the namespace has a directory, if the manager has one, and is replicated. Otherwise all its
            text stays in this process's memory.
        owner: The owner of the text, for the manifest.
        group: The group of the namespace. At most ``max_in_group`` namespaces of a group are open. To open another one,
            the least recently used one is closed. If requests lease all of them, the request gets no namespace.
    """

    capacity_tokens: int | None = None
    reads_shared: bool = False
    is_durable: bool = True
    owner: Owner | None = None
    group: str | None = None
    max_in_group: int = 8


DEFAULT_POLICY = NamespacePolicy()


_MAX_WAITING_TOKENS: Final = 1 << 18


class NamespaceEntry:
    """One namespace of the cache manager: its settings, its state and, once its files are read, its cache. Thread-safe.

    Only ``opened`` and ``discard`` wait for files.

    Attributes:
        policy: The settings that apply now.
        cache: The cache; None until it is open.
        is_opening: Whether a thread of the manager is opening the cache. Only the manager changes it.
    """

    def __init__(
        self,
        name: str,
        open_cache: Callable[[NamespaceEntry], NamespaceCache],
        policy: NamespacePolicy = DEFAULT_POLICY,
    ) -> None:
        self.name = name
        self.policy = policy
        self.cache: NamespaceCache | None = None
        self.is_opening = False
        self._open_cache = open_cache
        self._opening = threading.Lock()  # locked while files are read
        self._lock = threading.Lock()
        self._waiting: list[tuple[Tokens, int]] = []
        self._num_waiting_tokens = self._num_lost_tokens = 0
        self._is_discarded = False
        self._leases: WeakSet[NamespaceLease] = WeakSet()

    def opened(self) -> NamespaceCache:
        """Return the namespace's cache; the first call opens it and raises the errors of opening."""
        if self.cache is not None:
            return self.cache
        with self._opening:
            if self.cache is None:
                cache = self._open_cache(self)
                with self._lock:
                    for tokens, prompt_length in self._waiting:
                        cache.append(tokens, prompt_length=prompt_length)
                    if self._num_lost_tokens:
                        error = TimeoutError(
                            f"{self._num_lost_tokens} tokens did not fit into the buffer that holds text "
                            "until the cache is open"
                        )
                        cache.report_failure("some text that arrived while the cache was opened was not stored", error)
                    self._waiting.clear()
                    self.cache = cache
                if self._is_discarded:
                    cache.discard()
            return self.cache

    def append(self, tokens: Tokens, *, prompt_length: int) -> None:
        """Store a finished sequence, int32[n], or keep it until the cache is open. Never waits for files."""
        with self._lock:
            if self._is_discarded:
                return
            if self.cache is None:
                if self._num_waiting_tokens + len(tokens) > _MAX_WAITING_TOKENS:
                    self._num_lost_tokens += len(tokens)
                    return
                self._num_waiting_tokens += len(tokens)
                self._waiting.append((tokens, prompt_length))
                return
        self.cache.append(tokens, prompt_length=prompt_length)

    def discard(self) -> None:
        """Delete all text of the namespace, also for requests that lease it, and ignore later appends.

        Waits while files are read.
        """
        with self._lock:
            self._is_discarded = True
            self._waiting.clear()
        with self._opening:
            if self.cache is not None:
                self.cache.discard()

    def lease(self) -> NamespaceLease:
        lease = NamespaceLease(self)
        with self._lock:
            self._leases.add(lease)
        return lease

    @property
    def is_leased(self) -> bool:
        """Whether a request leases the namespace, or its cache is being opened, so that it must not be closed."""
        with self._lock:
            return self.is_opening or len(self._leases) > 0


class NamespaceLease:
    """A request's reference to its namespace. As long as a lease exists, the namespace is not closed to make room."""

    __slots__ = ("__weakref__", "_namespace")

    def __init__(self, namespace: NamespaceEntry) -> None:
        self._namespace = namespace

    @property
    def cache(self) -> NamespaceCache | None:
        """The namespace's cache; None while the cache's files are read, or if they cannot be read."""
        return self._namespace.cache

    def append(self, tokens: Tokens, *, prompt_length: int) -> None:
        """Store a finished sequence, int32[n], in the namespace's cache, now or as soon as the cache is open."""
        self._namespace.append(tokens, prompt_length=prompt_length)
