"""The forward passes in flight: the current one and, on a concurrent device, maybe the next one."""

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
"""The number of passes in a row without a draft after which the next pass is launched before its drafts are known.

A draft that is found one pass too late costs more than the host's part of several passes.
"""


class Pipeline:
    """Launches passes and waits for them; `FaultIsolation` handles passes that fail.

    Attributes:
        current: The pass that ends first.
        next: The pass that was launched before the output of the current one was known.
    """

    def __init__(self, target: Target, speculation: SpeculationManager, isolation: FaultIsolation) -> None:
        self._target, self._speculation, self._isolation = target, speculation, isolation
        self.current: ForwardPass | None = None
        self.next: ForwardPass | None = None
        self._num_draftless = 0

    def launch(self, batch: Batch, buffer: int) -> None:
        """Launch the pass over the last token of every sequence and its draft in ``buffer``."""
        if not batch.sequences:
            return
        try:
            self.current = ForwardPass(self._target, batch, buffer)
        except BaseException as error:
            self._isolation.fail_batch(batch.sequences, error)

    def launch_speculatively(self, running: Rows[Sequence]) -> None:
        """Launch the next pass now if the current one will add exactly one token to each running sequence.

        All sequences must continue after the current pass. The drafter is called one token too early; if it finds any
        draft, the launch waits for that token.
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
        """Wait for the current pass, verify its drafts and return it; the next pass becomes the current one.

        Returns:
            The pass, or None if there is none or it failed.
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
        """Discard the passes in flight."""
        self.current = self.next = None
