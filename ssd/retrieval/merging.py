"""Merging the segments of one namespace: by the rebuild process where that is worth it, else here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from ssd.errors import CacheError, SegmentCorrupt
from ssd.retrieval.cache_state import CacheState
from ssd.retrieval.merge_worker import MergeJob, MergeWorker
from ssd.retrieval.names import is_kept, new_segment_id
from ssd.retrieval.segment import Segment, concatenate
from ssd.retrieval.segment_store import Damage, SegmentStore
from ssd.retrieval.suffix_array import build_segment
from ssd.retrieval.usage import windows

FIRST_PAUSE_S: Final = 30.0
LONGEST_PAUSE_S: Final = 3600.0


@dataclass(slots=True)
class _Failed:
    num_times: int
    again_at: float


class PutOff:
    """By the segments that were to be merged. Only maintenance uses it: one thread at a time."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, ...], _Failed] = {}

    def failed(self, inputs: Sequence[Segment]) -> None:
        """Merging ``inputs`` failed: they wait, twice as long each time, at most LONGEST_PAUSE_S."""
        key = tuple(segment.segment_id for segment in inputs)
        failed = self._failed.setdefault(key, _Failed(0, 0.0))
        failed.again_at = time.monotonic() + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**failed.num_times)
        failed.num_times = min(failed.num_times + 1, 16)

    def waiting(self, segments: Sequence[Segment]) -> frozenset[str]:
        """Ids of those of ``segments`` that wait. Merges that can no longer be, because one is gone, are forgotten."""
        if not self._failed:
            return frozenset()
        there, now = {segment.segment_id for segment in segments}, time.monotonic()
        self._failed = {key: failed for key, failed in self._failed.items() if there.issuperset(key)}
        return frozenset(name for key, failed in self._failed.items() if failed.again_at > now for name in key)


_MERGED_IN_PROCESS: Final = 1 << 14  # tokens; sorting so few costs less than asking the worker
_ABANDONED_S: Final = 60.0
_MANY_SEGMENTS: Final = 64  # beyond so many, nothing waits for the worker: what it is not at is merged here


@dataclass(frozen=True, slots=True)
class _RunningMerge:
    inputs: tuple[Segment, ...]
    segment_id: str
    future: Future[None]


class Merging:
    """Does what the index plans to merge. Used by maintenance: one thread at a time.

    A merge that the worker cannot do is done here; one that cannot be done here either is put off, while others go on.
    """

    def __init__(
        self,
        state: CacheState,
        store: SegmentStore,
        damage: Damage,
        *,
        worker: MergeWorker | None,
        fingerprint: str,
        keeps_used: bool,
        wake: Callable[[], None] | None,
    ) -> None:
        """``keeps_used`` : whether the index knows what was of use. ``wake`` : called when the worker is done."""
        self._state = state
        self._store = store
        self._damage = damage
        self._worker = worker
        self._fingerprint = fingerprint
        self._keeps_used = keeps_used
        self._wake = wake
        self._running: _RunningMerge | None = None
        self._put_off = PutOff()

    def run(self, *, wait: bool) -> None:
        """Merge what is due. ``wait`` : also what the worker is at; else that is taken over by a later call."""
        while not self._state.is_closing:
            if self._running is not None and (wait or self._running.future.done()):
                merge, self._running = self._running, None
                self._take_over(merge)
                continue
            if self._running is not None and len(self._state.index.ring_born) <= _MANY_SEGMENTS:
                return
            with self._state.lock:
                inputs = self._state.index.merge_plan(self._not_to_be_merged())
            if inputs is None:
                return
            running = self._submit(inputs) if self._running is None else None
            if running is not None:
                self._running = running
            else:
                self._merge_here(inputs)

    def abandon(self) -> None:
        """Wait for what the worker is at, which writes a file; its result is not used."""
        if self._running is not None:
            with contextlib.suppress(Exception):
                self._running.future.result(_ABANDONED_S)
            self._running = None

    def _not_to_be_merged(self) -> frozenset[str]:
        running = () if self._running is None else self._running.inputs
        return self._put_off.waiting(self._state.index.ring_born) | {segment.segment_id for segment in running}

    def _submit(self, inputs: tuple[Segment, ...]) -> _RunningMerge | None:
        """Have the worker merge, if there is one, the work is worth it and all inputs are files."""
        directory, worker = self._store.directory, self._worker
        if directory is None or worker is None or sum(map(len, inputs)) <= _MERGED_IN_PROCESS:
            return None
        if not all(map(self._store.has_file, inputs)):
            return None
        start = inputs[0].start
        assert start is not None
        segment_id = _merged_id(inputs)
        job = MergeJob(
            inputs=tuple(str(directory.path_of(segment.segment_id)) for segment in inputs),
            output=str(directory.path_of(segment_id)),
            segment_id=segment_id,
            start=start,
            fingerprint=self._fingerprint,
            namespace=self._state.name,
            num_tokens=sum(map(len, inputs)),
            durable=directory.durable,
        )
        future = worker.submit(job)
        if self._wake is not None:
            wake = self._wake
            future.add_done_callback(lambda _: wake())
        return _RunningMerge(inputs, segment_id, future)

    def _take_over(self, merge: _RunningMerge) -> None:
        """Install what the worker merged, or else merge here; nothing when the cache is being closed."""
        assert self._store.directory is not None
        try:
            merge.future.result()
            merged = self._store.directory.adopt(merge.segment_id)
        except (CacheError, OSError) as error:
            if self._state.is_closing:
                return
            self._merge_here(merge.inputs)
            if self._store.outage.is_on:
                self._state.num_failures += 1  # the directory takes nothing, from the worker as little as from here
            else:
                self._state.report_failure("a merge by the rebuild process failed", error)
        else:
            self._install(merge.inputs, merged)

    def _merge_here(self, inputs: Sequence[Segment]) -> None:
        """Merge in this process and install it; what fails is counted and left alone for a while."""
        try:
            merged = build_segment(concatenate(inputs), start=inputs[0].start, segment_id=_merged_id(inputs))
            merged = self._store.write_made_of(inputs, merged)
        except SegmentCorrupt as error:
            self._damage.mend(inputs, error)
        except Exception as error:  # no memory, most probably
            self._put_off.failed(inputs)
            self._state.num_failed_merges += 1
            self._state.report_failure(
                "a merge failed, it is tried again later and its text stays in small segments", error
            )
        else:
            self._install(inputs, merged)

    def _install(self, inputs: Sequence[Segment], merged: Segment) -> None:
        found = windows(concatenate((merged,))) if self._keeps_used and is_kept(merged.segment_id) else None
        with self._state.lock:
            if self._state.index.install_merged(inputs, merged, found):
                self._state.num_merged += 1


def _merged_id(inputs: Sequence[Segment]) -> str:
    return new_segment_id(inputs[0].start, kept=all(is_kept(segment.segment_id) for segment in inputs))
