"""The check that a position's logits are the same bits in every pass: at start-up, on the loaded weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

from ssd.model.target import Target, TokenMatrix, pad_rows

_LENGTHS = (61, 38, 17)
"""Of the texts, each in a slot of its own; and the most of them that are read."""
_WIDTHS = (1, 2, 5, 16, 3, 33, 8)
_PREFILLS = ((7, 40), (1, 9), (16, 55))
"""Tokens at once, and all tokens, that are read before what is scored."""
_TREE_EVERY = 3


@torch.inference_mode()
def different_positions(target: Target) -> Iterator[tuple[str, int, int]]:
    """For each kind of pass: what it is, positions compared, and those of which a logit is other bits.

    Texts of random tokens are scored in one pass each; then in passes of several widths, beside each other in rows of
    different length, behind prefills in parts, and as paths of trees where those are verified; each with an adapter of
    its own, where there are any. ``target`` must be empty, and is left so. Some 50 passes.
    """
    random = np.random.default_rng(0)
    lengths = [min(length, target.max_length - 1) for length in _LENGTHS[: target.num_slots]]
    texts = [random.integers(0, target.vocab_size, length) for length in lengths]
    slots = list(range(target.num_slots))[-len(texts) :][::-1]
    for slot, adapter in zip(slots, cycle([*sorted(target.adapter_names), None]), strict=False):
        target.adapters[slot] = adapter
    expected = [_alone(target, slot, text) for slot, text in zip(slots, texts, strict=True)]

    found = torch.cat(list(_in_parts(target, slots[0], texts[0], _WIDTHS)))
    yield _compared("several widths", [(found, expected[0])])
    yield _compared("rows beside each other", _together(target, slots, texts, expected))
    text, slot = texts[0], slots[0]
    for chunk, read in _PREFILLS:
        read = min(read, len(text) - 1)
        for first in range(0, read, chunk):
            part = text[first : min(first + chunk, read)]
            target.prefill([slot], part[None], [len(part)])
        after = _scored(target, slot, text[read:])
        target.rollback(slot, 0)
        yield _compared(f"behind a prefill by {chunk}", [(after, expected[0][read:])])
    if target.can_verify_trees:
        yield _compared("paths of trees", list(_trees(target, slots[0], texts[0], expected[0], random)))
    for slot in slots:
        target.adapters[slot] = None


def _alone(target: Target, slot: int, text: npt.NDArray[np.int64]) -> torch.Tensor:
    found = _scored(target, slot, text)
    target.rollback(slot, 0)
    return found


def _scored(target: Target, slot: int, tokens: npt.NDArray[np.int64]) -> torch.Tensor:
    return target.forward([slot], tokens[None], [len(tokens)]).logits[0].clone()


def _in_parts(target: Target, slot: int, text: npt.NDArray[np.int64], widths: Sequence[int]) -> Iterator[torch.Tensor]:
    """Logits of all positions, by passes of these widths in turn."""
    place = turn = 0
    while place < len(text):
        part = text[place : place + widths[turn % len(widths)]]
        yield _scored(target, slot, part)
        place, turn = place + len(part), turn + 1
    target.rollback(slot, 0)


def _together(
    target: Target, slots: Sequence[int], texts: Sequence[npt.NDArray[np.int64]], expected: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what rows say that are fed beside each other, some more tokens than others, and what was expected."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    places, turn = [0] * len(texts), 0
    while rows := [b for b, text in enumerate(texts) if places[b] < len(text)]:
        parts = [texts[b][places[b] :][: _WIDTHS[(turn + b) % len(_WIDTHS)]] for b in rows]
        tokens: TokenMatrix = pad_rows(parts)
        logits = target.forward([slots[b] for b in rows], tokens, [len(part) for part in parts]).logits
        for row, (b, part) in enumerate(zip(rows, parts, strict=True)):
            found.append((logits[row, : len(part)].clone(), expected[b][places[b] : places[b] + len(part)]))
            places[b] += len(part)
        turn += 1
    for slot in slots:
        target.rollback(slot, 0)
    return found


def _trees(
    target: Target, slot: int, text: npt.NDArray[np.int64], expected: torch.Tensor, random: np.random.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The text as the path of trees that have other nodes between."""
    place = 0
    while place < len(text):
        part = text[place : place + 9]
        nodes, parents, path = [int(part[0])], [-1], [0]
        room = target.max_length - place - len(part)
        for token in part[1:]:
            if len(nodes) - len(path) < room and random.integers(_TREE_EVERY):
                nodes.append(int(random.integers(0, target.vocab_size)))
                parents.append(int(random.integers(0, len(nodes) - 1)))
            parents.append(path[-1])
            path.append(len(nodes))
            nodes.append(int(token))
        found = target.forward_trees([slot], np.array([nodes]), [len(nodes)], np.array([parents])).logits[0]
        yield found[path].clone(), expected[place : place + len(part)]
        target.keep_paths([slot], [len(nodes)], [np.array(path)])
        place += len(part)
    target.rollback(slot, 0)


def _compared(what: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[str, int, int]:
    differ = sum(int((found != wanted).any(-1).sum()) for found, wanted in pairs)
    return what, sum(len(found) for found, _ in pairs), differ
