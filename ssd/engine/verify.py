"""One verify pass: feed drafts, chains or trees, and find how far the target agrees with each."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ssd.drafting.draft_records import source_name
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, SamplingRow, ScoredPass
from ssd.drafting.suffix_drafter import draft_of
from ssd.engine.acceptance import accept_drafts
from ssd.engine.batch import Batch, begin_fed, count_rows
from ssd.engine.request import VerifiedDraft
from ssd.engine.sequence import Committed, Sequence
from ssd.errors import require_fault
from ssd.model.sampling.sampler import PassOutput
from ssd.model.sampling.target_tokens import make_noise, target_tokens
from ssd.model.target import Target
from ssd.text.grammar import settle_masks

log = logging.getLogger(__name__)


def warm_up_verification() -> None:
    """Compile what compares drafts with what the target says."""
    one = np.zeros((1, 1), np.int64)
    accept_drafts(one, one, np.ones(1, np.int64), one, False)


class Pass:
    """A verify pass: every sequence's last token and draft, fed at once. `verify` must be called, once, before the next
    pass begins, but for one that begins ``behind`` this: it has no drafts, and its tokens are those that this one says.

    ``seconds`` : what it took, and when it ``ended``, once that is known. ``is_chosen`` : whether the pass itself
    chooses tokens. ``sizes`` : int64[B], how many tokens each row says, the accepted ones and one more, the target's
    own; 0 where that raised, see ``failed``, and where its grammar takes longer than the pass. ``said`` : int64[B, T],
    these tokens, ``paths`` : int64[B, T], the positions that were right. ``width`` : T. ``turn`` : of the drafts, see
    `Row`. ``lengths`` : int64[B], tokens of each row, the last one of which is fed.
    """

    def __init__(self, target: Target, batch: Batch, turn: int, behind: Pass | None = None) -> None:
        """Begin the pass; a device that runs beside the host computes from here on."""
        self.batch, self.turn = batch, turn
        self.seconds = self.ended = 0.0
        self.failed: dict[int, BaseException] = {}
        self.is_late = False
        self._target = target
        self._started = time.perf_counter()
        num_rows, self.width = len(batch.sequences), batch.frame.width
        self._has_trees = batch.frame.has_trees == 1
        self._fed = np.empty((num_rows, self.width), np.int64)
        self._parents = np.empty((num_rows, self.width if self._has_trees else 0), np.int64)
        self._before = np.empty(num_rows, np.int32)
        self.lengths, self._counts = np.empty((2, num_rows), np.int64)
        begin_fed(batch.address, turn, self._fed, self._parents, self._before, self.lengths, self._counts)
        self._output: PassOutput
        self._after = behind
        if behind is not None:
            self.lengths = behind.lengths + 1
            behind._output = behind._output.start_copy_to_host()
        self._chosen = self.said = self.paths = self._fed
        self.sizes = self._counts
        rows = zip(batch.sequences, self._fed, self._counts.tolist(), strict=True) if batch.is_ruled else ()
        self._ruled = [(s.grammar, fed[1:count].tolist()) for s, fed, count in rows if s.grammar is not None]
        for grammar, tokens in self._ruled:  # those that take long have the whole pass, and disturb it
            if grammar.was_late:
                grammar.begin(tokens)
        noise = None
        self.is_chosen = batch.is_plain
        if target.supports_noise and not batch.is_plain:
            self.is_chosen = batch.chooses_by_position and not self._has_trees
            noise = batch.noise(self.lengths, self.width) if self.is_chosen else make_noise(self._rows, self.width)
        parents = self._parents if self._has_trees else None
        if behind is None:
            self._output = target.forward(batch.slots, self._fed, self._counts, noise, parents)
        else:
            self._output = target.run_ahead(batch.slots, noise)
        self.is_chosen &= self._output.sampled is not None
        for grammar, tokens in self._ruled:
            if not grammar.was_late:
                grammar.begin(tokens)

    @cached_property
    def _rows(self) -> list[SamplingRow]:
        return [s.sampling_row(self._draft(b)) for b, s in enumerate(self.batch.sequences)]

    def _draft(self, b: int) -> Draft:
        return draft_of(self.batch.sequences[b].row.verified[self.turn])

    def draft(self, b: int) -> Draft:
        """What was drafted for row ``b``, of a tree with its path; before the next pass is drafted for.

        EMPTY_DRAFT where it was not drafted for; another where that gave nothing.
        """
        if not self.batch.sequences[b].row.was_asked[self.turn]:
            return EMPTY_DRAFT
        draft = self._draft(b)
        if draft.parents is not None:
            draft.path = (self.paths[b, 1 : self.sizes[b]] - 1).astype(np.int32)
        return draft if len(draft.token_ids) else Draft(EMPTY_DRAFT.token_ids)

    def verify(self) -> None:
        """Wait for the pass and see what each row says.

        The slots then hold the context and the accepted tokens, or more where a chain was rejected: the caller lowers
        them to what is committed. Raises where the pass itself failed: what the slots hold is then not known.
        """
        counts, parents = self._counts, self._parents if self._has_trees else self._fed
        if self._after is not None:
            self._take_from(self._after)
        self._output.wait()
        if self._ruled:
            self._output.logits[0, 0, 0].item()  # waits for the device
            counts = np.minimum(counts, settle_masks([sequence.grammar for sequence in self.batch.sequences]))
        self.failed = self._choose()
        self.paths, self.said, self.sizes = accept_drafts(self._fed, self._chosen, counts, parents, self._has_trees)
        if self._has_trees:
            paths = [path[:size] for path, size in zip(self.paths, self.sizes.tolist(), strict=True)]
            self._target.accept_paths(self.batch.slots, self._counts, paths)
        if self._ruled:
            self.sizes[counts == 0] = 0
            self.is_late = not counts.all()
        for b in self.failed:
            self.sizes[b] = 0
        if self._after is not None:
            self._started, self._after = max(self._started, self._after.ended), None
            self.sizes[[sequence.finish_reason is not None for sequence in self.batch.sequences]] = 0
        self.ended = time.perf_counter()
        self.seconds = self.ended - self._started

    def _take_from(self, before: Pass) -> None:
        """What was fed is known now."""
        self._before[:], self._fed[:, 0] = before._fed[:, 0], before.said[:, 0]
        self._target.record_tokens(self.batch.slots, self.lengths - 1, self._fed)

    def logits(self, b: int) -> torch.Tensor:
        """The model's own, [>= tokens said, V]: row i for the i-th token that row ``b`` said."""
        logits = self._output.logits[b]
        if not self._has_trees:
            return logits
        return logits[torch.from_numpy(self.paths[b, : self.sizes[b]]).to(logits.device)]

    def _choose(self) -> dict[int, BaseException]:
        """Ask for the target's tokens; after a failure for those of each row alone. What those raised that fail."""
        try:
            if self.is_chosen:
                assert self._output.sampled is not None
                self._chosen = np.array(self._output.sampled.cpu().numpy())
            else:
                self._chosen = np.ascontiguousarray(target_tokens(self._output, self._rows))
            return {}
        except BaseException as error:
            require_fault(error)
            self._chosen = np.zeros_like(self._fed)
            if len(self.sizes) == 1:
                return {0: error}
        failed: dict[int, BaseException] = {}
        for b, row in enumerate(self._rows):
            try:
                self._chosen[b] = target_tokens(self._output.row(b), [row])[0]
            except BaseException as error:
                require_fault(error)
                failed[b] = error
        return failed

    def scored(self) -> ScoredPass:
        """What the target said at every position; once it is known what is ``said``, before any of that is taken."""
        is_said = self.sizes > 0
        used = np.where(is_said, self._counts, 0)
        top_ids, top_logits = self._output.top(used.tolist())
        request_ids, learned, allow_caching = self.batch.owners()
        return ScoredPass(
            request_ids=request_ids,
            learned=learned,
            allow_caching=allow_caching,
            previous_ids=self._before,
            input_ids=self._fed,
            num_positions=used,
            parents=self._parents if self._has_trees else None,
            sampled_ids=self._chosen,
            last_accepted=np.where(is_said, self.paths[np.arange(len(used)), self.sizes - 1], -1),
            top_ids=top_ids,
            top_logits=top_logits,
        )


@dataclass(slots=True, eq=False)
class Taken:
    """What a pass that has ended gave its rows.

    ``special`` : of rows that more was done for than to append tokens. The others' are the first of what was said, as
    many as the batch says.
    """

    ended: Pass
    special: dict[int, Committed]

    def count(self) -> None:
        """Count it in the rows and in the batch; in the step in which it was taken."""
        count_rows(self.ended.batch.address, self.ended.turn, self.ended.sizes, time.perf_counter())

    def by_row(self) -> Iterator[tuple[Sequence, Committed]]:
        """The sequences that took something and what, in order; once that is counted."""
        ended, batch = self.ended, self.ended.batch
        arrays = batch.taken, batch.numbers, batch.sources, batch.drafted, batch.accepted, ended.said
        rows = zip(batch.sequences, *(array.tolist() for array in arrays), strict=True)
        for b, (sequence, count, number, source, num_drafted, num_accepted, said) in enumerate(rows):
            if count > 0:
                name = source_name(source) if num_drafted else "none"
                sequence.draft = VerifiedDraft(number, name, num_drafted, num_accepted)
                found = self.special.get(b)
                yield sequence, Committed(tuple(said[:count]), said[:count]) if found is None else found
