"""One verify pass: feed drafts, chains or trees, and find how far the target agrees with each."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ssd.config import DraftShape
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, ScoredPass
from ssd.engine.audience import Audience
from ssd.engine.sequence import Sequence
from ssd.errors import require_fault
from ssd.model.kv.tree import is_tree, leading_chain, node_parents
from ssd.model.sampling.pass_noise import noise_of
from ssd.model.sampling.target_tokens import target_tokens
from ssd.model.target import Target
from ssd.model.verification import accepted_length, accepted_path

log = logging.getLogger(__name__)

_FIRST_NODE = np.zeros(1, np.int64)
"""The path of a row without a draft."""
_NO_NODE = np.zeros(0, np.int64)
"""The path of a row that failed."""


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What the target says to one row.

    ``token_ids`` : the accepted tokens and one more, the target's own. ``path`` : int32[accepted], the accepted
    tokens' indices in the draft. ``logits`` : [>= len(token_ids), V], the model's own, row i for token i.
    """

    token_ids: list[int]
    path: npt.NDArray[np.int32]
    logits: torch.Tensor


def possible_shape(shape: DraftShape, target: Target) -> DraftShape:
    """The shape of drafts: what was asked for, or chains where the target verifies nothing else."""
    if target.can_verify_trees:
        return shape
    if shape == "tree":
        log.warning("driven %s, the model verifies chains only: drafts are chains", target.way)
    return "chain"


def branches(shape: DraftShape, num_rows: int) -> bool:
    """Whether a pass of ``num_rows`` rows drafts trees. "auto" means: where one sequence runs alone.

    So it measured better with ``benchmarks.draft_shape`` on a CPU: a tree brings more accepted tokens to a row, but
    all rows are padded to the widest.
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
    tokens = draft.token_ids
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        return None
    return draft


class Pass:
    """A verify pass: every sequence's last token and draft, fed at once. ``verdicts`` must be asked for, once, before
    the next pass begins.

    ``seconds`` : what it took, once its verdicts are known.
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
        self._rows = [sequence.sampling_row(draft) for sequence, draft in zip(batch, drafts, strict=True)]
        self._parents = node_parents([draft.parents for draft in drafts], width) if self._has_trees else None
        self._chosen: npt.NDArray[np.int64] = np.zeros(self._fed.shape, np.int64)
        self._paths: list[npt.NDArray[np.int64]] = []
        noise = noise_of(self._rows, width) if target.takes_noise else None
        if self._parents is not None:
            self._output = target.forward_trees(self._slots, self._fed, self._counts, self._parents, noise)
        else:
            self._output = target.forward(self._slots, self._fed, self._counts, noise)

    def verdicts(self) -> list[Verdict | BaseException]:
        """How far the target agrees with each draft, once the pass is done; of a row that fails, what it raised.

        The slots then hold the context and the accepted tokens, or more where a chain was rejected: the caller lowers
        them to what is committed. Raises where the pass itself failed: what the slots hold is then not known.
        """
        chosen = self._choose()
        nodes = [
            _agreeing(draft, row) if isinstance(row, np.ndarray) and len(draft.token_ids) else _FIRST_NODE
            for draft, row in zip(self.drafts, chosen, strict=True)
        ]
        if self._has_trees:
            self._target.keep_paths(self._slots, self._counts, nodes)
        self._paths = [
            path if isinstance(row, np.ndarray) else _NO_NODE for row, path in zip(chosen, nodes, strict=True)
        ]
        self.seconds = time.perf_counter() - self._started
        rows = zip(chosen, nodes, self._output.logits, self.drafts, strict=True)
        return [
            _verdict(row, path, scores, draft) if isinstance(row, np.ndarray) else row
            for row, path, scores, draft in rows
        ]

    def _choose(self) -> list[npt.NDArray[np.int64] | BaseException]:
        """The target's tokens of each row; after a failure each row alone, and of one that fails, what it raised."""
        try:
            self._chosen = target_tokens(self._output, self._rows)
            return list(self._chosen)
        except BaseException as error:
            require_fault(error)
            if len(self._rows) == 1:
                return [error]
        chosen: list[npt.NDArray[np.int64] | BaseException] = []
        for b, row in enumerate(self._rows):
            try:
                self._chosen[b] = target_tokens(self._output.row(b), [row])[0]
                chosen.append(self._chosen[b])
            except BaseException as error:
                require_fault(error)
                chosen.append(error)
        return chosen

    def scored(self, audience: Audience) -> ScoredPass:
        """What the target said at every position; once verdicts are known, before any of their tokens is taken."""
        used = self._counts
        if not all(map(len, self._paths)):
            used = [count if len(path) else 0 for count, path in zip(used, self._paths, strict=True)]
        top_ids, top_logits = self._output.top(used)
        return ScoredPass(
            request_ids=audience.request_ids,
            learned=audience.learned,
            may_keep=audience.may_keep,
            before=self._before,
            fed=self._fed,
            counts=np.array(used, np.int64),
            parents=self._parents,
            chosen=np.ascontiguousarray(self._chosen),
            paths=self._paths,
            top_ids=top_ids,
            top_logits=top_logits,
        )


def _fed(batch: Rows[Sequence], drafts: Rows[Draft], width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Each row's last token and draft, int64[B, width], padded with 0; and the token before, int32[B], -1 for none."""
    fed, before = np.zeros((len(batch), width), np.int64), np.full(len(batch), -1, np.int32)
    for b, (sequence, draft) in enumerate(zip(batch, drafts, strict=True)):
        tokens, end = sequence.tokens, sequence.num_tokens
        fed[b, 0] = tokens[end - 1]
        if end > 1:
            before[b] = tokens[end - 2]
        if len(draft.token_ids):
            fed[b, 1 : 1 + len(draft.token_ids)] = draft.token_ids
    return fed, before


def _verdict(chosen: npt.NDArray[np.int64], path: npt.NDArray[np.int64], logits: torch.Tensor, draft: Draft) -> Verdict:
    if path is _FIRST_NODE:  # most rows of text that nobody knows
        return Verdict([int(chosen[0])], EMPTY_DRAFT.token_ids, logits)
    if draft.parents is not None:
        logits = logits[torch.from_numpy(path).to(logits.device)]
    return Verdict(chosen[path].tolist(), (path[1:] - 1).astype(np.int32), logits)


def _agreeing(draft: Draft, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if draft.parents is None:
        return np.arange(accepted_length(draft.token_ids, chosen) + 1)
    return accepted_path(draft.token_ids, draft.parents, chosen)
