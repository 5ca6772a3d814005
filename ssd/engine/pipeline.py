"""Launch forward passes. On an asynchronous device, the next pass may be launched before the current one ends."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Final

from ssd.engine.batch import Batch
from ssd.engine.forward_pass import ForwardPass
from ssd.engine.isolation import FaultIsolation
from ssd.engine.sequence import Sequence
from ssd.engine.speculation import SpeculationManager
from ssd.model.target import Target

_MIN_DRAFTLESS_PASSES: Final = 16
"""The number of consecutive forward passes without a draft before the next pass is launched without waiting for drafts.

The number is high, because a pass launched early cannot verify a draft that is found meanwhile. One missed draft loses
more time than several early launches save, each of which hides the CPU work of one pass.
"""


class Pipeline:
    """Launches forward passes and waits for them. If a pass fails, `FaultIsolation` ends the request that caused it."""

    def __init__(self, target: Target, speculation: SpeculationManager, isolation: FaultIsolation) -> None:
        self._target, self._speculation, self._isolation = target, speculation, isolation
        self.current: ForwardPass | None = None
        # The pass that was launched before the output of the current one was known.
        self.next: ForwardPass | None = None
        self._num_draftless = 0

    def launch(self, batch: Batch, buffer: int) -> None:
        """Launch the forward pass that verifies the drafts of all sequences in a batch.

        ``buffer`` says which of the two draft buffers of each sequence (0 or 1) holds its draft.
        """
        if not batch.sequences:
            return
        try:
            self.current = ForwardPass(self._target, batch, buffer)
        except BaseException as error:
            self._isolation.fail_batch(batch.sequences, error)

    def launch_ahead(self, running: Rows[Sequence]) -> None:
        """Launch the next forward pass before the current one ends, so that the device is not idle between them.

        This is possible if the current pass has no drafts, because it then adds exactly one token to each sequence, and
        if no sequence ends. Drafts for the next pass are sought before that token is known. If one is found, nothing is
        launched.
        """
        current = self.current
        if (
            current is None
            or current.width > 1
            or not current.samples_in_pass
            or not self._speculation.allows_early_launch(self._num_draftless >= _MIN_DRAFTLESS_PASSES)
            or not current.batch.can_continue(running, current.lengths + 1)
            or not self._target.can_run_ahead(current.batch.slots)
        ):
            return
        buffer = self._speculation.propose(current.batch)
        if current.batch.record.width > 1:
            self._speculation.discard_drafts()
            return
        try:
            self.next = ForwardPass(self._target, current.batch, buffer, current)
        except BaseException as error:
            self.drop()
            self._isolation.fail_batch(current.batch.sequences, error)

    def verify(self) -> ForwardPass | None:
        """Wait for the current forward pass, accept the draft tokens that it confirms, and return the pass.

        Returns None if there is no current pass, or if it failed.
        """
        completed, self.current, self.next = self.current, self.next, None
        if completed is not None:
            try:
                completed.verify()
            except BaseException as error:
                self.drop()
                self._isolation.fail_batch(completed.batch.sequences, error)
                return None
            self._num_draftless = 0 if completed.width > 1 else self._num_draftless + 1
        return completed

    def drop(self) -> None:
        self.current = self.next = None
