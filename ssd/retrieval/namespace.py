"""One namespace of a cache set while it is opened, used and closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from weakref import WeakSet

from ssd.retrieval.files import Owner
from ssd.retrieval.segment import Tokens
from ssd.retrieval.suffix_cache import SuffixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceTerms:
    """The same for all requests of a namespace; what the last of them said counts.

    ``capacity_tokens`` : most tokens kept, None for the configured number; of effect when the namespace is opened.
    ``reads_shared`` : drafts come from what the set's first namespace has sealed as well.
    ``is_kept`` : it has a directory, where the set has one, and is shared with other replicas; without, all stays in
        this process' memory.
    ``owner`` : whose it is, for the manifest.
    ``group`` : of the namespaces of one group at most ``most_in_group`` are open: the one used longest ago is closed
        for another; where requests hold them all, there is none for the next.
    """

    capacity_tokens: int | None = None
    reads_shared: bool = False
    is_kept: bool = True
    owner: Owner | None = None
    group: str | None = None
    most_in_group: int = 8


DEFAULT_TERMS = NamespaceTerms()


_MOST_WAITING_TOKENS: Final = 1 << 18


class Namespace:
    """A name and, once its files were read, its cache. Safe from any thread; only ``opened`` ever waits.

    ``cache`` : None until it is open. ``is_opening`` : a thread of the set's is at it; the set's to change.
    """

    def __init__(
        self, name: str, open_cache: Callable[[Namespace], SuffixCache], terms: NamespaceTerms = DEFAULT_TERMS
    ) -> None:
        """``open_cache`` : makes the cache of a namespace; reads files. ``terms`` : those that count now."""
        self.name = name
        self.terms = terms
        self.cache: SuffixCache | None = None
        self.is_opening = False
        self._open_cache = open_cache
        self._opening = threading.Lock()  # held while files are read
        self._lock = threading.Lock()
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
                cache = self._open_cache(self)
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
            return self.is_opening or len(self._holders) > 0


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
