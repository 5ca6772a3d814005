"""The passes that are under way: one, and on a device maybe the one behind it."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Final

from ssd.engine.batch import Batch
from ssd.engine.isolation import Isolation
from ssd.engine.proposals import Proposals
from ssd.engine.sequence import Sequence
from ssd.engine.verify import Pass
from ssd.model.target import Target

_QUIET: Final = 16
"""Passes without a draft after which the next ones are begun before it is known whether there is one: a draft that is
found a pass too late costs more than the host's part of several passes."""


class Passes:
    """Begins passes and waits for them; the sequences of one that fails are lost, see `Isolation`.

    ``first`` : the one that ends first. ``behind`` : began before what the first one says was known.
    """

    def __init__(self, target: Target, proposals: Proposals, isolation: Isolation) -> None:
        self._target, self._proposals, self._isolation = target, proposals, isolation
        self.first: Pass | None = None
        self.behind: Pass | None = None
        self._num_plain = 0

    def begin(self, batch: Batch, turn: int) -> None:
        """Begin the pass over every sequence's last token and its draft of the turn."""
        if not batch.sequences:
            return
        try:
            self.first = Pass(self._target, batch, turn)
        except BaseException as error:
            self._isolation.lose(batch.sequences, error)

    def run_ahead(self, running: Rows[Sequence]) -> None:
        """Begin the pass behind the first, if that will say one token to each of those that run, and these all go on.

        What could be drafted is asked for one token too early; where there is anything, the pass waits for that token.
        """
        first = self.first
        if (
            first is None
            or first.width > 1
            or not first.is_chosen
            or not self._proposals.spares_passes(self._num_plain >= _QUIET)
            or not first.batch.runs_on(running, first.lengths + 1)
            or not self._target.can_run_ahead(first.batch.slots)
        ):
            return
        turn = self._proposals.propose(first.batch)
        if first.batch.frame.width > 1:
            self._proposals.take_back()
            return
        try:
            self.behind = Pass(self._target, first.batch, turn, first)
        except BaseException as error:
            self.drop()
            self._isolation.lose(first.batch.sequences, error)

    def verify(self) -> Pass | None:
        """Wait for the first: how far the target agrees with each draft. None where there is none.

        The one behind it is the first from now on.
        """
        ended, self.first, self.behind = self.first, self.behind, None
        if ended is not None:
            try:
                ended.verify()
            except BaseException as error:
                self.drop()
                self._isolation.lose(ended.batch.sequences, error)
                return None
            self._num_plain = 0 if ended.width > 1 else self._num_plain + 1
        return ended

    def drop(self) -> None:
        """What they say is nobody's."""
        self.first = self.behind = None
