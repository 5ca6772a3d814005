"""What fails inside a step ends the request it belongs to, and nothing else; when idle, the books are compared."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows

import numpy as np

from ssd.engine.metrics import EngineMetrics, Faults
from ssd.engine.proposals import Proposals
from ssd.engine.request import FinishReason, RequestOutput
from ssd.engine.schedule import PrefixReuse, Scheduler
from ssd.engine.sequence import Sequence
from ssd.errors import EngineBroken, RequestError, first_line, require_fault
from ssd.model.target import Target


class Isolation:
    """Ends sequences that fail. Owned by the thread that steps the engine.

    Where a failure belongs to one sequence (its prompt, its rules, its text) that one ends. Where a pass over several
    fails, nobody knows whose fault it is nor what the pass left in the slots: all of them are emptied, each sequence is
    computed again from its tokens, as one that was preempted is, and then passed alone once. One that fails alone is at
    fault. They are not drafted for any more. Outputs stay what they are.

    All methods that take an error raise it again where it is no fault but tells the program to end.
    """

    def __init__(self, target: Target, scheduler: Scheduler, reuse: PrefixReuse, proposals: Proposals) -> None:
        self.num_failed_passes = 0
        """Passes of several sequences that failed."""
        self._target = target
        self._scheduler = scheduler
        self._reuse = reuse
        self._proposals = proposals
        self._faults = Faults()
        self._ended: list[tuple[Sequence, RequestOutput]] = []

    @property
    def has_ended(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._ended)

    def collect(self) -> list[tuple[Sequence, RequestOutput]]:
        """The sequences that failed since this was last asked, each with its last output."""
        ended, self._ended = self._ended, []
        return ended

    def fail(self, sequence: Sequence, where: str, error: BaseException, *, is_under_way: bool = False) -> None:
        """End a sequence by what it raised; one that ``is_under_way`` keeps its slot until it is dropped.

        A RequestError is the request's own fault, which its client is told and no log.
        """
        require_fault(error)
        refusal = error if isinstance(error, RequestError) else None
        if refusal is None:
            self._faults.note(where, error, "one request ends with an error")
        if sequence.finish_reason is not FinishReason.ERROR:
            message = str(refusal or f"{where} failed")
            self._ended.append((sequence, sequence.end(FinishReason.ERROR, message, refusal)))
        if not is_under_way:
            self.drop(sequence)

    def give_up(self, sequences: Iterable[Sequence]) -> None:
        """Cancel them: the program was told to end inside a step, and what was said, and slots hold, is not known."""
        told = [sequence for sequence, _ in self._ended]
        for sequence in sequences:
            if sequence not in told:
                self._ended.append((sequence, sequence.end(FinishReason.CANCELLED)))
            self.drop(sequence)

    def fail_alone(self, sequence: Sequence, error: BaseException) -> None:
        """A pass over one sequence failed: end it, and see whether there is a target at all."""
        self.fail(sequence, "a forward pass", error)
        self.require_a_target()

    def lose(self, batch: Rows[Sequence], error: BaseException) -> None:
        """A pass failed, and with it what the slots of its rows hold."""
        require_fault(error)
        living = [sequence for sequence in batch if sequence.finish_reason is None]
        for sequence in batch:
            if sequence.finish_reason is not None:
                self.drop(sequence)
        if len(living) == 1:
            self.fail_alone(living[0], error)
            return
        self.num_failed_passes += 1
        self._faults.note("a pass of several requests", error, "each is computed alone to find the one at fault")
        for sequence in living:
            self._target.rollback(sequence.slot, 0)
            self._proposals.forget(sequence)
            sequence.is_suspect = True
            sequence.row.most_drafted = 0  # a draft may have been why

    def drop(self, sequence: Sequence) -> None:
        """Nothing of a sequence that failed stays."""
        self._scheduler.discard(sequence)
        self._proposals.forget(sequence)

    def require_a_target(self) -> None:
        """Raise EngineBroken unless the target computes a token about which nothing is special."""
        slot = min(self._scheduler.free_slots, default=None)
        if slot is None:  # others hold all slots: their passes will show it
            return
        self._reuse.forget(slot)
        try:
            self._target.forward([slot], np.zeros((1, 1), np.int64), [1]).logits[0, 0, 0].item()
        except BaseException as error:
            require_fault(error)
            raise EngineBroken(f"the model computes nothing any more: {first_line(error)}") from error
        self._reuse.forget(slot)


log = logging.getLogger(__name__)


def violations(
    target: Target,
    scheduler: Scheduler,
    reuse: PrefixReuse,
    arriving: Iterable[Sequence] = (),
    *,
    is_under_way: bool = False,
) -> list[str]:
    """Everything that is wrong, a sentence each; empty when all is well.

    Between two steps must hold: every slot is free or has one sequence; no request is in two places; a slot holds the
    beginning of its sequence's context, all but the last token at most; a free slot holds what it is said to keep. What
    a slot holds is the target's own record of the tokens it was fed. Where a pass ``is_under_way``, slots hold drafts
    too: what sequences hold is not looked at. O(tokens held).
    """
    return [
        *_slots(target, scheduler),
        *_places([*arriving, *scheduler.waiting, *scheduler.running]),
        *_running(target, [] if is_under_way else scheduler.running),
        *_waiting(scheduler),
        *_kept(target, scheduler, reuse),
    ]


def settle(found: list[str], metrics: EngineMetrics, scheduler: Scheduler, reuse: PrefixReuse) -> None:
    """Log and count violations. After any, what the free slots keep is not trusted any more."""
    for violation in found:
        metrics.integrity_violations += 1
        log.error("a fault of this program, please report it: %s", violation)
    if found:
        for slot in scheduler.free_slots:
            reuse.forget(slot)


def _slots(target: Target, scheduler: Scheduler) -> Iterator[str]:
    taken = Counter(sequence.slot for sequence in scheduler.running)
    for slot in range(target.num_slots):
        owners = taken.pop(slot, 0) + (slot in scheduler.free_slots)
        if owners != 1:
            yield f"slot {slot} has {owners} owners"
    for slot in taken:
        yield f"a sequence runs in slot {slot} of {target.num_slots}"


def _places(sequences: list[Sequence]) -> Iterator[str]:
    for name, number in Counter(sequence.request.request_id for sequence in sequences).items():
        if number > 1:
            yield f"request {name} is in {number} places"


def _running(target: Target, running: list[Sequence]) -> Iterator[str]:
    for sequence in running:
        name, length = sequence.request.request_id, target.length(sequence.slot)
        if length >= sequence.num_tokens:
            yield f"slot {sequence.slot} holds {length} tokens of the {sequence.num_tokens} of request {name}"
        elif not np.array_equal(target.cached_tokens(sequence.slot), sequence.context[:length]):
            yield f"slot {sequence.slot} holds other tokens than request {name}"
        if sequence.finish_reason is not None:
            yield f"request {name} has ended and still has slot {sequence.slot}"


def _waiting(scheduler: Scheduler) -> Iterator[str]:
    waiting = scheduler.waiting
    if len(waiting) != scheduler.num_waiting:
        yield f"{len(waiting)} requests wait, and {scheduler.num_waiting} are counted"
    for sequence in waiting:
        if sequence.slot >= 0:
            yield f"request {sequence.request.request_id} waits and has slot {sequence.slot}"
    turns: dict[str | None, list[tuple[int, int]]] = {}
    for sequence in waiting:
        turns.setdefault(sequence.request.tenant, []).append(sequence.turn)
    if any(of_one != sorted(of_one) for of_one in turns.values()):
        yield "the waiting requests of a tenant are not in the order of their turns"


def _kept(target: Target, scheduler: Scheduler, reuse: PrefixReuse) -> Iterator[str]:
    for slot in range(target.num_slots):
        kept = reuse.kept_text(slot)
        if slot not in scheduler.free_slots:
            if kept is not None:
                yield f"slot {slot} is taken and said to keep {len(kept.tokens)} tokens"
            continue
        tokens = kept.tokens if kept is not None else np.empty(0, np.int32)
        if target.length(slot) != len(tokens):
            yield f"slot {slot} holds {target.length(slot)} tokens and is said to keep {len(tokens)}"
        elif not np.array_equal(target.cached_tokens(slot), tokens):
            yield f"slot {slot} keeps other tokens than it was fed"
