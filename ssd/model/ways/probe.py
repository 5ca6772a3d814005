"""Passes over texts that say what one pass over each text says: how targets are probed when they are opened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ssd.model.target import Target, pad_rows

Ints = npt.NDArray[np.int64]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Logits of positions, as they were found and as they should be, [n, V] each."""

PASS_WIDTHS = (1, 2, 5, 16, 3, 33, 8)
_TREE_WIDTH, _TREE_EVERY = 9, 3


def scored(target: Target, slot: int, tokens: Ints) -> torch.Tensor:
    """Logits of tokens, int64[n], that are appended to a slot: [n, V], a copy."""
    return target.forward([slot], tokens[None], [len(tokens)]).logits[0].clone()


def alone(target: Target, slot: int, text: Ints) -> torch.Tensor:
    """Logits of a text in one pass; the slot is empty, and is left so."""
    found = scored(target, slot, text)
    target.rollback(slot, 0)
    return found


def together(
    target: Target,
    slots: Sequence[int],
    texts: Sequence[Ints],
    expected: Sequence[torch.Tensor],
    widths: Sequence[int] = PASS_WIDTHS,
    *,
    after_wrong: bool = False,
) -> Pairs:
    """Of each text what is behind its beginning, which its slot holds; rows of some more tokens than others.

    ``expected`` : of each text's last positions. ``after_wrong`` : each pass comes after one over a wrong draft, which
    is taken back. Slots are left empty.
    """
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    turn = 0
    while rows := [b for b, text in enumerate(texts) if target.length(slots[b]) < len(text)]:
        of, starts = [slots[b] for b in rows], [target.length(slots[b]) for b in rows]
        parts = [
            texts[b][start:][: widths[(turn + b) % len(widths)]] for b, start in zip(rows, starts, strict=True)
        ]  # fmt: skip
        counts = [len(part) for part in parts]
        if after_wrong:
            target.forward(of, pad_rows([(part[::-1] + 1) % target.vocab_size for part in parts]), counts)
            for slot, start in zip(of, starts, strict=True):
                target.rollback(slot, start)
        logits = target.forward(of, pad_rows(parts), counts).logits
        for row, (b, count) in enumerate(zip(rows, counts, strict=True)):
            found[b].append(logits[row, :count].clone())
        turn += 1
    for slot in slots:
        target.rollback(slot, 0)
    whole = [torch.cat(each) for each in found]
    return [(each, wanted[-len(each) :]) for each, wanted in zip(whole, expected, strict=True)]


def as_trees(
    target: Target,
    slot: int,
    text: Ints,
    expected: torch.Tensor,
    random: np.random.Generator,
    most_nodes: int = 2 * _TREE_WIDTH,
) -> Pairs:
    """Of a text, behind what the slot holds of it, as the path of trees with other nodes between; it is left empty."""
    found, first, width = Pairs(), target.length(slot), min(_TREE_WIDTH, most_nodes)
    for place in range(first, len(text), width):
        part = text[place : place + width]
        nodes, parents, path = [int(part[0])], [-1], [0]
        room = min(target.max_length - place, most_nodes) - len(part)
        for token in part[1:]:
            if len(nodes) - len(path) < room and random.integers(_TREE_EVERY):
                nodes.append(int(random.integers(0, target.vocab_size)))
                parents.append(int(random.integers(0, len(nodes) - 1)))
            parents.append(path[-1])
            path.append(len(nodes))
            nodes.append(int(token))
        logits = target.forward([slot], np.array([nodes]), [len(nodes)], parents=np.array([parents])).logits[0]
        found.append((logits[path].clone(), expected[place - first : place - first + len(part)]))
        target.keep_paths([slot], [len(nodes)], [np.array(path)])
    target.rollback(slot, 0)
    return found


def relative_error(pairs: Pairs) -> float:
    """How far logits are from what they should be, as a share of their norm; the worst."""
    return max(float((found - want).float().norm() / want.float().norm()) for found, want in pairs)
