"""One verify pass: feed drafts, chains or trees, and find how far the target agrees with each."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from ssd.config import DraftShape
from ssd.drafting.protocol import Draft, SamplingRow, ScoredPass
from ssd.engine.sequence import Sequence
from ssd.errors import require_fault
from ssd.model.kv.tree import agree, is_tree, leading_chain, node_parents
from ssd.model.sampling.target_tokens import noise_of, target_tokens
from ssd.model.target import Target
from ssd.retrieval.cache_state import LearnedState
from ssd.text.grammar import settle_masks


@dataclass(frozen=True, slots=True, eq=False)
class RowOwners:
    """Of each row of a batch, ``request_ids``, ``learned`` and ``may_keep`` as ``ScoredPass`` has them."""

    batch: Rows[Sequence]
    request_ids: list[str]
    learned: list[LearnedState | None]
    may_keep: npt.NDArray[np.bool_]
    is_final: bool
    """Whether all caches are open: what is learned of a namespace has a place only then."""

    @classmethod
    def of(cls, batch: Rows[Sequence], known: RowOwners | None) -> RowOwners:
        """That of ``batch``; ``known``, the one before it, where that is the same. O(rows)."""
        if known is not None and known.is_final and known.batch == batch:
            return known
        names, learned, may_keep, is_final = list[str](), list[LearnedState | None](), list[bool](), True
        for sequence in batch:
            request, namespace = sequence.request, sequence.namespace
            cache = None if namespace is None else namespace.cache
            names.append(request.request_id)
            learned.append(None if cache is None else cache.learned)
            may_keep.append(cache is not None and request.learn)
            is_final = is_final and (cache is not None or namespace is None)
        return cls(batch, names, learned, np.array(may_keep), is_final)


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
    """A verify pass: every sequence's last token and draft, fed at once. What is ``said`` must be asked for, once,
    before the next pass begins.

    ``seconds`` : what it took, once that is known.
    """

    def __init__(self, target: Target, batch: Rows[Sequence], drafts: Rows[Draft]) -> None:
        """Begin the pass; a device that runs beside the host computes from here on."""
        self.batch, self.drafts = batch, drafts
        self.seconds = 0.0
        self._target = target
        self._started = time.perf_counter()
        self._slots = [sequence.slot for sequence in batch]
        self._counts = [len(draft.token_ids) + 1 for draft in drafts]
        self._has_trees = any(draft.parents is not None for draft in drafts)
        width = max(self._counts)
        self._fed, self._before = _fed(batch, drafts, width)
        self._parents = node_parents([draft.parents for draft in drafts], width) if self._has_trees else None
        self._chosen: npt.NDArray[np.int64] = np.zeros(self._fed.shape, np.int64)
        self._paths, self._sizes = self._chosen, np.zeros(len(batch), np.int64)
        self._is_plain = all(sequence.is_plain for sequence in batch)
        rows = zip(batch, drafts, strict=True)
        self._ruled = [] if self._is_plain else [(s.grammar, d.token_ids) for s, d in rows if s.grammar is not None]
        for grammar, tokens in self._ruled:  # those that take long have the whole pass, and disturb it
            if grammar.was_late:
                grammar.begin(tokens)
        noise = None
        if target.takes_noise and not self._is_plain:
            noise = noise_of(self._rows, width)
        if self._parents is not None:
            self._output = target.forward_trees(self._slots, self._fed, self._counts, self._parents, noise)
        else:
            self._output = target.forward(self._slots, self._fed, self._counts, noise)
        for grammar, tokens in self._ruled:
            if not grammar.was_late:
                grammar.begin(tokens)

    @cached_property
    def _rows(self) -> list[SamplingRow]:
        return [sequence.sampling_row(draft) for sequence, draft in zip(self.batch, self.drafts, strict=True)]

    def said(self) -> list[list[int] | BaseException]:
        """Of each row, once the pass is done, the accepted tokens and one more, the target's own; or what it raised.
        Nothing of a row whose grammar takes longer than the pass.

        The slots then hold the context and the accepted tokens, or more where a chain was rejected: the caller lowers
        them to what is committed. Raises where the pass itself failed: what the slots hold is then not known.
        """
        counts, parents = np.array(self._counts), self._fed if self._parents is None else self._parents
        if self._ruled:
            self._output.logits[0, 0, 0].item()  # waits for the device
            counts = np.minimum(counts, settle_masks([sequence.grammar for sequence in self.batch]))
        failed = self._choose()
        self._paths, said, self._sizes = agree(self._fed, self._chosen, counts, parents, self._has_trees)
        sizes = self._sizes.tolist()
        if self._has_trees:
            paths = [path[:size] for path, size in zip(self._paths, sizes, strict=True)]
            self._target.keep_paths(self._slots, self._counts, paths)
        self.seconds = time.perf_counter() - self._started
        rows: list[list[int] | BaseException] = [row[:size] for row, size in zip(said.tolist(), sizes, strict=True)]
        for b in np.flatnonzero(counts == 0).tolist():
            rows[b], self._sizes[b] = [], 0
        for b, error in failed.items():
            rows[b], self._sizes[b] = error, 0
        return rows

    def path(self, b: int) -> npt.NDArray[np.int32] | None:
        """The accepted tokens' indices in the draft of row ``b``, int32[accepted]; None of a chain."""
        if self.drafts[b].parents is None:
            return None
        return (self._paths[b, 1 : self._sizes[b]] - 1).astype(np.int32)

    def logits(self, b: int) -> torch.Tensor:
        """The model's own, [>= tokens said, V]: row i for the i-th token that row ``b`` said."""
        logits = self._output.logits[b]
        if self.drafts[b].parents is None:
            return logits
        return logits[torch.from_numpy(self._paths[b, : self._sizes[b]]).to(logits.device)]

    def _choose(self) -> dict[int, BaseException]:
        """Ask for the target's tokens; after a failure for those of each row alone. What those raised that fail."""
        try:
            if self._output.chosen is not None and self._is_plain:
                self._chosen = np.array(self._output.chosen.cpu().numpy())
            else:
                self._chosen = np.ascontiguousarray(target_tokens(self._output, self._rows))
            return {}
        except BaseException as error:
            require_fault(error)
            if len(self.batch) == 1:
                return {0: error}
        failed: dict[int, BaseException] = {}
        for b, row in enumerate(self._rows):
            try:
                self._chosen[b] = target_tokens(self._output.row(b), [row])[0]
            except BaseException as error:
                require_fault(error)
                failed[b] = error
        return failed

    def scored(self, owners: RowOwners) -> ScoredPass:
        """What the target said at every position; once it is known what is ``said``, before any of that is taken."""
        used = np.where(self._sizes > 0, self._counts, 0)
        top_ids, top_logits = self._output.top(used.tolist())
        return ScoredPass(
            request_ids=owners.request_ids,
            learned=owners.learned,
            may_keep=owners.may_keep,
            before=self._before,
            fed=self._fed,
            counts=used,
            parents=self._parents,
            chosen=self._chosen,
            ends=np.where(self._sizes > 0, self._paths[np.arange(len(used)), self._sizes - 1], -1),
            top_ids=top_ids,
            top_logits=top_logits,
        )


def _fed(batch: Rows[Sequence], drafts: Rows[Draft], width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Each row's last token and draft, int64[B, width], padded with 0; and the token before, int32[B], -1 for none."""
    ends = [
        sequence.tokens[sequence.num_tokens - 2 : sequence.num_tokens].tolist()
        if sequence.num_tokens > 1
        else [-1, int(sequence.tokens[0])]
        for sequence in batch
    ]
    fed = np.zeros((len(batch), width), np.int64)
    fed[:, 0] = [last for _, last in ends]
    if width > 1:
        for row, draft in zip(fed, drafts, strict=True):
            row[1 : 1 + len(draft.token_ids)] = draft.token_ids
    return fed, np.array([before for before, _ in ends], np.int32)
