"""Recorded outputs decoded by our drafter, a kernel call each: as fast as replaying goes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from cache_builder.replay.cost import CostCurve, flat
from cache_builder.replay.pricing import rising
from cache_builder.replay.rows import Row
from cache_builder.replay.whole_outputs import NUM_SOURCES, Decoder, decode_output
from ssd.compiled.addresses import address
from ssd.compiled.records import Records
from ssd.config import DraftConfig
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.drafting.ask import MAX_DRAFT, SOURCES
from ssd.drafting.drafter import NO_SNAPSHOT, Workspace, checked_lengths
from ssd.pricing.rate import FORGETTING
from ssd.retrieval.snapshot import Snapshot

Ints = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]

SURE: Final = 0.9
"""Chance of its first token that a draft must have in an output's first pass, for which a client waits: as the
engine has it (``ssd/engine/proposals.py``)."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The steps of one output, in order, and the nanoseconds of a processor that they took here.

    ``drafted``, ``accepted``, ``sources`` : int32[s]; accepted leaves out the target's own token of each step, sources
    are numbers in `SOURCES`, of the draft's first token.
    """

    drafted: Ints
    accepted: Ints
    sources: Ints
    ns: int


class OutputDecoder:
    """Decodes recorded outputs with the suffix drafter at the prices of a cost curve.

    As one sequence alone is decoded by an engine that learns nothing but text and acceptance: what only a running
    target tells (its other candidates, its times) is not there. Deterministic. Owned by one thread.
    """

    def __init__(self, curve: CostCurve, *, draft: DraftConfig, tree: bool = True, sure: float = SURE) -> None:
        """``curve`` : what passes take. ``sure`` : see `SURE`; 0 drafts for the first pass as for all."""
        limit = min(draft.num_speculative_tokens, MAX_DRAFT)
        self._costs = curve.upto(limit + 1)[1:]
        self._more = rising(self._costs)
        self._workspace, self._model = Workspace(), AcceptanceModel()
        self._state, _ = self._workspace.state_of("")
        self._memory = Records(Decoder)
        self._decoder = decoder = self._memory[0]
        decoder.workspace, decoder.model = self._workspace.address, self._model.address
        decoder.limit, decoder.is_tree, decoder.sure = limit, tree, sure
        decoder.longest_match, decoder.shortest_match = checked_lengths(draft.max_match_length, draft.min_match_length)
        decoder.costs, decoder.more, decoder.num_more = address(self._costs), address(self._more), len(self._more)
        decoder.rate.forgetting = FORGETTING
        self._steps = np.zeros(0, np.int32)

    def decode(self, row: Row, snapshot: Snapshot | None) -> Decoded:
        """The steps of an output over an index; None: over none. O(output) drafts."""
        text, searched = row.text(), snapshot or NO_SNAPSHOT
        self._workspace.room_for(1, searched)
        if len(self._steps) < 3 * len(row.output):
            self._steps = np.zeros(6 * len(row.output), np.int32)
        began = time.thread_time_ns()
        count = decode_output(
            self._memory.address,
            searched.address,
            address(text),
            len(text),
            len(row.context),
            self._state,
            self._steps,
        )
        took = time.thread_time_ns() - began
        drafted, accepted, sources = self._steps[: 3 * count].reshape(-1, 3).T.copy()
        return Decoded(drafted, accepted, sources, took)

    def by_depth(self) -> tuple[Counts, Counts]:
        """Tokens drafted and accepted of all outputs so far, int64[MAX_DRAFT], by how many of the draft come before."""
        record = self._memory.array[0]
        return record["drafted"].copy(), record["accepted"].copy()

    def by_source(self) -> dict[str, tuple[int, int, int]]:
        """Of each source that a draft began with: drafts, their tokens, accepted ones, of all outputs so far."""
        counts = self._memory.array[0]["by_source"].tolist()
        assert len(counts) == NUM_SOURCES
        return {name: (each[0], each[1], each[2]) for name, each in zip(SOURCES, counts, strict=True) if each[0]}


@cache
def warm_up() -> None:
    """Compile the kernel, or read it from its file, once in a process: else the first output's time has that in it."""
    row = Row(np.array([1, 2], np.int32), np.array([1, 2], np.int32))
    OutputDecoder(flat(2), draft=DraftConfig()).decode(row, None)
