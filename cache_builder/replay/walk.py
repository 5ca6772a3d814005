"""Decoding a recorded text with drafts: what a verify step accepts, and whole outputs step by step.

The recorded text is what the target says, so no model is needed. Ours and other people's drafters are walked by this
same code, theirs in their own process: nothing here imports ``ssd``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


class Proposal(NamedTuple):
    """One draft and what it took."""

    ns: int
    """Nanoseconds of the drafter's own call."""
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    """Of each token the index of the one before it, smaller than its own; -1 after the context. None: a chain."""
    estimates: Sequence[float] | None = None
    """Chance of each token once those before it were accepted, where the drafter gives one."""


class Verdict(NamedTuple):
    """What became of a draft."""

    num_agreeing: int
    """Length of the longest branch, from the root on, that the text agrees with."""
    tested: list[int]
    """Indices of the tokens whose predecessors all agreed."""
    hits: list[bool]
    """Which of these agreed themselves."""


class Asker(Protocol):
    """One drafter under one setting, while it drafts for one output."""

    def ask(self, position: int) -> Proposal:
        """A draft of what stands at ``position`` and after it."""
        ...

    def tell(self, num_accepted: int) -> None:
        """How much of the last draft was accepted."""
        ...


@dataclass(frozen=True, slots=True)
class Steps:
    """The verify steps of one output, in order.

    ``drafted``, ``accepted``, ``tested`` : int32[s], tokens of each step; accepted leaves out the target's own token,
    tested counts the drafted tokens that have an estimate and whose predecessors agreed. ``ns`` : int32[s], of each
    proposal, at most 2^31 - 1. ``estimates`` : float32[t] and ``hits`` : int32[t], of the tested tokens of all steps.
    """

    drafted: Ints
    accepted: Ints
    tested: Ints
    ns: Ints
    estimates: npt.NDArray[np.float32]
    hits: Ints

    def to_arrays(self) -> list[Ints]:
        """Six int32 arrays, for a pipe that carries nothing else; the estimates bit for bit."""
        return [self.drafted, self.accepted, self.tested, self.ns, self.estimates.view(np.int32), self.hits]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Ints]) -> Self:
        """Undo `to_arrays`."""
        drafted, accepted, tested, ns, estimates, hits = arrays
        return cls(drafted, accepted, tested, ns, estimates.view(np.float32), hits)


def verify(token_ids: Sequence[int], parents: Sequence[int] | None, text: Sequence[int], position: int) -> Verdict:
    """Compare a draft with the text from ``position`` on; tokens beyond its end are not tested. O(tokens drafted)."""
    num_left = len(text) - position
    agreed: list[int] = []  # length of the agreeing branch that ends with each token, -1 where one of it is wrong
    tested: list[int] = []
    hits: list[bool] = []
    for index, token_id in enumerate(token_ids):
        parent = index - 1 if parents is None else parents[index]
        depth = 0 if parent < 0 else agreed[parent]
        if depth < 0 or depth >= num_left:
            agreed.append(-1)
            continue
        hit = token_id == text[position + depth]
        tested.append(index)
        hits.append(hit)
        agreed.append(depth + 1 if hit else -1)
    return Verdict(max([0, *agreed]), tested, hits)


def walk(text: Sequence[int], prompt_length: int, askers: Sequence[Asker]) -> list[Steps]:
    """Decode ``text`` from ``prompt_length`` on, once for each asker; returns their steps, in their order.

    A step emits the accepted part of the draft and one token more, which is the target's own and which no draft gave:
    so the text's last token is never counted as accepted, though a drafter that gave it is told so. The askers go
    through the text side by side: nobody is asked about a position before all were asked about those before it.
    """
    logs = [_Log() for _ in askers]
    positions = [prompt_length] * len(askers)
    end = len(text)
    while (position := min(positions, default=end)) < end:
        for number, asker in enumerate(askers):
            if positions[number] == position:
                proposal = asker.ask(position)
                verdict = verify(proposal.token_ids, proposal.parents, text, position)
                asker.tell(verdict.num_agreeing)
                accepted = min(verdict.num_agreeing, end - 1 - position)
                logs[number].add(proposal, verdict, accepted)
                positions[number] = position + accepted + 1
    return [log.steps() for log in logs]


class _Log:
    """Steps as they come."""

    def __init__(self) -> None:
        self._per_step: list[tuple[int, int, int, int]] = []
        self._estimates: list[float] = []
        self._hits: list[bool] = []

    def add(self, proposal: Proposal, verdict: Verdict, accepted: int) -> None:
        tested = 0
        if proposal.estimates is not None:
            tested = len(verdict.tested)
            self._estimates += [proposal.estimates[index] for index in verdict.tested]
            self._hits += verdict.hits
        self._per_step.append((len(proposal.token_ids), accepted, tested, min(proposal.ns, 2**31 - 1)))

    def steps(self) -> Steps:
        columns = np.array(self._per_step, np.int32).reshape(-1, 4).T.copy()
        drafted, accepted, tested, ns = columns
        estimates, hits = np.array(self._estimates, np.float32), np.array(self._hits, np.int32)
        return Steps(drafted, accepted, tested, ns, estimates, hits)
