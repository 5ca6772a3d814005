"""Does the bookkeeping agree with itself? Asked whenever the engine is idle."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from ssd.engine.metrics import EngineMetrics
from ssd.engine.prefix_reuse import PrefixReuse
from ssd.engine.scheduler import Scheduler
from ssd.engine.sequence import Sequence
from ssd.model.target import Target

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
        *_waiting(scheduler.waiting),
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
        elif not np.array_equal(target.fed_tokens(sequence.slot), sequence.context[:length]):
            yield f"slot {sequence.slot} holds other tokens than request {name}"
        if sequence.finish_reason is not None:
            yield f"request {name} has ended and still has slot {sequence.slot}"


def _waiting(waiting: list[Sequence]) -> Iterator[str]:
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
        elif not np.array_equal(target.fed_tokens(slot), tokens):
            yield f"slot {slot} keeps other tokens than it was fed"
