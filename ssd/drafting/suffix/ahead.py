"""Looking up the rows of a call ahead of their drafts: in groups, by the caller and by threads that help it.

A draft depends on what the rows before it teach; what is known of its context does not. So rows are drafted in order
by the caller, and looked up a group at a time by whoever comes first. The caller waits for nobody: a row that has not
been looked up when it is drafted is looked up then.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeVar

from ssd.compiled.addresses import fetch_add, inlined, int32_array, int64_array, kernel
from ssd.drafting.suffix.ask import asks_at
from ssd.drafting.suffix.follow import follow
from ssd.drafting.suffix.gather import (
    IN_STEP,
    MAX_LEVELS,
    LookupScratch,
    begin_lookup,
    evidence_at,
    look_up,
    scratch_at,
    texts_of,
)
from ssd.drafting.suffix.workspace import (
    NO_SNAPSHOT,
    Frame,
    Workspace,
    claims_of,
    evidence_of,
    finished_of,
    frame_at,
    states_at,
)
from ssd.retrieval.snapshot import Snapshot, SnapshotRecord, snapshot_at

T = TypeVar("T")

LEAST_HELPED: Final = 64
"""Rows of a call that are worth waking a thread for: that takes about as long as looking up eight. With a second
processor free 64 rows took 0.87 and 256 rows 0.75 of the time, with none 1.09 and 0.98."""

NO_ROWS: Final = -1
"""There is nothing to help with."""

_PATIENCE: Final = 50_000
"""Times that a thread looks whether something happened before it gives up: a tenth of a millisecond."""


@kernel
def _look_up_group(
    frame: Frame,
    snapshot: SnapshotRecord,
    lookups: LookupScratch,
    group: int,
    num_rows: int,
    max_length: int,
    min_length: int,
) -> None:
    """Look up, in step, the contexts of a group's rows that do not go on in places kept."""
    asks, states = asks_at(frame.asks, frame.num_rows), states_at(frame.states, frame.num_states)
    count = 0
    for row in range(IN_STEP * group, min(IN_STEP * (group + 1), num_rows)):
        ask, at = asks[row], evidence_of(frame, row)
        context = int32_array(ask.context, ask.context_length)
        ask.is_looked_up = 0
        if ask.limit < 1 or len(context) == 0 or ask.no_lookup == 1:
            continue
        if not ask.is_tree:
            evidence = evidence_at(at)
            texts = texts_of(context, snapshot)
            follow(states[ask.state].followed, snapshot.table_number, texts, max_length, evidence)
            if evidence.num_levels > 0:
                continue
        ask.is_looked_up = 1
        count += begin_lookup(lookups.lookups[count], context, max_length, at) >= min_length
    if count > 0:
        look_up(snapshot, lookups, count, min_length, MAX_LEVELS, True)
    fetch_add(finished_of(frame, group), 1)


@inlined
def num_groups(num_rows: int) -> int:
    """Groups of so many rows."""
    return (num_rows + IN_STEP - 1) // IN_STEP


@inlined
def _claims(frame: Frame, group: int) -> bool:
    """Whether nobody looked up a group before or does so; it is the caller's then."""
    return bool(fetch_add(claims_of(frame, group), 1) == 0)


@inlined
def open_rows(frame: Frame, num_rows: int) -> None:
    """Let threads help with the first ``num_rows`` rows, or tell them that there is nothing to do: NO_ROWS."""
    claims = int64_array(claims_of(frame, 0), 2 * max(0, num_groups(num_rows)))
    claims[:] = 0
    fetch_add(frame.num_open_at, num_rows - fetch_add(frame.num_open_at, 0))


@inlined
def look_up_ahead(
    frame: Frame, snapshot: SnapshotRecord, group: int, num_rows: int, max_length: int, min_length: int
) -> bool:
    """Have a group of rows looked up; False where another thread does not get it done in time."""
    lookups, ahead, waited = scratch_at(frame.lookups), group, 0
    while fetch_add(finished_of(frame, group), 0) == 0 and waited < _PATIENCE:
        if ahead == num_groups(num_rows):
            waited += 1
            continue
        if _claims(frame, ahead):
            _look_up_group(frame, snapshot, lookups, ahead, num_rows, max_length, min_length)
        ahead += 1
    return bool(waited < _PATIENCE)


@kernel
def _help(workspace: int, snapshot: int, scratch: int, max_length: int, min_length: int) -> None:
    """Look up what nobody has, once the caller has said how many rows there are."""
    frame, searched, lookups, num_rows = frame_at(workspace), snapshot_at(snapshot), scratch_at(scratch), 0
    for _ in range(_PATIENCE):
        num_rows = fetch_add(frame.num_open_at, 0)
        if num_rows != 0:
            break
    for group in range(num_groups(num_rows)):
        if _claims(frame, group):
            _look_up_group(frame, searched, lookups, group, num_rows, max_length, min_length)


class Helpers:
    """Threads that look up rows of a workspace beside the caller. They are idle between calls."""

    def __init__(self, workspace: Workspace) -> None:
        """As many threads as the workspace has memory for beside the caller's."""
        self._workspace = workspace
        self._threads: ThreadPoolExecutor | None = None

    def beside(self, call: Callable[[], T], num_rows: int, snapshot: Snapshot, max_length: int, min_length: int) -> T:
        """What ``call`` returns, which drafts for so many rows; threads help, if that pays, and are done by then.

        They begin when a kernel says ``open_rows``, and give up where none does.
        """
        workspace = self._workspace
        if num_rows < LEAST_HELPED or not workspace.helpers:
            return call()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(workspace.helpers), thread_name_prefix="ssd-lookup")
        workspace.say_open(0)
        helping = [
            self._threads.submit(_help, workspace.address, snapshot.address, scratch, max_length, min_length)
            for scratch in workspace.helpers
        ]
        try:
            return call()
        finally:
            wait(helping)

    def warm_up(self) -> None:
        """Compile what the threads run."""
        workspace = self._workspace
        for scratch in workspace.helpers[:1]:
            workspace.say_open(NO_ROWS)
            _help(workspace.address, NO_SNAPSHOT.address, scratch, 1, 1)
