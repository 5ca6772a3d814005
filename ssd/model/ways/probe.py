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


def together(target: Target, slots: Sequence[int], texts: Sequence[Ints], expected: Sequence[torch.Tensor]) -> Pairs:
    """Of texts that are fed beside each other, some more tokens than others; all of each text is ``expected``."""
    found: Pairs = []
    places, turn = [0] * len(texts), 0
    while rows := [b for b, text in enumerate(texts) if places[b] < len(text)]:
        parts = [texts[b][places[b] :][: PASS_WIDTHS[(turn + b) % len(PASS_WIDTHS)]] for b in rows]
        logits = target.forward([slots[b] for b in rows], pad_rows(parts), [len(part) for part in parts]).logits
        for row, (b, part) in enumerate(zip(rows, parts, strict=True)):
            found.append((logits[row, : len(part)].clone(), expected[b][places[b] : places[b] + len(part)]))
            places[b] += len(part)
        turn += 1
    for slot in slots:
        target.rollback(slot, 0)
    return found


def as_trees(target: Target, slot: int, text: Ints, expected: torch.Tensor, random: np.random.Generator) -> Pairs:
    """Of a text that is the path of trees that have other nodes between."""
    found, place = Pairs(), 0
    while place < len(text):
        part = text[place : place + _TREE_WIDTH]
        nodes, parents, path = [int(part[0])], [-1], [0]
        room = target.max_length - place - len(part)
        for token in part[1:]:
            if len(nodes) - len(path) < room and random.integers(_TREE_EVERY):
                nodes.append(int(random.integers(0, target.vocab_size)))
                parents.append(int(random.integers(0, len(nodes) - 1)))
            parents.append(path[-1])
            path.append(len(nodes))
            nodes.append(int(token))
        logits = target.forward([slot], np.array([nodes]), [len(nodes)], parents=np.array([parents])).logits[0]
        found.append((logits[path].clone(), expected[place : place + len(part)]))
        target.keep_paths([slot], [len(nodes)], [np.array(path)])
        place += len(part)
    target.rollback(slot, 0)
    return found


def relative_error(pairs: Pairs) -> float:
    """How far logits are from what they should be, as a share of their norm; the worst."""
    return max(float((found - want).float().norm() / want.float().norm()) for found, want in pairs)
