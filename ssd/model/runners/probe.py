"""Checks that split, batched and tree passes give the same logits as a single forward pass over the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ssd.model.target import Target, pad_rows

Ints = npt.NDArray[np.int64]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # the logits of positions as computed and as expected, [n, V] each

PASS_WIDTHS = (1, 2, 5, 16, 3, 33, 8)
_TREE_WIDTH, _TREE_EVERY = 9, 3


def score_tokens(target: Target, slot: int, tokens: Ints) -> torch.Tensor:
    """Append tokens, int64[n], to a KV cache slot and return a copy of their logits, [n, V]."""
    return target.forward([slot], tokens[None], [len(tokens)]).logits[0].clone()


def score_alone(target: Target, slot: int, text: Ints) -> torch.Tensor:
    """Return the logits of a text computed in one forward pass, in a slot that is empty before and afterwards."""
    found = score_tokens(target, slot, text)
    target.rollback(slot, 0)
    return found


def score_batched(
    target: Target,
    slots: Sequence[int],
    texts: Sequence[Ints],
    expected: Sequence[torch.Tensor],
    widths: Sequence[int] = PASS_WIDTHS,
    *,
    after_wrong: bool = False,
) -> Pairs:
    """Compute the logits of texts in batched forward passes, and return them together with the expected logits.

    Each slot must contain the beginning of its text, and is empty afterwards. The numbers of tokens per row and pass
    are taken from ``widths`` in rotation. ``expected`` are the logits of each text's last positions. With
    ``after_wrong``, a pass over wrong tokens is run and rolled back before each pass.
    """
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    number = 0
    while rows := [b for b, text in enumerate(texts) if target.length(slots[b]) < len(text)]:
        part_slots, starts = [slots[b] for b in rows], [target.length(slots[b]) for b in rows]
        parts = [texts[b][start:][: widths[(number + b) % len(widths)]] for b, start in zip(rows, starts, strict=True)]
        counts = [len(part) for part in parts]
        if after_wrong:
            target.forward(part_slots, pad_rows([(part[::-1] + 1) % target.vocab_size for part in parts]), counts)
            for slot, start in zip(part_slots, starts, strict=True):
                target.rollback(slot, start)
        logits = target.forward(part_slots, pad_rows(parts), counts).logits
        for row, (b, count) in enumerate(zip(rows, counts, strict=True)):
            found[b].append(logits[row, :count].clone())
        number += 1
    for slot in slots:
        target.rollback(slot, 0)
    whole = [torch.cat(each) for each in found]
    return [(each, wanted[-len(each) :]) for each, wanted in zip(whole, expected, strict=True)]


def score_as_trees(
    target: Target,
    slot: int,
    text: Ints,
    expected: torch.Tensor,
    random: np.random.Generator,
    most_nodes: int = 2 * _TREE_WIDTH,
) -> Pairs:
    """Compute a text's logits in passes over draft trees, and return them together with the expected logits.

    The text is the accepted path of the trees; the other nodes are random tokens at random places. The slot must
    contain the beginning of the text, and is empty afterwards.
    """
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
        target.accept_paths([slot], [len(nodes)], [np.array(path)])
    target.rollback(slot, 0)
    return found


def relative_error(pairs: Pairs) -> float:
    """Return the largest relative error of pairs of computed and expected logits: norm(difference) / norm(expected)."""
    return max(float((found - want).float().norm() / want.float().norm()) for found, want in pairs)
