"""Chunked prefill: in each step, at most a fixed number of prompt tokens is computed."""

from __future__ import annotations

from collections.abc import Callable

from ssd.engine.prefix_cache import PrefixCache
from ssd.engine.sequence import Sequence
from ssd.errors import reraise_exits
from ssd.model.target import Target, pad_rows
from ssd.text.grammar import await_masks

_RESERVED_FRACTION = 4  # a quarter of the budget is reserved for the oldest sequence


class Prefill:
    """Computes prompts in chunks, so that a long prompt stalls neither running sequences nor short prompts.

    In each step a fixed number of prompt tokens, the budget, is computed. Sequences with the most urgent priority come
    first, and among them those with the fewest remaining tokens (shortest remaining processing time, Schrage 1968). A
    quarter of the budget is reserved for the sequence that is first in the queue, so its prompt is finished within
    4 * remaining tokens / budget steps.

    Before a prompt is computed, the KV cache of its longest prefix in any other slot is copied. So several outputs of
    one prompt compute the prompt only once.
    """

    def __init__(
        self,
        target: Target,
        prefix_cache: PrefixCache,
        chunk_tokens: int,
        on_fault: Callable[[Sequence, BaseException], None],
    ) -> None:
        """Create the part of an engine that computes prompts; ``on_fault`` must free the slot of a failed sequence."""
        self._target = target
        self._on_fault = on_fault
        self._prefix_cache = prefix_cache
        self._chunk_tokens = chunk_tokens
        self._num_computed = 0

    def num_remaining(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence must still be prefilled.

        The sequence's last token is not counted, because the first decoding step computes it.
        """
        return sequence.num_tokens - 1 - self._target.length(sequence.slot)

    def run(self, running: list[Sequence]) -> list[Sequence]:
        """Compute prompt tokens up to the budget of one step, and return the sequences that can decode.

        A sequence with structured output can decode only when its next token mask is computed. If all sequences lack
        their masks, this method waits up to 20 ms for one.
        """
        late = [s.grammar for s in running if s.grammar is not None and not s.grammar.is_ready()]
        num_cached = self._target.lengths_of([sequence.slot for sequence in running]).tolist() if running else []
        if [sequence.row.length - 1 for sequence in running] != num_cached:
            self._spend_budget([sequence for sequence in running if self.num_remaining(sequence)], running)
        elif not late:
            return running
        elif len(late) == len(running):
            await_masks(late)
        return [s for s in running if not self.num_remaining(s) and (s.grammar is None or s.grammar.is_ready())]

    def pop_num_computed(self) -> int:
        count, self._num_computed = self._num_computed, 0
        return count

    def _spend_budget(self, pending: list[Sequence], running: list[Sequence]) -> None:
        budget = self._chunk_tokens
        order = sorted(pending, key=lambda s: (s.request.priority, self.num_remaining(s), s.queue_key))
        oldest = min(pending, key=lambda s: s.queue_key)
        if order[0] is not oldest:
            budget -= self._prefill_sequence(oldest, max(1, budget // _RESERVED_FRACTION), running)
        for sequence in order:
            if budget <= 0:  # the others copy cached prefixes when they are prefilled
                break
            budget -= self._prefill_sequence(sequence, budget, running)

    def _prefill_sequence(self, sequence: Sequence, budget: int, running: list[Sequence]) -> int:
        if sequence.slot < 0 or not self.num_remaining(sequence):
            return 0
        try:
            return self._compute(sequence, budget, running)
        except BaseException as error:
            reraise_exits(error)
            self._on_fault(sequence, error)
            return 0

    def _compute(self, sequence: Sequence, budget: int, running: list[Sequence]) -> int:
        self._prefix_cache.copy_cached_prefix(sequence, running)
        done = self._target.length(sequence.slot)
        chunk = sequence.context[done : min(sequence.num_tokens - 1, done + budget)]
        if not len(chunk):  # everything was copied
            return 0
        if sequence.needs_prompt_logprobs and done < sequence.num_prompt_tokens - 1:
            output = self._target.forward([sequence.slot], pad_rows([chunk]), [len(chunk)])
            sequence.score_prompt(output.logits[0], done)
        elif (
            self._target.can_delay_prefill
            and running == [sequence]
            and sequence.grammar is None
            and done + len(chunk) == sequence.num_tokens - 1
        ):  # the decoding step that follows computes the chunk
            self._target.delay_prefill(sequence.slot, chunk)
        else:
            self._target.prefill([sequence.slot], pad_rows([chunk]), [len(chunk)])
        self._num_computed += len(chunk)
        return len(chunk)
