"""Automatic prefix caching: the KV cache of common prefixes is reused across requests."""

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
"""The minimum length of a prefix whose KV cache is copied from another slot; shorter prefixes are computed again.

A copy takes two operations per layer, while a few more positions hardly slow down a forward pass. A shorter prefix is
copied only if that saves a whole pass.
"""

_FIRST_COMPARED = 64  # doubled until the texts differ


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """The token prefix whose KV cache is still stored in a free slot."""

    scope: Scope  # the result of `reuse_scope` for the request that computed the prefix
    tokens: TokenIds  # int32[n], at least one


def reuse_scope(request: Request) -> Scope | None:
    """Return the key that two requests must share for one to reuse the KV cache of the other; None forbids reuse.

    Reuse changes no output, but it is visible in the time to the first token and in ``cached_tokens``. A client could
    thus find out whether a text was sent before, token by token (arXiv 2502.07776, section 3). So the key consists of
    namespace, tenant, ``cache_salt`` (as in vLLM) and LoRA adapter, whose KV cache differs from the model's. The KV
    cache of a request with neither namespace nor salt is never reused.
    """
    if request.namespace is None and request.cache_salt is None:
        return None
    if request.prefix_scope is not None:
        return request.prefix_scope, request.cache_salt, None, request.adapter
    return request.namespace, request.cache_salt, request.tenant, request.adapter


def common_prefix_length(one: TokenIds, other: TokenIds) -> int:
    """Return the number of equal tokens at the beginning of two token sequences. O(result)."""
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
    """Assigns slots to sequences such that as much of the KV cache as possible is reused.

    A freed slot keeps its KV cache until a sequence with the same beginning gets the slot, or until it is the least
    recently used one and another sequence needs a slot. A prefix in another slot, running or free, is copied. Outputs
    do not change, except for the rounding of forward passes of another width, as with any chunked prefill.

    Nothing is cached if prefix caching is disabled, or the model keeps running states or has no KV cache, or
    `reuse_scope` forbids it. Used only by the thread that steps the engine.
    """

    def __init__(self, target: Target, *, enabled: bool = True) -> None:
        self._target = target
        self._enabled = enabled and target.can_copy_prefixes
        self._cached: dict[int, CachedPrefix] = {}
        self._clock = count(1)
        self._used_at = [0] * target.num_slots
        self._faults = FaultLog()

    def can_reuse(self, sequence: Sequence) -> bool:
        """Return whether a sequence may reuse cached prefixes; False if prompt log-probabilities are requested."""
        is_allowed = sequence.allow_prefix_copy and not sequence.needs_prompt_logprobs
        return self._enabled and is_allowed and reuse_scope(sequence.request) is not None

    def cached_prefix(self, slot: int) -> CachedPrefix | None:
        return self._cached.get(slot)

    def drop_overwritten(self) -> None:
        """Drop cached prefixes in slots that another engine with the same model has overwritten. O(cached tokens)."""
        for slot in range(self._target.num_slots):
            cached = self._cached.get(slot)
            if cached is None or not np.array_equal(self._target.cached_tokens(slot), cached.tokens):
                self.clear_slot(slot)

    def assign_slot(self, sequence: Sequence, free_slots: Iterable[int], running: Iterable[Sequence]) -> None:
        """Assign a free slot to a sequence, and reuse the longest KV cache prefix that it has in common with any slot.

        The sequence gets the free slot with the longest common prefix. If most of the prefix cached there would be
        lost, the common part is copied to the least recently used slot instead. O(slots + common tokens).
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
        """Copy the KV cache of a prompt's prefix that another slot has computed since the sequence was admitted."""
        donor, shared = self._find_longest_prefix(sequence, running)
        self._copy_prefix(donor, sequence, shared)

    def retain(self, sequence: Sequence) -> None:
        """Keep the KV cache of a sequence that is about to free its slot, for later requests with the same prefix."""
        slot, scope = sequence.slot, reuse_scope(sequence.request)
        length = min(self._target.length(slot), sequence.num_tokens - 1)
        self._used_at[slot] = next(self._clock)
        if not self._enabled or scope is None or length == 0:
            self.clear_slot(slot)
            return
        self._target.rollback(slot, length)
        self._cached[slot] = CachedPrefix(scope, sequence.context[:length].copy())

    def clear_slot(self, slot: int) -> None:
        """Clear the KV cache of a free slot. Cleared slots are assigned before other free slots."""
        self._target.rollback(slot, 0)
        self._cached.pop(slot, None)
        self._used_at[slot] = 0

    def clear_all(self) -> None:
        for slot in range(self._target.num_slots):
            self.clear_slot(slot)

    def _find_longest_prefix(self, sequence: Sequence, running: Iterable[Sequence]) -> tuple[int | None, int]:
        """Return the other slot with the longest prefix in common with a sequence, and the prefix's length."""
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
