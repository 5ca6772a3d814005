"""Slow twins of replaying: whole branches compared, one step after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.reference.tree import path_of


def longest_agreeing(token_ids: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> int:
    """Length of the longest branch that is a prefix of ``truth``."""
    branches = [[token_ids[i] for i in path_of(parents, index)] for index in range(len(token_ids))]
    return max((len(branch) for branch in branches if branch == list(truth[: len(branch)])), default=0)


def decode(
    text: Sequence[int], prompt_length: int, draft: Callable[[int], tuple[list[int], list[int]]]
) -> list[tuple[int, int]]:
    """(drafted, accepted) of every step; the text's last token is the target's own."""
    steps, position = [], prompt_length
    while position < len(text):
        token_ids, parents = draft(position)
        accepted = longest_agreeing(token_ids, parents, text[position:-1])
        steps.append((len(token_ids), accepted))
        position += accepted + 1
    return steps
