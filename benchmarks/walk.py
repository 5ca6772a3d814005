"""Decoding a recorded text with drafts: what a verify step accepts, and whole outputs step by step.

The recorded text is what the target says, so no model is needed. Ours and other people's drafters are walked by this
same code, theirs in their own process: nothing here imports ``ssd``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


UNSCORED_SHARE = 0.05
"""Estimates made during this first part of the output tokens are not judged: they are fitted while serving."""


class Counts:
    """Steps of all outputs under one setting."""

    def __init__(self, judge_after: int = 0) -> None:
        """``judge_after`` : estimates of the steps that begin within the first so many output tokens are left out."""
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        """Held by the index at the end; 0 where a drafter does not tell."""
        self.num_accepted_tokens = 0
        """The target's own token of each step is not among them."""
        self.steps_by_drafted: npt.NDArray[np.int64] = np.zeros(1, np.int64)
        """int64[k + 1], how many steps drafted 0, 1, ... k tokens."""
        self._judge_after = judge_after
        self._ns: list[npt.NDArray[np.int32]] = []
        self._estimates: list[npt.NDArray[np.float32]] = []
        self._hits: list[npt.NDArray[np.int32]] = []

    @property
    def num_verify_steps(self) -> int:
        """Forward passes of the target."""
        return int(self.steps_by_drafted.sum())

    @property
    def num_drafted_tokens(self) -> int:
        """Tokens the target had to check."""
        return int((self.steps_by_drafted * np.arange(len(self.steps_by_drafted))).sum())

    @property
    def propose_us(self) -> npt.NDArray[np.float64]:
        """float64[steps], the drafter's own calls."""
        return np.concatenate([np.empty(0, np.int32), *self._ns]) / 1e3

    @property
    def estimates(self) -> npt.NDArray[np.float64]:
        """float64[t], of the tokens whose predecessors were all accepted."""
        return np.concatenate([np.empty(0, np.float32), *self._estimates]).astype(np.float64)

    @property
    def hits(self) -> npt.NDArray[np.float64]:
        """float64[t], 1 where such a token was accepted, else 0."""
        return np.concatenate([np.empty(0, np.int32), *self._hits]).astype(np.float64)

    def add(self, steps: Steps, num_output_tokens: int) -> None:
        """One output. Its tokens must be those of its steps."""
        emitted = steps.accepted + 1
        if int(emitted.sum()) != num_output_tokens:
            raise AssertionError(f"{num_output_tokens} tokens came out of steps that emitted {emitted.sum()}")
        begins = self.num_output_tokens + np.cumsum(emitted) - emitted
        judged = np.repeat(begins >= self._judge_after, steps.tested)
        self._estimates.append(steps.estimates[judged])
        self._hits.append(steps.hits[judged])
        self._ns.append(steps.ns)
        added = np.bincount(steps.drafted, minlength=len(self.steps_by_drafted))
        added[: len(self.steps_by_drafted)] += self.steps_by_drafted
        self.steps_by_drafted = added
        self.num_output_tokens += num_output_tokens
        self.num_accepted_tokens += int(steps.accepted.sum())
