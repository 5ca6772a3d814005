"""Decoding a recorded text with drafts: what a verify step accepts, and whole outputs step by step.

The recorded text is what the target says, so no model is needed. Other people's drafters are
walked by this code, in their own process: nothing here imports ``ssd``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


class Proposal(NamedTuple):
    """One draft and what it took.

    ``ns`` : nanoseconds of the drafter's own call. ``parents`` : of each token the index of the one before it, smaller
    than its own; -1 after the context. None: a chain.
    """

    ns: int
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None


Asker = Callable[[int], Proposal]
"""One drafter under one setting, for one output: a draft of what stands at a position and after it."""


class Steps(NamedTuple):
    """The verify steps of one output, in order: int32[s] each.

    ``drafted``, ``accepted`` : tokens; accepted leaves out the target's own token. ``ns`` : of the proposal, at most
    2^31 - 1.
    """

    drafted: Ints
    accepted: Ints
    ns: Ints


def agreeing(token_ids: Sequence[int], parents: Sequence[int] | None, text: Sequence[int], position: int) -> int:
    """Length of the longest branch, from the root on, that the text agrees with from ``position`` on. O(tokens)."""
    num_left = len(text) - position
    agreed: list[int] = []  # length of the agreeing branch that ends with each token, -1 where one of it is wrong
    for index, token_id in enumerate(token_ids):
        parent = index - 1 if parents is None else parents[index]
        depth = 0 if parent < 0 else agreed[parent]
        is_right = 0 <= depth < num_left and token_id == text[position + depth]
        agreed.append(depth + 1 if is_right else -1)
    return max([0, *agreed])


def walk(text: Sequence[int], prompt_length: int, askers: Sequence[Asker]) -> list[Steps]:
    """Decode ``text`` from ``prompt_length`` on, once for each asker; returns their steps, in their order.

    A step emits the accepted part of the draft and one token more, which is the target's own and which no draft gave:
    so the text's last token is never counted as accepted. The askers go through the text side by side: nobody is asked
    about a position before all were asked about those before it.
    """
    logs: list[list[tuple[int, int, int]]] = [[] for _ in askers]
    positions = [prompt_length] * len(askers)
    end = len(text)
    while (position := min(positions, default=end)) < end:
        for number, asker in enumerate(askers):
            if positions[number] == position:
                proposal = asker(position)
                num_agreeing = agreeing(proposal.token_ids, proposal.parents, text, position)
                accepted = min(num_agreeing, end - 1 - position)
                logs[number].append((len(proposal.token_ids), accepted, min(proposal.ns, 2**31 - 1)))
                positions[number] = position + accepted + 1
    return [Steps(*np.array(log, np.int32).reshape(-1, 3).T.copy()) for log in logs]


class Counts:
    """Steps of all outputs under one setting."""

    def __init__(self) -> None:
        self.num_output_tokens = 0
        self.num_accepted_tokens = 0
        """The target's own token of each step is not among them."""
        self.steps_by_drafted: npt.NDArray[np.int64] = np.zeros(1, np.int64)
        """int64[k + 1], how many steps drafted 0, 1, ... k tokens."""
        self._ns: list[Ints] = []

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

    def add(self, steps: Steps, num_output_tokens: int) -> None:
        """One output. Its tokens must be those of its steps."""
        emitted = int((steps.accepted + 1).sum())
        if emitted != num_output_tokens:
            raise AssertionError(f"{num_output_tokens} tokens came out of steps that emitted {emitted}")
        self._ns.append(steps.ns)
        added = np.bincount(steps.drafted, minlength=len(self.steps_by_drafted))
        added[: len(self.steps_by_drafted)] += self.steps_by_drafted
        self.steps_by_drafted = added
        self.num_output_tokens += num_output_tokens
        self.num_accepted_tokens += int(steps.accepted.sum())
