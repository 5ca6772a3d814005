"""Slow twins of replaying: whole branches compared, one step after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def branch_of(index: int, parents: Sequence[int]) -> list[int]:
    """Indices from the root to ``index``."""
    return [] if index < 0 else [*branch_of(parents[index], parents), index]


def longest_agreeing(token_ids: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> int:
    """Length of the longest branch that is a prefix of ``truth``."""
    branches = [[token_ids[i] for i in branch_of(index, parents)] for index in range(len(token_ids))]
    return max((len(branch) for branch in branches if branch == list(truth[: len(branch)])), default=0)


def tested(token_ids: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> list[tuple[int, bool]]:
    """Each token all of whose predecessors agree, where there is a truth for it; and whether it agrees."""
    found = []
    for index in range(len(token_ids)):
        *before, token_id = (token_ids[i] for i in branch_of(index, parents))
        if len(before) < len(truth) and before == list(truth[: len(before)]):
            found.append((index, token_id == truth[len(before)]))
    return found


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


def calibration_error(estimates: Sequence[float], hits: Sequence[int], num_bins: int) -> float:
    """Expected calibration error in bins of equal mass; equal estimates share the bin of the first of them."""
    ranked = sorted(estimates)
    bins: dict[int, list[tuple[float, int]]] = {}
    for estimate, hit in zip(estimates, hits, strict=True):
        bins.setdefault(ranked.index(estimate) * num_bins // len(ranked), []).append((estimate, hit))
    gaps = [abs(sum(hit - estimate for estimate, hit in found)) for found in bins.values()]
    return sum(gaps) / len(ranked)
