"""Keys and values that are there already: what slots keep, who may use it, and copying it from slot to slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from ssd.engine.faults import Faults
from ssd.engine.request import Request
from ssd.engine.sequence import Sequence
from ssd.errors import require_fault
from ssd.model.target import Target

TokenIds = npt.NDArray[np.int32]
Scope = tuple[str | None, str | None, str | None, str | None]

_LEAST_COPIED = 16
"""Shorter pieces are computed unless that saves a pass: a copy costs two operations a layer, a wider pass little."""
_COMPARED = 64
"""Tokens compared first; then twice as many each time."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptText:
    """What a free slot holds: ``tokens``, int32[n] of length >= 1, computed for a request of ``scope``."""

    scope: Scope
    tokens: TokenIds


def scope_of(request: Request) -> Scope | None:
    """Who shares keys and values with a request: namespace, salt, tenant and adapter together; None shares with nobody.

    Reuse never shows in the output, but it shows in the time to the first token (and in ``cached_tokens``), so that a
    client could find out whether a text was asked before (arXiv 2502.07776, section 3), and read it token by token.
    Namespaces and tenants therefore never share; inside one, requests with different salts do not, as with vLLM's
    ``cache_salt``. An adapter's are other numbers. A request with neither namespace nor salt asked to leave no trace.
    """
    if request.namespace is None and request.cache_salt is None:
        return None
    if request.prefix_scope is not None:
        return request.prefix_scope, request.cache_salt, None, request.adapter
    return request.namespace, request.cache_salt, request.tenant, request.adapter


def shared_length(one: TokenIds, other: TokenIds) -> int:
    """Length of the common prefix of two texts, int32[n] and int32[m]. O(shared)."""
    end, size = min(len(one), len(other)), _COMPARED
    start = 0
    while start < end:
        stop = min(end, start + size)
        differs = np.flatnonzero(one[start:stop] != other[start:stop])
        if len(differs):
            return start + int(differs[0])
        start, size = stop, 2 * size
    return end


class PrefixReuse:
    """Places sequences in slots so that little of their context has to be computed.

    A freed slot keeps its text until another sequence takes the slot: the one that goes on with this text, or, when no
    slot is empty, any other; then the one used longest ago goes first. A prefix that another slot holds, running or
    free, is copied. The keys and values of a position are a function of the tokens up to it, so the output stays what
    it is without reuse (a pass of another width may round them differently, as with any chunk of a prompt).

    ``enabled`` False, a model that keeps running states or no cache, and a request without a scope: nothing is kept or
    copied. Owned by the thread that steps the engine.
    """

    def __init__(self, target: Target, *, enabled: bool = True) -> None:
        self._target = target
        self._enabled = enabled and target.can_keep_prefixes
        self._kept: dict[int, KeptText] = {}
        self._clock = count(1)
        self._used_at = [0] * target.num_slots
        self._faults = Faults()

    def serves(self, sequence: Sequence) -> bool:
        """True where the sequence may use what was computed for others; one whose prompt is scored computes it all."""
        is_allowed = sequence.may_copy and not sequence.scores_prompt
        return self._enabled and is_allowed and scope_of(sequence.request) is not None

    def kept_text(self, slot: int) -> KeptText | None:
        """What a free slot keeps."""
        return self._kept.get(slot)

    def reclaim(self) -> None:
        """Forget what others have overwritten: engines may take turns on one target while nothing runs. O(kept)."""
        for slot in range(self._target.num_slots):
            kept = self._kept.get(slot)
            if kept is None or not np.array_equal(self._target.fed_tokens(slot), kept.tokens):
                self.forget(slot)

    def place(self, sequence: Sequence, free_slots: Iterable[int], running: Iterable[Sequence]) -> None:
        """Give ``sequence`` the best of ``free_slots``, filled with what of its context is there already.

        That is the slot that keeps most of it, unless most of what the slot keeps would be lost: then the prefix is
        copied into the slot used longest ago, the lowest of several. O(slots + shared tokens).
        """
        oldest = min(free_slots, key=lambda slot: (self._used_at[slot], slot))
        donor, shared = self._longest(sequence, running)
        kept = None if donor is None else self._kept.get(donor)
        if donor is not None and kept is not None and (donor == oldest or 2 * shared >= len(kept.tokens)):
            del self._kept[donor]
            self._target.rollback(donor, shared)
            sequence.slot = donor
            self._count(sequence, shared)
        else:
            self.forget(oldest)
            sequence.slot = oldest
            self._target.adapters[oldest] = sequence.request.adapter
            self._copy(donor, sequence, shared)

    def catch_up(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """Copy what another slot has meanwhile computed of a sequence's context."""
        donor, shared = self._longest(sequence, running)
        self._copy(donor, sequence, shared)

    def keep(self, sequence: Sequence) -> None:
        """Note what the slot of a sequence holds, which is about to leave it; drafts that were wrong are taken back."""
        slot, scope = sequence.slot, scope_of(sequence.request)
        length = min(self._target.length(slot), sequence.num_tokens - 1)
        self._used_at[slot] = next(self._clock)
        if not self._enabled or scope is None or length == 0:
            self.forget(slot)
            return
        self._target.rollback(slot, length)
        self._kept[slot] = KeptText(scope, sequence.context[:length].copy())

    def forget(self, slot: int) -> None:
        """Empty a free slot; it is the first to be taken."""
        self._target.rollback(slot, 0)
        self._kept.pop(slot, None)
        self._used_at[slot] = 0

    def forget_all(self) -> None:
        """Empty every slot, while none is taken."""
        for slot in range(self._target.num_slots):
            self.forget(slot)

    def _longest(self, sequence: Sequence, running: Iterable[Sequence]) -> tuple[int | None, int]:
        """The other slot that holds most of a sequence's context, and how much; one that can be had in place first."""
        best: tuple[int | None, int] = (None, 0)
        if self.serves(sequence):
            wanted, scope = sequence.context[:-1], scope_of(sequence.request)
            for slot, held_scope, tokens in self._held(running):
                if held_scope == scope and slot != sequence.slot and len(tokens) > best[1]:
                    shared = shared_length(wanted, tokens)
                    best = (slot, shared) if shared > best[1] else best
        return best

    def _held(self, running: Iterable[Sequence]) -> Iterator[tuple[int, Scope | None, TokenIds]]:
        for slot, kept in self._kept.items():
            yield slot, kept.scope, kept.tokens
        for other in running:
            yield other.slot, scope_of(other.request), other.context[: self._target.length(other.slot)]

    def _copy(self, donor: int | None, sequence: Sequence, shared: int) -> None:
        held = self._target.length(sequence.slot)
        spared = shared - held
        if donor is not None and (spared >= _LEAST_COPIED or 0 < spared == sequence.num_tokens - 1 - held):
            try:
                self._target.copy_prefix(donor, sequence.slot, shared)
            except BaseException as error:
                require_fault(error)
                self._faults.note("copying keys and values", error, "they are computed instead")
                self._target.rollback(sequence.slot, 0)  # what was copied of some layers is not known
                sequence.may_copy = False
                return
            if donor in self._kept:
                self._used_at[donor] = next(self._clock)
            self._count(sequence, spared)

    @staticmethod
    def _count(sequence: Sequence, num_tokens: int) -> None:
        # A sequence that was preempted comes back to what it computed itself: that is no hit.
        if not sequence.num_preemptions:
            sequence.stats.num_cached_tokens += num_tokens
