"""Replay of a recorded text with drafts: the number of accepted tokens of one draft, and all steps of an output.

The recorded text takes the place of the target's output, so no model is needed. Processes of other projects' drafters
run this code too; therefore it does not import ``ssd``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]

Setting = dict[str, float | str]
"""The parameters of another project's drafter by name; a boolean is a number."""


class Proposal(NamedTuple):
    """A draft. ``parents`` holds the index of each token's parent, which precedes it, or -1; None for a chain."""

    token_ids: Sequence[int]
    parents: Sequence[int] | None = None


Asker = Callable[[int], Proposal]
"""A function that drafts the tokens from a given position of the output on, for one drafter with one setting."""


class Steps(NamedTuple):
    """The drafted and the accepted tokens of each verification step of an output, int32[s] each.

    The token that the target itself adds in each step is not counted as accepted.
    """

    drafted: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.int32]


def agreeing(token_ids: Sequence[int], parents: Sequence[int] | None, text: Sequence[int], position: int) -> int:
    """Return the length of the longest branch, from the root, that equals the text from ``position`` on. O(tokens)."""
    num_left = len(text) - position
    agreed: list[int] = []  # length of the agreeing branch that ends with each token, -1 where one of it is wrong
    for index, token_id in enumerate(token_ids):
        parent = index - 1 if parents is None else parents[index]
        depth = 0 if parent < 0 else agreed[parent]
        is_right = 0 <= depth < num_left and token_id == text[position + depth]
        agreed.append(depth + 1 if is_right else -1)
    return max([0, *agreed])


def walk(text: Sequence[int], prompt_length: int, askers: Sequence[Asker]) -> list[Steps]:
    """Replay ``text`` from ``prompt_length`` on, once for each asker; return the steps of each asker.

    A step emits the accepted draft tokens and one more token from the target. So the last token of the text never
    counts as accepted. The askers advance together: no asker is called for a position before all others have passed the
    earlier positions.
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
    """The interface of another project's drafter. Token ids are contiguous int32[n] that the caller does not change."""

    distributions: tuple[str, ...]
    """The installed packages whose versions identify the drafter."""

    def apart(self, max_tokens: int, setting: Setting) -> Self:
        """Return the drafter to use for a setting.

        This is the same drafter if its state depends on the texts alone, else a new one without any text.
        """

    def start(self, request_id: str, prompt: TokenIds) -> None:
        """Begin a request."""

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Proposal:
        """Draft for a running request whose prompt and output so far are ``context``."""

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        """Append the emitted tokens to a running request."""

    def stop(self, request_id: str) -> None:
        """End a request. If the drafter stores texts, later requests can draft from its output."""


def together(outputs: Sequence[Steps]) -> Steps:
    """Concatenate the steps of several outputs."""
    if not outputs:
        return Steps(*np.empty((2, 0), np.int32))
    return Steps(*(np.concatenate(columns) for columns in zip(*outputs, strict=True)))
