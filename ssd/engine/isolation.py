"""Fault isolation: an exception in a step ends only the request that caused it. This module also checks the slots."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows

import numpy as np

from ssd.engine.metrics import EngineMetrics, FaultLog
from ssd.engine.prefix_cache import PrefixCache
from ssd.engine.request import FinishReason, RequestOutput
from ssd.engine.scheduler import Scheduler
from ssd.engine.sequence import Sequence
from ssd.engine.speculation import SpeculationManager
from ssd.errors import EngineBroken, RequestError, first_line, reraise_exits
from ssd.model.target import Target


class FaultIsolation:
    """Ends the sequences that cause exceptions, so that all others continue with unchanged outputs.

    An error in the prompt, sampling or text of one sequence ends that sequence. If a forward pass over several
    sequences fails, it is unknown which of them is the cause. So their KV cache is cleared, and each sequence is
    computed again alone, without drafts. A sequence that fails alone is ended. Exceptions that are meant to end the
    program are raised again.

    Used only by the thread that steps the engine.
    """

    def __init__(
        self, target: Target, scheduler: Scheduler, prefix_cache: PrefixCache, speculation: SpeculationManager
    ) -> None:
        self.num_failed_passes = 0
        self._target = target
        self._scheduler = scheduler
        self._prefix_cache = prefix_cache
        self._speculation = speculation
        self._faults = FaultLog()
        self._ended: list[tuple[Sequence, RequestOutput]] = []

    @property
    def has_outputs(self) -> bool:
        return bool(self._ended)

    def collect_outputs(self) -> list[tuple[Sequence, RequestOutput]]:
        ended, self._ended = self._ended, []
        return ended

    def fail(self, sequence: Sequence, where: str, error: BaseException, *, is_in_flight: bool = False) -> None:
        """End a sequence with an error output.

        A RequestError is the client's fault: it is sent to the client and not logged. For all other errors, ``where``
        names the operation that failed, for the log. If the sequence is in a running forward pass (``is_in_flight``),
        it keeps its slot until `drop` is called.
        """
        reraise_exits(error)
        refusal = error if isinstance(error, RequestError) else None
        if refusal is None:
            self._faults.record(where, error, "one request ends with an error")
        if sequence.finish_reason is not FinishReason.ERROR:
            message = str(refusal or f"{where} failed: the log has the error")
            self._ended.append((sequence, sequence.end(FinishReason.ERROR, message, refusal)))
        if not is_in_flight:
            self.drop(sequence)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Cancel sequences and clear their slots, because an exception like KeyboardInterrupt was raised in a step."""
        reported = [sequence for sequence, _ in self._ended]
        for sequence in sequences:
            if sequence not in reported:
                self._ended.append((sequence, sequence.end(FinishReason.CANCELLED)))
            self.drop(sequence)

    def fail_one(self, sequence: Sequence, error: BaseException) -> None:
        """End the only sequence of a failed forward pass, and check that the model still works."""
        self.fail(sequence, "a forward pass", error)
        self.check_target()

    def fail_batch(self, batch: Rows[Sequence], error: BaseException) -> None:
        """After a failed forward pass over several sequences, clear their KV cache and let each be retried alone."""
        reraise_exits(error)
        unfinished = [sequence for sequence in batch if sequence.finish_reason is None]
        for sequence in batch:
            if sequence.finish_reason is not None:
                self.drop(sequence)
        if len(unfinished) == 1:
            self.fail_one(unfinished[0], error)
            return
        self.num_failed_passes += 1
        self._faults.record("a batched forward pass", error, "each request is retried alone to find the cause")
        for sequence in unfinished:
            self._target.rollback(sequence.slot, 0)
            self._speculation.drop_request(sequence)
            sequence.needs_solo_retry = True
            sequence.row.max_draft_length = 0  # a draft may have been the cause

    def drop(self, sequence: Sequence) -> None:
        self._scheduler.discard(sequence)
        self._speculation.drop_request(sequence)

    def check_target(self) -> None:
        """Raise EngineBroken unless the model can run a minimal forward pass."""
        slot = min(self._scheduler.free_slots, default=None)
        if slot is None:  # all slots are in use: their passes will show it
            return
        self._prefix_cache.clear_slot(slot)
        try:
            self._target.forward([slot], np.zeros((1, 1), np.int64), [1]).logits[0, 0, 0].item()
        except BaseException as error:
            reraise_exits(error)
            raise EngineBroken(f"the model can no longer run a forward pass: {first_line(error)}") from error
        self._prefix_cache.clear_slot(slot)


log = logging.getLogger(__name__)


def find_violations(
    target: Target,
    scheduler: Scheduler,
    prefix_cache: PrefixCache,
    arriving: Iterable[Sequence] = (),
    *,
    is_in_flight: bool = False,
) -> list[str]:
    """Check the KV cache slots and requests for internal inconsistencies; return each as a sentence. O(cached tokens).

    Between two steps, four conditions must hold: Every slot is free or belongs to one sequence. No request occurs
    twice, and the waiting requests of each tenant are in queue order. The slot of a sequence holds the beginning of its
    tokens, without the last one. A free slot holds the prefix that the prefix cache has recorded for it.

    Args:
        target: The served model, which records the tokens in each slot.
        scheduler: The scheduler of the engine.
        prefix_cache: The prefix cache of the engine.
        arriving: Submitted sequences that are not in a queue yet.
        is_in_flight: Whether a forward pass is running. Then running sequences are not checked, because their slots
            also hold draft tokens.
    """
    return [
        *_slot_violations(target, scheduler),
        *_duplicate_violations([*arriving, *scheduler.waiting, *scheduler.running]),
        *_running_violations(target, [] if is_in_flight else scheduler.running),
        *_waiting_violations(scheduler),
        *_cached_prefix_violations(target, scheduler, prefix_cache),
    ]


def handle_violations(
    found: list[str], metrics: EngineMetrics, scheduler: Scheduler, prefix_cache: PrefixCache
) -> None:
    """Log and count internal inconsistencies. If there are any, clear all free slots: their KV cache may be wrong."""
    for violation in found:
        metrics.integrity_violations += 1
        log.error("internal inconsistency, please report it: %s", violation)
    if found:
        for slot in scheduler.free_slots:
            prefix_cache.clear_slot(slot)


def _slot_violations(target: Target, scheduler: Scheduler) -> Iterator[str]:
    num_owners = Counter(sequence.slot for sequence in scheduler.running)
    for slot in range(target.num_slots):
        owners = num_owners.pop(slot, 0) + (slot in scheduler.free_slots)
        if owners != 1:
            yield f"slot {slot} has {owners} owners"
    for slot in num_owners:
        yield f"a sequence runs in slot {slot} of {target.num_slots}"


def _duplicate_violations(sequences: list[Sequence]) -> Iterator[str]:
    for name, number in Counter(sequence.request.request_id for sequence in sequences).items():
        if number > 1:
            yield f"request {name} occurs {number} times"


def _running_violations(target: Target, running: list[Sequence]) -> Iterator[str]:
    for sequence in running:
        name, length = sequence.request.request_id, target.length(sequence.slot)
        if length >= sequence.num_tokens:
            yield f"slot {sequence.slot} holds {length} tokens of the {sequence.num_tokens} of request {name}"
        elif not np.array_equal(target.cached_tokens(sequence.slot), sequence.context[:length]):
            yield f"slot {sequence.slot} holds other tokens than request {name}"
        if sequence.finish_reason is not None:
            yield f"request {name} has ended and still has slot {sequence.slot}"


def _waiting_violations(scheduler: Scheduler) -> Iterator[str]:
    waiting = scheduler.waiting
    if len(waiting) != scheduler.num_waiting:
        yield f"{len(waiting)} requests wait, but {scheduler.num_waiting} are counted"
    for sequence in waiting:
        if sequence.slot >= 0:
            yield f"request {sequence.request.request_id} waits and has slot {sequence.slot}"
    queue_keys: dict[str | None, list[tuple[int, int]]] = {}
    for sequence in waiting:
        queue_keys.setdefault(sequence.request.tenant, []).append(sequence.queue_key)
    if any(of_one != sorted(of_one) for of_one in queue_keys.values()):
        yield "the waiting requests of a tenant are not in queue order"


def _cached_prefix_violations(target: Target, scheduler: Scheduler, prefix_cache: PrefixCache) -> Iterator[str]:
    for slot in range(target.num_slots):
        cached = prefix_cache.cached_prefix(slot)
        if slot not in scheduler.free_slots:
            if cached is not None:
                yield f"slot {slot} is in use and has a cached prefix of {len(cached.tokens)} tokens"
            continue
        tokens = cached.tokens if cached is not None else np.empty(0, np.int32)
        if target.length(slot) != len(tokens):
            yield f"slot {slot} holds {target.length(slot)} tokens, and its cached prefix has {len(tokens)}"
        elif not np.array_equal(target.cached_tokens(slot), tokens):
            yield f"slot {slot} holds other tokens than its cached prefix"
