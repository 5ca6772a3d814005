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

A copy takes more time than a few more tokens in a forward pass. A shorter prefix is copied only if nothing else must be
computed, because the copy then saves a whole pass.
"""

_FIRST_COMPARED = 64  # doubled until the texts differ


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """A token sequence whose KV cache is still stored in a free slot, so that later requests can reuse it."""

    scope: Scope  # the result of `reuse_scope` for the request that computed the prefix
    tokens: TokenIds  # int32[n], at least one


def reuse_scope(request: Request) -> Scope | None:
    """Return the key that two requests must share for one to reuse the KV cache of the other; None forbids reuse.

    Reuse changes no output, but a client notices it, by a shorter time to the first token and in ``cached_tokens``. A
    client could thus guess, token by token, a text that another client has sent (arXiv 2502.07776, section 3). So only
    requests with the same namespace, tenant and ``cache_salt`` (as in vLLM) share their KV cache; ``prefix_scope``, if
    given, takes the place of namespace and tenant. The LoRA adapter is part of the key, because its KV cache differs
    from the model's. The KV cache of a request with neither namespace nor salt is never reused.
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
    """Automatic prefix caching: gives each sequence a slot such that as much of the KV cache as possible is reused.

    The KV cache stays in a slot after its sequence has ended. A later sequence that begins with the same tokens may
    continue it there. It is lost when another sequence gets the slot because this is the least recently used one. If
    another slot, in use or free, holds a prefix of a new sequence, the prefix is copied. As with any chunked prefill,
    forward passes of another size round differently; otherwise outputs do not change.

    Nothing is cached if prefix caching is disabled, if the model cannot copy prefixes (it has no KV cache, or it keeps
    recurrent states), or if `reuse_scope` forbids it. Used only by the thread that steps the engine.
    """

    def __init__(self, target: Target, *, enabled: bool = True) -> None:
        self._target = target
        self._enabled = enabled and target.can_copy_prefixes
        self._cached: dict[int, CachedPrefix] = {}
        self._clock = count(1)
        self._used_at = [0] * target.num_slots
        self._faults = FaultLog()

    def can_reuse(self, sequence: Sequence) -> bool:
        """Return whether a sequence may reuse cached prefixes.

        It may not if prompt log-probabilities are requested, which need a forward pass over the whole prompt, if a copy
        failed before, or if `reuse_scope` forbids it.
        """
        is_allowed = sequence.allow_prefix_copy and not sequence.needs_prompt_logprobs
        return self._enabled and is_allowed and reuse_scope(sequence.request) is not None

    def cached_prefix(self, slot: int) -> CachedPrefix | None:
        return self._cached.get(slot)

    def drop_overwritten(self) -> None:
        """Clear each slot whose tokens differ from the prefix that this cache recorded for the slot. O(cached tokens).

        Another engine with the same model may have overwritten the slot.
        """
        for slot in range(self._target.num_slots):
            cached = self._cached.get(slot)
            if cached is None or not np.array_equal(self._target.cached_tokens(slot), cached.tokens):
                self.clear_slot(slot)

    def assign_slot(self, sequence: Sequence, free_slots: Iterable[int], running: Iterable[Sequence]) -> None:
        """Assign a free slot to a sequence, and reuse the KV cache of its longest prefix that any slot holds.

        If a free slot holds this prefix, the sequence gets that slot and continues its KV cache. But if more than half
        of the tokens cached there would be lost, the sequence gets the least recently used slot, and the prefix is
        copied. A prefix in the slot of a running sequence is also copied. O(slots + common tokens).
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
        """Find the longest prefix of a sequence that any other slot holds now, and copy the KV cache of this prefix.

        Other sequences may have computed the prefix since this sequence was given its slot.
        """
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
