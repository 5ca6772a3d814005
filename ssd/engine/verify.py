"""One verify pass: feed drafts, chains or trees, and find how far the target agrees with each."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from ssd.config import DraftShape
from ssd.drafting.protocol import Draft, SamplingRow, ScoredPass
from ssd.engine.batch import Batch, begin_fed, count_rows
from ssd.engine.request import VerifiedDraft, number_of_source
from ssd.engine.sequence import Committed, Sequence
from ssd.errors import require_fault
from ssd.model.kv.tree import agree, is_tree, leading_chain, node_parents
from ssd.model.sampling.target_tokens import noise_of, target_tokens
from ssd.model.target import Target
from ssd.text.grammar import settle_masks

log = logging.getLogger(__name__)


def possible_shape(shape: DraftShape, target: Target) -> DraftShape:
    """The shape of drafts: what was asked for, or chains where the target verifies nothing else."""
    if target.can_verify_trees:
        return shape
    if shape == "tree":
        log.warning("driven %s, the model verifies chains only: drafts are chains", target.way)
    return "chain"


def branches(shape: DraftShape, num_rows: int) -> bool:
    """Whether a pass of ``num_rows`` rows drafts trees. "auto" means: where one sequence runs alone.

    So it measured better on a CPU: a tree brings more accepted tokens to a row, but all rows are padded to the widest.
    """
    return shape == "tree" or (shape == "auto" and num_rows == 1)


def usable(draft: Draft, limit: int, *, vocab_size: int, allow_tree: bool) -> Draft | None:
    """The draft cut to ``limit`` tokens; None where it is no draft: a token or a parent that cannot be.

    A tree that is a chain, or the chain that a tree begins with where trees cannot be verified, is given as a chain.
    """
    tokens, parents = draft.token_ids, draft.parents
    if parents is not None:
        if not is_tree(parents, len(tokens)):
            return None
        straight = leading_chain(parents)
        if straight == len(tokens) or not allow_tree:
            draft = Draft(tokens, draft.match_length, draft.source, draft.probabilities).cut(straight)
    draft = draft.cut(limit)
    tokens = draft.token_ids.tolist()  # of few numbers Python finds the least sooner than numpy does
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        return None
    return draft


def warm_up_verification() -> None:
    """Compile what compares drafts with what the target says."""
    one = np.zeros((1, 1), np.int64)
    agree(one, one, np.ones(1, np.int64), one, False)


class Pass:
    """A verify pass: every sequence's last token and draft, fed at once. `verify` must be called, once, before the next
    pass begins.

    ``seconds`` : what it took, once that is known. ``sizes`` : int64[B], how many tokens each row says, the accepted
    ones and one more, the target's own; 0 where that raised, see ``failed``, and where its grammar takes longer than
    the pass. ``said`` : int64[B, T], these tokens.
    """

    def __init__(self, target: Target, batch: Batch, drafts: Rows[Draft]) -> None:
        """Begin the pass; a device that runs beside the host computes from here on."""
        self.batch, self.drafts = batch, drafts
        self.seconds = 0.0
        self.failed: dict[int, BaseException] = {}
        self.is_late = False
        self._target = target
        self._started = time.perf_counter()
        self._count_list = [len(draft.token_ids) + 1 for draft in drafts]
        self._counts, width = np.array(self._count_list), max(self._count_list)
        self._has_trees = width > 1 and any(draft.parents is not None for draft in drafts)
        self._fed, self._before = np.zeros((len(drafts), width), np.int64), np.empty(len(drafts), np.int32)
        lengths = np.empty_like(self._counts)
        begin_fed(batch.address, self._fed, self._before, lengths)
        if width > 1:
            for row, draft, count in zip(self._fed, drafts, self._count_list, strict=True):
                row[1:count] = draft.token_ids
        self._parents = node_parents([draft.parents for draft in drafts], width) if self._has_trees else None
        self._chosen = self.said = self._paths = self._fed
        self.sizes = self._counts
        rows = zip(batch.sequences, drafts, strict=True) if batch.is_ruled else ()
        self._ruled = [(s.grammar, d.token_ids) for s, d in rows if s.grammar is not None]
        for grammar, tokens in self._ruled:  # those that take long have the whole pass, and disturb it
            if grammar.was_late:
                grammar.begin(tokens)
        noise = None
        self._is_chosen = batch.is_plain
        if target.takes_noise and not batch.is_plain:
            self._is_chosen = batch.chooses_by_position and not self._has_trees
            noise = batch.noise(lengths, width) if self._is_chosen else noise_of(self._rows, width)
        self._output = target.forward(batch.slot_list, self._fed, self._count_list, noise, self._parents)
        for grammar, tokens in self._ruled:
            if not grammar.was_late:
                grammar.begin(tokens)

    @cached_property
    def _rows(self) -> list[SamplingRow]:
        return [s.sampling_row(draft) for s, draft in zip(self.batch.sequences, self.drafts, strict=True)]

    def verify(self) -> None:
        """Wait for the pass and see what each row says.

        The slots then hold the context and the accepted tokens, or more where a chain was rejected: the caller lowers
        them to what is committed. Raises where the pass itself failed: what the slots hold is then not known.
        """
        counts, parents = self._counts, self._fed if self._parents is None else self._parents
        if self._ruled:
            self._output.logits[0, 0, 0].item()  # waits for the device
            counts = np.minimum(counts, settle_masks([sequence.grammar for sequence in self.batch.sequences]))
        self.failed = self._choose()
        self._paths, self.said, self.sizes = agree(self._fed, self._chosen, counts, parents, self._has_trees)
        if self._has_trees:
            paths = [path[:size] for path, size in zip(self._paths, self.sizes.tolist(), strict=True)]
            self._target.keep_paths(self.batch.slot_list, self._count_list, paths)
        self.seconds = time.perf_counter() - self._started
        if self._ruled:
            self.sizes[counts == 0] = 0
            self.is_late = not counts.all()
        for b in self.failed:
            self.sizes[b] = 0

    def path(self, b: int) -> npt.NDArray[np.int32] | None:
        """The accepted tokens' indices in the draft of row ``b``, int32[accepted]; None of a chain."""
        if self.drafts[b].parents is None:
            return None
        return (self._paths[b, 1 : self.sizes[b]] - 1).astype(np.int32)

    def logits(self, b: int) -> torch.Tensor:
        """The model's own, [>= tokens said, V]: row i for the i-th token that row ``b`` said."""
        logits = self._output.logits[b]
        if self.drafts[b].parents is None:
            return logits
        return logits[torch.from_numpy(self._paths[b, : self.sizes[b]]).to(logits.device)]

    def _choose(self) -> dict[int, BaseException]:
        """Ask for the target's tokens; after a failure for those of each row alone. What those raised that fail."""
        try:
            if self._output.chosen is not None and self._is_chosen:
                self._chosen = np.array(self._output.chosen.cpu().numpy())
            else:
                self._chosen = np.ascontiguousarray(target_tokens(self._output, self._rows))
            return {}
        except BaseException as error:
            require_fault(error)
            self._chosen = np.zeros_like(self._fed)
            if len(self.drafts) == 1:
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
        request_ids, learned, may_keep = self.batch.owners()
        return ScoredPass(
            request_ids=request_ids,
            learned=learned,
            may_keep=may_keep,
            before=self._before,
            fed=self._fed,
            counts=used,
            parents=self._parents,
            chosen=self._chosen,
            ends=np.where(is_said, self._paths[np.arange(len(used)), self.sizes - 1], -1),
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
        batch, drafts = self.ended.batch, self.ended.drafts
        batch.drafted[:] = [len(draft.token_ids) for draft in drafts]
        if batch.drafted.any():
            batch.sources[:] = [number_of_source(draft.source) for draft in drafts]
        count_rows(batch.address, self.ended.sizes, time.perf_counter())

    def by_row(self) -> Iterator[tuple[Sequence, Committed]]:
        """The sequences that took something and what, in order; once that is counted."""
        ended, batch = self.ended, self.ended.batch
        counts = batch.taken.tolist(), batch.accepted.tolist(), batch.numbers.tolist()
        rows = zip(batch.sequences, ended.drafts, *counts, ended.said.tolist(), strict=True)
        for b, (sequence, draft, count, num_accepted, number, said) in enumerate(rows):
            if count > 0:
                sequence.draft = VerifiedDraft(number, draft.source, len(draft.token_ids), num_accepted)
                found = self.special.get(b)
                yield sequence, Committed(tuple(said[:count]), said[:count]) if found is None else found
