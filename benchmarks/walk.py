"""Decoding a recorded text with drafts: what a verify step accepts, and whole outputs step by step.

The recorded text is what the target says, so no model is needed. Other people's drafters are
walked by this code, in their own process: nothing here imports ``ssd``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]

Setting = dict[str, float | str]
"""Names and values of somebody else's own knobs; a boolean counts as a number."""


class Proposal(NamedTuple):
    """One draft. ``parents`` : of each token the index of the one before it, below its own, or -1; None: a chain."""

    token_ids: Sequence[int]
    parents: Sequence[int] | None = None


Asker = Callable[[int], Proposal]
"""One drafter under one setting, for one output: a draft of what stands at a position and after it."""


class Steps(NamedTuple):
    """The verify steps of one output, in order: int32[s] tokens each; accepted leaves out the target's own token."""

    drafted: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.int32]


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
    logs: list[list[tuple[int, int]]] = [[] for _ in askers]
    positions = [prompt_length] * len(askers)
    end = len(text)
    while (position := min(positions, default=end)) < end:
        for number, asker in enumerate(askers):
            if positions[number] == position:
                proposal = asker(position)
                num_agreeing = agreeing(proposal.token_ids, proposal.parents, text, position)
                accepted = min(num_agreeing, end - 1 - position)
                logs[number].append((len(proposal.token_ids), accepted))
                positions[number] = position + accepted + 1
    return [Steps(*np.array(log, np.int32).reshape(-1, 2).T.copy()) for log in logs]


class LocalPeer(Protocol):
    """One drafter. Token ids are contiguous, writable int32[n]; the caller may not change them later."""

    distributions: tuple[str, ...]
    """What it is made of: the installed packages whose versions identify it."""

    def apart(self, max_tokens: int, setting: Setting) -> Self:
        """Who drafts under a setting: itself where what it knows depends on texts alone, else a new peer that knows
        nothing."""

    def start(self, request_id: str, prompt: TokenIds) -> None:
        """Begin a request."""

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Proposal:
        """Draft for a running request whose prompt and output so far are ``context``."""

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        """Tell a running request what was accepted."""

    def stop(self, request_id: str) -> None:
        """End a request, whose output stays for later ones where the peer keeps any."""


def together(outputs: Sequence[Steps]) -> Steps:
    """The steps of outputs, one after another."""
    if not outputs:
        return Steps(*np.empty((2, 0), np.int32))
    return Steps(*(np.concatenate(columns) for columns in zip(*outputs, strict=True)))
