"""Computing prompts in chunks beside the running sequences."""

from __future__ import annotations

from collections.abc import Callable

from ssd.engine.prefix_reuse import PrefixReuse
from ssd.engine.sequence import Sequence
from ssd.errors import require_fault
from ssd.model.target import Target, pad_rows

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
        """Compute up to one budget; returns those of ``running`` that are ready to decode, in order."""
        pending = [sequence for sequence in running if self.remaining(sequence)]
        if pending:
            self._share(pending, running)
        return [sequence for sequence in running if not self.remaining(sequence)]

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
        if not len(part):  # the budget is used up, or others hold it all
            return 0
        if sequence.scores_prompt and done < sequence.num_prompt_tokens - 1:
            output = self._target.forward([sequence.slot], pad_rows([part]), [len(part)])
            sequence.score_prompt(output.logits[0], done)
        else:
            self._target.prefill([sequence.slot], pad_rows([part]), [len(part)])
        self._num_computed += len(part)
        return len(part)
