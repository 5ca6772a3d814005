"""Reuse of the KV cache of common prefixes across requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from ssd.engine.metrics import FaultLog
from ssd.engine.request import Request
from ssd.engine.sequence import Sequence
from ssd.errors import reraise_exits
from ssd.model.target import Target

TokenIds = npt.NDArray[np.int32]
Scope = tuple[str | None, str | None, str | None, str | None]

_MIN_COPIED_TOKENS = 16
"""Shorter prefixes are computed, unless copying saves a whole pass.

A copy takes two operations per layer, while a few more positions hardly slow down a pass.
"""

_FIRST_COMPARED = 64
"""The number of tokens that are compared first; the number doubles each time."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """The prefix whose KV cache a free slot holds.

    Attributes:
        scope: The scope of the request for which it was computed, see `reuse_scope`.
        tokens: The tokens, int32[n], at least one.
    """

    scope: Scope
    tokens: TokenIds


def reuse_scope(request: Request) -> Scope | None:
    """Return the scope in which the KV cache of a request may be reused; None disables reuse.

    Reuse does not change outputs, but it changes the time to the first token and ``cached_tokens``. A client could use
    that to find out whether a text was sent before (arXiv 2502.07776, section 3), and thus to read it token by token.
    So nothing is reused across namespaces and tenants, and within them not across different salts, as with vLLM's
    ``cache_salt``. The KV cache of an adapter differs from that of the model. A request with neither namespace nor salt
    asks that nothing of it is kept.
    """
    if request.namespace is None and request.cache_salt is None:
        return None
    if request.prefix_scope is not None:
        return request.prefix_scope, request.cache_salt, None, request.adapter
    return request.namespace, request.cache_salt, request.tenant, request.adapter


def common_prefix_length(one: TokenIds, other: TokenIds) -> int:
    """Return the length of the common prefix of two texts, int32[n] and int32[m]. O(length of the prefix)."""
    end, size = min(len(one), len(other)), _FIRST_COMPARED
    start = 0
    while start < end:
        stop = min(end, start + size)
        differs = np.flatnonzero(one[start:stop] != other[start:stop])
        if len(differs):
            return start + int(differs[0])
        start, size = stop, 2 * size
    return end


class PrefixCache:
    """Assigns slots to sequences so that as much of their KV cache as possible is reused.

    A freed slot keeps its KV cache until another sequence gets the slot: one that continues the same text, or any other
    when no slot is empty; then the least recently used one is evicted. A prefix in another slot, running or free, is
    copied. The KV cache of a position is a function of the tokens up to it, so reuse does not change the output, except
    for the rounding of passes of a different width, as with any chunked prefill.

    Nothing is cached if it is disabled, if the model keeps running states or has no KV cache, and for requests without
    a scope. Owned by the thread that steps the engine.
    """

    def __init__(self, target: Target, *, enabled: bool = True) -> None:
        self._target = target
        self._enabled = enabled and target.can_copy_prefixes
        self._cached: dict[int, CachedPrefix] = {}
        self._clock = count(1)
        self._used_at = [0] * target.num_slots
        self._faults = FaultLog()

    def can_reuse(self, sequence: Sequence) -> bool:
        """Return whether a sequence may reuse cached prefixes; with prompt log-probabilities it may not."""
        is_allowed = sequence.allow_prefix_copy and not sequence.needs_prompt_logprobs
        return self._enabled and is_allowed and reuse_scope(sequence.request) is not None

    def cached_prefix(self, slot: int) -> CachedPrefix | None:
        """Return the prefix that a free slot holds, or None."""
        return self._cached.get(slot)

    def drop_overwritten(self) -> None:
        """Drop the prefixes that another engine on the same target has overwritten. O(cached tokens)."""
        for slot in range(self._target.num_slots):
            cached = self._cached.get(slot)
            if cached is None or not np.array_equal(self._target.cached_tokens(slot), cached.tokens):
                self.clear_slot(slot)

    def assign_slot(self, sequence: Sequence, free_slots: Iterable[int], running: Iterable[Sequence]) -> None:
        """Assign the best free slot to a sequence, and fill it with what is cached of its context.

        The best slot is the one with the longest common prefix, unless most of its cached prefix would be lost. Then
        the common prefix is copied to the least recently used slot. O(slots + common tokens).

        Args:
            sequence: The sequence.
            free_slots: The free slots.
            running: The running sequences, whose slots may be copied from.
        """
        oldest = min(free_slots, key=lambda slot: (self._used_at[slot], slot))
        donor, shared = self._find_longest_prefix(sequence, running)
        cached = None if donor is None else self._cached.get(donor)
        if donor is not None and cached is not None and (donor == oldest or 2 * shared >= len(cached.tokens)):
            del self._cached[donor]
            self._target.rollback(donor, shared)
            sequence.slot = donor
            self._count_hit(sequence, shared)
        else:
            self.clear_slot(oldest)
            sequence.slot = oldest
            self._target.adapters[oldest] = sequence.request.adapter
            self._copy_prefix(donor, sequence, shared)

    def copy_cached_prefix(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """Copy the part of a sequence's context that another slot has computed in the meantime."""
        donor, shared = self._find_longest_prefix(sequence, running)
        self._copy_prefix(donor, sequence, shared)

    def retain(self, sequence: Sequence) -> None:
        """Record the content of the slot that a sequence is about to leave, without rejected draft tokens."""
        slot, scope = sequence.slot, reuse_scope(sequence.request)
        length = min(self._target.length(slot), sequence.num_tokens - 1)
        self._used_at[slot] = next(self._clock)
        if not self._enabled or scope is None or length == 0:
            self.clear_slot(slot)
            return
        self._target.rollback(slot, length)
        self._cached[slot] = CachedPrefix(scope, sequence.context[:length].copy())

    def clear_slot(self, slot: int) -> None:
        """Clear a free slot; cleared slots are assigned first."""
        self._target.rollback(slot, 0)
        self._cached.pop(slot, None)
        self._used_at[slot] = 0

    def clear_all(self) -> None:
        """Clear all slots; allowed only while all are free."""
        for slot in range(self._target.num_slots):
            self.clear_slot(slot)

    def _find_longest_prefix(self, sequence: Sequence, running: Iterable[Sequence]) -> tuple[int | None, int]:
        """Return the other slot with the longest common prefix, and its length; free slots win ties."""
        best: tuple[int | None, int] = (None, 0)
        if self.can_reuse(sequence):
            context, scope = sequence.context[:-1], reuse_scope(sequence.request)
            for slot, cached_scope, tokens in self._cached_tokens(running):
                if cached_scope == scope and slot != sequence.slot and len(tokens) > best[1]:
                    shared = common_prefix_length(context, tokens)
                    best = (slot, shared) if shared > best[1] else best
        return best

    def _cached_tokens(self, running: Iterable[Sequence]) -> Iterator[tuple[int, Scope | None, TokenIds]]:
        for slot, cached in self._cached.items():
            yield slot, cached.scope, cached.tokens
        for other in running:
            yield other.slot, reuse_scope(other.request), other.context[: self._target.length(other.slot)]

    def _copy_prefix(self, donor: int | None, sequence: Sequence, shared: int) -> None:
        num_cached = self._target.length(sequence.slot)
        num_saved = shared - num_cached
        if donor is not None and (
            num_saved >= _MIN_COPIED_TOKENS or 0 < num_saved == sequence.num_tokens - 1 - num_cached
        ):
            try:
                self._target.copy_prefix(donor, sequence.slot, shared)
            except BaseException as error:
                reraise_exits(error)
                self._faults.record("copying a cached prefix", error, "it is computed instead")
                self._target.rollback(sequence.slot, 0)  # some layers may have been copied
                sequence.allow_prefix_copy, sequence.stats.num_cached_tokens = False, 0
                return
            if donor in self._cached:
                self._used_at[donor] = next(self._clock)
            self._count_hit(sequence, num_saved)

    @staticmethod
    def _count_hit(sequence: Sequence, num_tokens: int) -> None:
        # If a sequence was preempted or its pass failed, it finds its own KV cache again, which is not a hit.
        if not sequence.num_preemptions and not sequence.needs_solo_retry:
            sequence.stats.num_cached_tokens += num_tokens
