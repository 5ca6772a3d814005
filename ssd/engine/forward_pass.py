"""One forward pass of the target over all sequences and their drafts, including the acceptance of draft tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ssd.drafting.draft_records import source_name
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftOutcome, SamplingContext, ScoredPass
from ssd.drafting.suffix_drafter import draft_of
from ssd.engine.acceptance import accept_drafts
from ssd.engine.batch import Batch, fill_input_ids, find_accepted, update_row_counts
from ssd.engine.request import VerifiedDraft
from ssd.engine.sequence import Committed, Sequence
from ssd.errors import reraise_exits
from ssd.model.sampling.sampler import PassOutput
from ssd.model.sampling.target_tokens import make_noise, target_tokens
from ssd.model.target import Target
from ssd.text.grammar import use_available_masks

log = logging.getLogger(__name__)


def warm_up_verification() -> None:
    one = np.zeros((1, 1), np.int64)
    accept_drafts(one, one, np.ones(1, np.int64), one, False)


class ForwardPass:
    """A forward pass over the last token and the draft tokens of every sequence in a batch.

    The constructor launches the pass. `verify` waits for its end and accepts draft tokens; it must be called once,
    before the next pass is launched. The exception is a pass with a ``predecessor``, which is launched before the
    predecessor is verified: it has no drafts, and its inputs are the predecessor's output tokens, which are still on
    the device.

    Attributes:
        buffer: Which of the two draft buffers of each sequence (0 or 1) holds its draft.
        width: The number T of input tokens of each sequence, including padding.
        lengths: int64[B], the number of tokens of each sequence; the last token is the first input.
        has_prefill: Whether the pass also computes the last tokens of a prompt, see `Target.delay_prefill`.
        seconds: The duration of the pass, known after `verify`.
        ended: The time at which the pass ended, known after `verify`.
        output_ids: int64[B, T], the accepted draft tokens of each sequence and the recovered or bonus token.
        sizes: int64[B], the number of output tokens; 0 if sampling failed or the grammar mask was not ready in time.
        paths: int64[B, T], the indices of the first input (0) and of the accepted draft tokens among the inputs.
    """

    def __init__(self, target: Target, batch: Batch, buffer: int, predecessor: ForwardPass | None = None) -> None:
        self.batch, self.buffer = batch, buffer
        self.seconds = self.ended = 0.0
        self.failed: dict[int, BaseException] = {}  # the errors of the rows for which sampling failed
        self.has_late_grammar = False  # whether the grammar mask of a row was not ready in time
        self._target = target
        self.has_prefill = target.has_delayed_prefill
        self._started = time.perf_counter()
        num_rows, self.width = len(batch.sequences), batch.record.width
        self._has_trees = batch.record.has_trees == 1
        self._input_ids = np.empty((num_rows, self.width), np.int64)
        self._parents = np.empty((num_rows, self.width if self._has_trees else 0), np.int64)
        self._previous_ids = np.empty(num_rows, np.int32)
        self.lengths, self._counts = np.empty((2, num_rows), np.int64)
        fill_input_ids(
            batch.address, buffer, self._input_ids, self._parents, self._previous_ids, self.lengths, self._counts
        )
        self._output: PassOutput
        self._predecessor = predecessor
        if predecessor is not None:
            self.lengths = predecessor.lengths + 1
            predecessor._output = predecessor._output.start_copy_to_host()
        self._sampled_ids = self.output_ids = self.paths = self._input_ids
        self.sizes = self._counts
        rows = zip(batch.sequences, self._input_ids, self._counts.tolist(), strict=True) if batch.has_grammars else ()
        self._grammars = [
            (s.grammar, input_ids[1:count].tolist()) for s, input_ids, count in rows if s.grammar is not None
        ]
        for grammar, tokens in self._grammars:  # slow masks start before the pass, which they slow down
            if grammar.was_late:
                grammar.start_masks(tokens)
        noise = None
        self.samples_in_pass = batch.is_greedy  # whether the pass itself samples the tokens
        if target.supports_noise and not batch.is_greedy:
            self.samples_in_pass = batch.samples_by_position and not self._has_trees
            noise = (
                batch.noise(self.lengths, self.width) if self.samples_in_pass else make_noise(self._rows, self.width)
            )
        parents = self._parents if self._has_trees else None
        if predecessor is None:
            self._output = target.forward(batch.slots, self._input_ids, self._counts, noise, parents)
        else:
            self._output = target.run_ahead(batch.slots, noise)
        self.samples_in_pass &= self._output.sampled is not None
        for grammar, tokens in self._grammars:
            if not grammar.was_late:
                grammar.start_masks(tokens)

    @cached_property
    def _rows(self) -> list[SamplingContext]:
        return [s.sampling_context(self._draft(b)) for b, s in enumerate(self.batch.sequences)]

    def _draft(self, b: int) -> Draft:
        return draft_of(self.batch.sequences[b].row.drafts[self.buffer])

    def draft(self, b: int, num_accepted: int) -> Draft:
        """Return the draft of sequence ``b``, which is valid until the next drafts are made.

        If the draft is a tree, ``Draft.path`` is set to its ``num_accepted`` accepted tokens. If no draft was
        requested, the result is the object EMPTY_DRAFT; if the drafter proposed nothing, it is another empty draft.
        """
        if not self.batch.sequences[b].row.was_drafted[self.buffer]:
            return EMPTY_DRAFT
        draft = self._draft(b)
        if draft.parents is not None:
            draft.path = (self.paths[b, 1 : 1 + num_accepted] - 1).astype(np.int32)
        return draft if len(draft.token_ids) else Draft(EMPTY_DRAFT.token_ids)

    def verify(self) -> None:
        """Wait for the forward pass, sample the target's tokens, and accept the draft tokens that match them.

        Afterwards the KV cache may still hold rejected tokens of draft chains, which the caller must remove. If the
        pass fails, its exception is raised, and the content of the KV cache is unknown.
        """
        counts, parents = self._counts, self._parents if self._has_trees else self._input_ids
        if self._predecessor is not None:
            self._read_predecessor(self._predecessor)
        self._output.wait()
        if self._grammars:
            self._output.logits[0, 0, 0].item()  # this waits for the device
            counts = np.minimum(counts, use_available_masks([sequence.grammar for sequence in self.batch.sequences]))
        self.failed = self._sample()
        self.paths, self.output_ids, self.sizes = accept_drafts(
            self._input_ids, self._sampled_ids, counts, parents, self._has_trees
        )
        if self._has_trees:
            paths = [path[:size] for path, size in zip(self.paths, self.sizes.tolist(), strict=True)]
            self._target.accept_paths(self.batch.slots, self._counts, paths)
        if self._grammars:
            self.sizes[counts == 0] = 0
            self.has_late_grammar = not counts.all()
        for b in self.failed:
            self.sizes[b] = 0
        if self._predecessor is not None:
            self._started, self._predecessor = max(self._started, self._predecessor.ended), None
            self.sizes[[sequence.finish_reason is not None for sequence in self.batch.sequences]] = 0
        self.ended = time.perf_counter()
        self.seconds = self.ended - self._started

    def _read_predecessor(self, predecessor: ForwardPass) -> None:
        self._previous_ids[:], self._input_ids[:, 0] = predecessor._input_ids[:, 0], predecessor.output_ids[:, 0]
        self._target.record_tokens(self.batch.slots, self.lengths - 1, self._input_ids)

    def logits(self, b: int) -> torch.Tensor:
        """Return the logits [n, V] from which the output tokens of sequence ``b`` were sampled, n >= ``sizes[b]``.

        Row i belongs to output token i.
        """
        logits = self._output.logits[b]
        if not self._has_trees:
            return logits
        return logits[torch.from_numpy(self.paths[b, : self.sizes[b]]).to(logits.device)]

    def _sample(self) -> dict[int, BaseException]:
        """Sample the target's tokens after every input token; return the exceptions, by the sequence that caused them.

        If sampling fails for the whole batch, each sequence is sampled alone, so that only the faulty one fails.
        """
        try:
            if self.samples_in_pass:
                assert self._output.sampled is not None
                self._sampled_ids = np.array(self._output.sampled.cpu().numpy())
            else:
                self._sampled_ids = np.ascontiguousarray(target_tokens(self._output, self._rows))
            return {}
        except BaseException as error:
            reraise_exits(error)
            self._sampled_ids = np.zeros_like(self._input_ids)
            if len(self.sizes) == 1:
                return {0: error}
        failed: dict[int, BaseException] = {}
        for b, row in enumerate(self._rows):
            try:
                self._sampled_ids[b] = target_tokens(self._output.row(b), [row])[0]
            except BaseException as error:
                reraise_exits(error)
                failed[b] = error
        return failed

    def scored_pass(self) -> ScoredPass:
        """Return the inputs of the pass with the target's top-k token ids and logits after each input token.

        Drafters learn from them. Call this after the output tokens were appended. Sequences without output have no
        entries.
        """
        num_positions, last_accepted = np.empty((2, len(self.sizes)), np.int64)
        find_accepted(self.batch.address, self.paths, self.sizes, self._counts, num_positions, last_accepted)
        top_ids, top_logits = self._output.top(num_positions)
        request_ids, learned, allow_caching = self.batch.row_namespaces()
        return ScoredPass(
            request_ids=request_ids,
            learned=learned,
            allow_caching=allow_caching,
            previous_ids=self._previous_ids,
            input_ids=self._input_ids,
            num_positions=num_positions,
            parents=self._parents if self._has_trees else None,
            sampled_ids=self._sampled_ids,
            last_accepted=last_accepted,
            top_ids=top_ids,
            top_logits=top_logits,
        )


@dataclass(slots=True, eq=False)
class CommittedPass:
    """A forward pass whose output tokens have been appended to the sequences."""

    forward_pass: ForwardPass
    # The result for each row on the slow path. For all other rows, the result is the first ``batch.committed[b]``
    # output tokens.
    slow_path: dict[int, Committed]

    @property
    def ended(self) -> list[int]:
        """The indices in the batch of the sequences that ended in this forward pass."""
        return [b for b, found in self.slow_path.items() if found.finish_reason is not None]

    def rows(self) -> list[int]:
        """Return the indices in the batch of all sequences for which the forward pass did not fail."""
        rows: list[int] = np.flatnonzero(self.forward_pass.batch.committed >= 0).tolist()
        return rows

    def outcome(self, b: int) -> DraftOutcome:
        """Return the record that tells the drafter how many draft tokens of sequence ``b`` were accepted.

        The draft in the record must be read before the next drafts are made, because they overwrite it.
        """
        forward_pass, sequence = self.forward_pass, self.forward_pass.batch.sequences[b]
        num_accepted = max(0, min(int(forward_pass.sizes[b]) - 1, int(forward_pass.batch.committed[b])))
        return DraftOutcome(
            sequence.request.request_id,
            lambda: forward_pass.draft(b, num_accepted),
            num_accepted,
            has_ended=sequence.finish_reason is not None,
        )

    def update_counts(self) -> None:
        update_row_counts(
            self.forward_pass.batch.address, self.forward_pass.buffer, self.forward_pass.sizes, time.perf_counter()
        )

    def by_row(self) -> Iterator[tuple[Sequence, Committed]]:
        """Yield each sequence that got output tokens, with these tokens. Call ``update_counts`` before."""
        forward_pass, batch = self.forward_pass, self.forward_pass.batch
        arrays = (
            batch.committed,
            batch.step_numbers,
            batch.sources,
            batch.num_drafted,
            batch.num_accepted,
            forward_pass.output_ids,
        )
        rows = zip(batch.sequences, *(array.tolist() for array in arrays), strict=True)
        for b, (sequence, count, number, source, num_drafted, num_accepted, output_ids) in enumerate(rows):
            if count > 0:
                name = source_name(source) if num_drafted else "none"
                sequence.draft = VerifiedDraft(number, name, num_drafted, num_accepted)
                found = self.slow_path.get(b)
                yield sequence, Committed(tuple(output_ids[:count]), output_ids[:count]) if found is None else found
