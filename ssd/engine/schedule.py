"""Who runs: requests wait for their turn, a slot each while they run, and prompts are computed in chunks beside them.

A slot that ends keeps its keys and values for prompts that begin alike, see `PrefixReuse`.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from ssd.engine.metrics import Faults
from ssd.engine.request import Request
from ssd.engine.sequence import Sequence
from ssd.errors import require_fault
from ssd.model.target import Target, pad_rows
from ssd.text.grammar import await_masks

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
        self._enabled = enabled and target.can_copy_prefixes
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
            if kept is None or not np.array_equal(self._target.cached_tokens(slot), kept.tokens):
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
                sequence.may_copy, sequence.stats.num_cached_tokens = False, 0
                return
            if donor in self._kept:
                self._used_at[donor] = next(self._clock)
            self._count(sequence, spared)

    @staticmethod
    def _count(sequence: Sequence, num_tokens: int) -> None:
        # A sequence that was preempted, or whose pass failed, comes back to what it had: that is no hit.
        if not sequence.num_preemptions and not sequence.is_suspect:
            sequence.stats.num_cached_tokens += num_tokens


_RESERVED_PART = 4
"""The sequence whose turn came first is sure of the budget's fourth part."""


class Prefill:
    """Shares the budget of a step among the sequences whose context is not all in their slot.

    More urgent ones go first, then those that have least to compute, so that a short prompt does not wait behind a long
    one (shortest remaining processing time, Schrage 1968). So that a long one does not wait for ever either, the
    one whose turn came first is sure of a fourth of the budget in every step: it is done within 4 * remaining / budget
    steps once it is that. Running sequences wait for one budget per step, however long prompts are.

    Before a sequence computes, it copies what others hold of its context: of several choices of one prompt only the
    first computes it.
    """

    def __init__(
        self,
        target: Target,
        reuse: PrefixReuse,
        chunk_tokens: int,
        on_fault: Callable[[Sequence, BaseException], None],
    ) -> None:
        """``chunk_tokens`` : most tokens computed in one step. ``on_fault`` : told of a sequence that cannot be
        computed, which it must take out of its slot.
        """
        self._target = target
        self._on_fault = on_fault
        self._reuse = reuse
        self._chunk_tokens = chunk_tokens
        self._num_computed = 0

    def remaining(self, sequence: Sequence) -> int:
        """Tokens of its context still to compute before it decodes; the last one is decoding's to feed."""
        return sequence.num_tokens - 1 - self._target.length(sequence.slot)

    def run(self, running: list[Sequence]) -> list[Sequence]:
        """Compute up to one budget; returns those of ``running`` that are ready to decode, in order.

        Not those whose grammar is late; where there are no others, one of them is waited for, a little.
        """
        late = [s.grammar for s in running if s.grammar is not None and not s.grammar.is_ready()]
        held = self._target.lengths_of([sequence.slot for sequence in running]).tolist() if running else []
        if [sequence.row.length - 1 for sequence in running] != held:
            self._share([sequence for sequence in running if self.remaining(sequence)], running)
        elif not late:
            return running
        elif len(late) == len(running):
            await_masks(late)
        return [s for s in running if not self.remaining(s) and (s.grammar is None or s.grammar.is_ready())]

    def take_count(self) -> int:
        """Tokens computed since this was last asked."""
        count, self._num_computed = self._num_computed, 0
        return count

    def _share(self, pending: list[Sequence], running: list[Sequence]) -> None:
        budget = self._chunk_tokens
        order = sorted(pending, key=lambda s: (s.request.priority, self.remaining(s), s.turn))
        first_come = min(pending, key=lambda s: s.turn)
        if order[0] is not first_come:
            budget -= self._advance(first_come, max(1, budget // _RESERVED_PART), running)
        for sequence in order:
            if budget <= 0:  # what others could copy now they can copy at their turn
                break
            budget -= self._advance(sequence, budget, running)

    def _advance(self, sequence: Sequence, budget: int, running: list[Sequence]) -> int:
        """Compute up to ``budget`` tokens of one sequence; returns how many were."""
        if sequence.slot < 0 or not self.remaining(sequence):
            return 0
        try:
            return self._compute(sequence, budget, running)
        except BaseException as error:
            require_fault(error)
            self._on_fault(sequence, error)
            return 0

    def _compute(self, sequence: Sequence, budget: int, running: list[Sequence]) -> int:
        self._reuse.catch_up(sequence, running)
        done = self._target.length(sequence.slot)
        part = sequence.context[done : min(sequence.num_tokens - 1, done + budget)]
        if not len(part):  # others hold it all
            return 0
        if sequence.scores_prompt and done < sequence.num_prompt_tokens - 1:
            output = self._target.forward([sequence.slot], pad_rows([part]), [len(part)])
            sequence.score_prompt(output.logits[0], done)
        else:
            self._target.prefill([sequence.slot], pad_rows([part]), [len(part)])
        self._num_computed += len(part)
        return len(part)


AGEING_STEPS = 64
"""A request that has waited this many steps longer counts as one priority more urgent."""


class Scheduler:
    """Slots, the sequences in them, and those that wait. Touched by the thread that steps the engine only; any may ask
    how many wait and run.

    Tenants take turns: of those that have somebody waiting and may run more (``Request.max_running``), the one that was
    given a slot longest ago is next. All requests without a tenant are one. What follows holds among those of one.

    A request of priority p that arrives at step t has turn ``p * ageing_steps + t``, and the lowest turn goes first: by
    priority, first come first served within one, and of later requests whose priority is lower by d only those overtake
    it that arrive within ``d * ageing_steps`` steps. Turns never change, so nothing is sorted again as requests age.

    All slots and their memory are reserved, so nothing is ever preempted for lack of memory. Where no slot is free, the
    request whose turn it is takes the slot of the running one with the highest turn among those with a higher
    ``priority``, unless that one has waited its way past it. Who was preempted keeps its tokens and its turn; it goes
    on when it gets a slot again, and its output stays the same. Since turns are fixed, two requests never take the slot
    from each other in turn.
    """

    def __init__(self, num_slots: int, reuse: PrefixReuse, *, ageing_steps: int = AGEING_STEPS) -> None:
        self._lines: dict[str | None, list[Sequence]] = {}  # by tenant: the next first; each in the order of turns
        self.running: list[Sequence] = []
        """In the order of their slots."""
        self.num_waiting = 0
        """How many have no slot."""
        self._free_slots = set(range(num_slots))
        self._reuse = reuse
        self._ageing_steps = ageing_steps
        self._num_steps = 0
        self._num_arrivals = 0

    @property
    def waiting(self) -> list[Sequence]:
        """Those without a slot; of each tenant in the order of their turns. O(waiting)."""
        return [sequence for line in self._lines.values() for sequence in line]

    @property
    def free_slots(self) -> frozenset[int]:
        """Slots that no sequence has."""
        return frozenset(self._free_slots)

    def enqueue(self, sequences: Iterable[Sequence]) -> None:
        """Let them wait for their turn. O(waiting) each."""
        for sequence in sequences:
            self._num_arrivals += 1
            sequence.turn = (sequence.request.priority * self._ageing_steps + self._num_steps, self._num_arrivals)
            self._line_up(sequence)

    def admit(self) -> list[Sequence]:
        """Begin a step: give slots to those whose turn it is; returns the sequences that had to make room."""
        self._num_steps += 1
        if self._lines and not self.running:
            self._reuse.reclaim()
        preempted = []
        while (found := self._next()) is not None:
            sequence, victim = found
            self._leave_line(sequence)
            if (line := self._lines.pop(sequence.request.tenant, None)) is not None:
                self._lines[sequence.request.tenant] = line  # the other tenants come first now
            if victim is not None:
                self.release(victim)
                victim.num_preemptions += 1
                self._line_up(victim)
                preempted.append(victim)
            self._reuse.place(sequence, self._free_slots, self.running)
            self._free_slots.remove(sequence.slot)
            sequence.stats.started_s = sequence.stats.started_s or time.perf_counter()
            # In slot order: a batch of neighbouring slots needs no gather of keys and values.
            insort(self.running, sequence, key=_slot)
        return preempted

    def release(self, sequence: Sequence) -> None:
        """Take a sequence off its slot, which keeps what it holds."""
        self._reuse.keep(sequence)
        self._leave_slot(sequence)

    def _leave_slot(self, sequence: Sequence) -> int:
        slot, sequence.slot = sequence.slot, -1
        self.running.remove(sequence)
        self._free_slots.add(slot)
        if sequence.grammar is not None:
            sequence.grammar.put_down()
        return slot

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and empty its slot: what that holds is not known."""
        if sequence.slot < 0:
            if sequence in self._lines.get(sequence.request.tenant, ()):
                self._leave_line(sequence)
            return
        self._reuse.forget(self._leave_slot(sequence))

    def remove(self, request_ids: set[str]) -> list[Sequence]:
        """Take these requests out, wherever they are; unknown ones are ignored."""
        found = [s for s in (*self.waiting, *self.running) if s.request.request_id in request_ids]
        for sequence in found:
            if sequence.slot < 0:
                self._leave_line(sequence)
            else:
                self.release(sequence)
        return found

    def _line_up(self, sequence: Sequence) -> None:
        insort(self._lines.setdefault(sequence.request.tenant, []), sequence, key=_turn)
        self.num_waiting += 1

    def _leave_line(self, sequence: Sequence) -> None:
        line = self._lines[sequence.request.tenant]
        line.remove(sequence)
        self.num_waiting -= 1
        if not line:
            del self._lines[sequence.request.tenant]

    def has_next(self) -> bool:
        """Whether somebody waits who would get a slot now. O(tenants + running)."""
        return self._next() is not None

    def _next(self) -> tuple[Sequence, Sequence | None] | None:
        """Who gets a slot next, and who must make room for that; None where nobody can. O(tenants + running)."""
        if not self._lines:
            return None
        num_running = Counter(running.request.tenant for running in self.running)
        least_urgent = max((running.request.priority for running in self.running), default=0)
        for tenant, line in self._lines.items():
            first = line[0]
            most = first.request.max_running
            if self._free_slots and (most is None or num_running[tenant] < most):
                return first, None
            if first.request.priority < least_urgent and (victim := self._victim(first)) is not None:
                return first, victim
        return None

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The running sequence of the same tenant that must make room for one whose turn it is."""
        later = [
            running
            for running in self.running
            if running.request.tenant == sequence.request.tenant
            and running.request.priority > sequence.request.priority
            and running.turn > sequence.turn
        ]
        return max(later, key=_turn, default=None)


def _slot(sequence: Sequence) -> int:
    return sequence.slot


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn
